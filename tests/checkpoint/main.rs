//! Checkpoints through the library: loading on any mesh, detection of damage, retention and export.

#![allow(clippy::unwrap_used)]

mod damage;
mod directory;
mod export;
mod frozen;
mod memory;
mod meshes;
mod offload;
#[path = "../support/sample.rs"]
mod sample;
mod skips;
mod training;
