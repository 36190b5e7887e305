//! Tests of the real binary: its files and messages.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod bench;
mod checkpoint;
mod config;
mod data;
mod docs;
mod doctor;
mod errors;
#[cfg(unix)]
mod launch;
#[cfg(target_os = "linux")]
mod launch_nodes;
mod manual;
mod mesh;
mod monitor;
mod plan;
mod train;
mod verify;

use std::path::PathBuf;

/// Path of a fixture file that PyTorch computed.
fn golden(fixture: &str, file: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden");
    root.join(fixture).join(file).display().to_string()
}
