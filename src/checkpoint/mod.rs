//! Checkpoints: saved by partition, published at once or not at all, verified before they are
//! used, and loaded on any mesh.
//!
//! A checkpoint is a directory `step_00000100` with one safetensors file per (dp partition,
//! kind of state) and a [`Manifest`] that has the size and the BLAKE3 of every file.
//!
//! - [`Saver`]: the protocol that the ranks follow. [`Storage`]: the file operations it is
//!   made of.
//! - [`newest`], [`open_verified`]: which checkpoint a run goes on from.
//! - [`Checkpoint`], [`Reader`]: any range of any unit, from whatever partitions hold it.
//! - [`export`]: the parameters in Hugging Face's layout; [`diff`]: two checkpoints compared.
//! - [`OutputLock`]: one job per output directory.
//!
//! The folder's README has the format and the protocol, and what follows from their order.

mod diff;
mod directory;
mod error;
mod evaluations;
mod export;
mod header;
mod load;
mod lock;
mod manifest;
mod save;
mod state_file;
mod storage;

pub use diff::{Comparison, Comparisons, diff};
pub use directory::{BEST, LATEST, StepDirectory, read_pointer, saved_steps, step_directories, step_name};
pub use error::CheckpointError;
pub use evaluations::{EvaluationResult, EvaluationSummary};
pub use export::{ExportDtype, ExportOptions, ExportedModel, export};
pub use load::{Checkpoint, NewestCheckpoint, Reader, newest, open_verified};
pub use lock::OutputLock;
pub use manifest::{
    DataCursor, FORMAT_VERSION, FileEntry, LossScalerState, MANIFEST, Manifest, MeshSizes, ParameterEntry,
    TrainingProgress, UnitEntry, file_name,
};
pub use save::{SaveOptions, SavedCheckpoint, Saver};
pub use storage::{LocalStorage, Storage, StorageFile};
