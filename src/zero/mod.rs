//! ZeRO: optimizer state, gradients and parameters partitioned, by default over the `dp` axis
//! (arXiv 1910.02054).
//!
//! A model's parameters come in units (the embedding, every layer, the head). Each unit is one flat, padded
//! buffer in contiguous partitions, one per rank of the ZeRO world: by default `dp_size`, whatever `sp_size` is.
//! The ranks of an sp group hold the same partition. They update it redundantly, from a gradient that is
//! summed over sp. By choice, partitions span `dp` and `sp`, or only a part of `dp` with replicas over the rest
//! ([`TrainingGroups`](crate::comm::TrainingGroups)).
//!
//! | stage | partitioned |
//! |---|---|
//! | 0 | nothing |
//! | 1 | optimizer state |
//! | 2 | and gradients: only this rank's partition outlives a unit's backward |
//! | 3 | and parameters: gathered for a unit's forward and backward, released after |
//!
//! - [`FlatLayout`]: offsets and partitions of a unit. Pure integers.
//! - [`ZeroOptimizer`]: storage, gathering, reduction and update of all units.
//! - [`Storage`]: device and element type, and what is offloaded.
//! - [`StateBytes`]: persistent bytes by formula, to compare with the allocator's count.
//!
//! The folder's README explains the order of summation, and which stages it makes bit-equal.

mod buffer_layout;
mod error;
mod finite;
mod flat_unit;
mod layout;
mod optimizer;
mod reduce;
mod state;
#[cfg(test)]
mod tests;
mod unit_split;
mod update;

pub use buffer_layout::{Buffer, BufferLayout, CheckpointPart, Division, PartReplica, ZeroAxis};
pub use error::ZeroError;
pub use layout::{FlatLayout, FlatParameter, Piece};
pub use optimizer::{Initialize, ZeroOptimizer};
pub(crate) use state::Comparison;
pub use state::{RestoreState, StateBytes, StateIndex, StateSlice, Storage};
