//! Checkpoints: saved by partition, published atomically, verified before use, and loaded on any mesh.
//!
//! A checkpoint is a directory `step_00000100` with one safetensors file per (dp partition, rank along tp,
//! kind of state) and a [`Manifest`] with the size and BLAKE3 hash of every file.
//!
//! - [`Saver`]: the collective save protocol. [`Storage`]: its file operations.
//! - [`newest`], [`open_verified`]: selection of the checkpoint to resume from.
//! - [`MemoryCopies`]: copies in the host memory of two nodes, from which a restarted run continues.
//! - [`Checkpoint`], [`Reader`]: reads of any range of a flat buffer of any mesh.
//! - [`export`]: export in Hugging Face's layout. [`diff`]: comparison of two checkpoints.
//! - [`save_tensors`], [`load_tensors`]: sharded tensors of a program of one's own.
//! - [`OutputLock`]: exclusive access to an output directory.
//!
//! The README of this folder documents the format and the protocol.

mod diff;
mod directory;
mod error;
mod evaluations;
mod export;
mod header;
mod initial_weights;
mod load;
mod lock;
mod manifest;
mod memory;
mod parameter_table;
mod save;
mod sharded_tensors;
mod state_file;
mod storage;
mod stored_layouts;
#[cfg(test)]
mod tests;

pub use diff::{Comparison, Comparisons, Difference, diff};
pub use directory::{BEST, LATEST, StepDirectory, read_pointer, saved_steps, step_directories, step_name};
pub use error::CheckpointError;
pub use evaluations::{EvaluationResult, EvaluationSummary};
pub use export::{ExportDtype, ExportOptions, ExportedModel, export};
pub use initial_weights::InitialWeights;
pub use load::{Checkpoint, NewestCheckpoint, Reader, newest, open_verified};
pub use lock::OutputLock;
pub use manifest::{
    DataCursor, FORMAT_VERSION, FileEntry, LossScalerState, MANIFEST, Manifest, MeshSizes, TrainingProgress,
};
pub use memory::{MemoryCheckpoint, MemoryCopies, NewestCopy};
pub use parameter_table::{ParameterEntry, ShardEntry, UnitEntry};
pub use save::{SaveOptions, SavedCheckpoint, Saver};
pub use sharded_tensors::{load_tensors, save_tensors};
pub use storage::{LocalStorage, Storage, StorageFile};
