//! Tests of the real binary: its files and messages.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod bench;
mod checkpoint;
mod config;
mod data;
mod datasets;
#[cfg(unix)]
mod disk;
mod doctor;
mod earlier_version;
mod evaluations;
mod fit;
mod flexible_sp;
mod hybrid_meshes;
#[cfg(unix)]
mod launch;
#[cfg(target_os = "linux")]
mod launch_nodes;
#[cfg(unix)]
mod limits;
mod manual;
mod mesh;
mod monitors;
mod partitions;
mod parts;
mod plan;
mod plan_times;
mod refused_arguments;
mod refused_batches;
mod refused_files;
mod refused_models;
mod report;
mod resume;
mod rings;
mod trace;
mod train;
mod verify;

use std::path::PathBuf;

/// Path of a fixture file that PyTorch computed.
fn golden(fixture: &str, file: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden");
    root.join(fixture).join(file).display().to_string()
}
