//! Helpers of the command's tests: those of the library, [`cli`] and [`processes`].

#![allow(dead_code, unused_imports, unreachable_pub, clippy::unwrap_used)]

pub mod cli;
#[path = "../../../tests/support/mod.rs"]
mod library;
pub mod processes;

pub use library::*;
