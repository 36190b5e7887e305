//! Checkpoints through the library: what is saved on one mesh is there on any other, what was
//! damaged is refused by name, and what was verified stays.

#![allow(clippy::unwrap_used)]

mod damage;
mod directory;
mod export;
mod frozen;
mod meshes;
mod offload;
mod skips;
mod training;
