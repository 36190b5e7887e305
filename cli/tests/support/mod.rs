//! Helpers of the command's tests: those of the library, and [`cli`].

#![allow(dead_code, unused_imports, unreachable_pub, clippy::unwrap_used)]

pub mod cli;
#[path = "../../../tests/support/mod.rs"]
mod library;

pub use library::*;
