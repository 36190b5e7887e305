//! Helpers shared by the integration tests.
//!
//! Every test binary compiles this module and uses only a part of it, so unused and unreachable items are allowed.
//! Tests fail by `unwrap`.
#![allow(dead_code, unused_imports, unused_macros, unreachable_pub, clippy::unwrap_used)]

pub mod comm;
pub mod compare;
pub mod device;
pub mod doubles;
pub mod features;
pub mod golden;
pub mod llama_block;
pub mod mesh_run;
pub mod problems;
pub mod recorded;
pub mod reference;
pub mod reference_model;
pub mod run_case;
pub mod sample;
pub mod sink_doubles;
pub mod vocab_doubles;
