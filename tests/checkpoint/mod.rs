//! Checkpoints through the library: loading on any mesh, detection of damage, retention and export.

mod damage;
mod directory;
mod export;
mod frozen;
mod memory;
mod meshes;
mod offload;
mod skips;
mod training;
