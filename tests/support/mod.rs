//! Helpers shared by the integration tests.
//!
//! Every test binary compiles this module for itself and uses a part of it, so
//! what one of them leaves unused (or unreachable: a test binary exports
//! nothing) is not dead. And `unwrap` is how a test fails.
#![allow(dead_code, unused_imports, unused_macros, unreachable_pub, clippy::unwrap_used)]

pub mod comm;
pub mod compare;
pub mod device;
pub mod doubles;
pub mod golden;
pub mod llama_block;
pub mod mesh_run;
pub mod problems;
pub mod recorded;
pub mod reference;
