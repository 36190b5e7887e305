//! What can be wrong with a checkpoint, and what can go wrong while one is made.

use crate::comm::CommError;
use std::path::PathBuf;

/// Why there is no checkpoint, or why one is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system refused something.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried, as in "cannot {operation} …".
        operation: &'static str,
        /// With which file or directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The manifest is damaged or contradicts itself.
    #[error("{}: {reason}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint was written by a later version of this program.
    #[error("{}: format version {found}; this version reads up to {supported}", path.display())]
    NewerFormat {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The latest that is read.
        supported: u64,
    },
    /// A file has not the length that the manifest states.
    #[error("{}: {found} bytes, the manifest states {expected}", path.display())]
    FileSize {
        /// The file.
        path: PathBuf,
        /// Bytes by the manifest.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// A file has other content than was written.
    #[error("{}: damaged: its BLAKE3 is {found}, the manifest states {expected}", path.display())]
    FileHash {
        /// The file.
        path: PathBuf,
        /// Hash by the manifest.
        expected: String,
        /// Hash of what there is.
        found: String,
    },
    /// A file is no safetensors file, or belongs to another checkpoint.
    #[error("{}: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with its header.
        reason: String,
    },
    /// A tensor is not what the manifest calls for.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A parameter would become an infinity in the dtype of an export.
    #[error("parameter {name}: {value} is beyond the range of {dtype}: export another dtype")]
    OutOfRange {
        /// The parameter.
        name: String,
        /// The element.
        value: f32,
        /// The dtype.
        dtype: &'static str,
    },
    /// A sound checkpoint that is not of this model, optimizer or run.
    #[error("{}: {what} was {saved} when it was saved and is {wanted} in this run", path.display())]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: String,
        /// In the checkpoint.
        saved: String,
        /// What would fit.
        wanted: String,
    },
    /// Something on one rank kept a checkpoint from being saved; nothing was published.
    #[error("checkpoint of step {step} was not saved: rank {rank}: {reason}")]
    NotSaved {
        /// The step.
        step: u64,
        /// The first rank that failed, within the group that saves.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// One rank or more could not open or verify a checkpoint.
    #[error("rank {rank}: {reason}")]
    Refused {
        /// The first rank that refused, within the group that loads.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// There are checkpoints, and none of them verifies.
    #[error("{}: no checkpoint verifies; the newest: {newest}", directory.display())]
    NoneVerifies {
        /// Where they are.
        directory: PathBuf,
        /// What is wrong with the newest of them.
        newest: String,
    },
    /// Another job writes to the directory.
    #[error("{} is in use by {holder}", directory.display())]
    InUse {
        /// The directory.
        directory: PathBuf,
        /// What the lock file says of the job that holds it.
        holder: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl CheckpointError {
    /// Makes the conversion for `map_err` of an operation on a path.
    pub(super) fn io(
        operation: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { operation, path, source }
    }
}
