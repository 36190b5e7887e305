//! Errors of saving, verifying and loading checkpoints.

use crate::comm::CommError;
use crate::model::ModelError;
use crate::placement::PlacementError;
use std::io::ErrorKind;
use std::path::PathBuf;

/// A failure to save, verify, load or export a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file operation failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// The operation, as in "cannot {operation} …".
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The directory of the initial model cannot be read.
    #[error(transparent)]
    Model(Box<ModelError>),
    /// The manifest is damaged or contradicts itself.
    #[error("{}: {reason}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// The reason, for the message.
        reason: String,
    },
    /// The checkpoint was written by a newer version of this program.
    #[error("{}: format version {found} is too new; this version reads up to {supported}", path.display())]
    NewerFormat {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The newest supported version.
        supported: u64,
    },
    /// The size of a file differs from the manifest.
    #[error("{}: file has {found} bytes, but the manifest states {expected}", path.display())]
    FileSize {
        /// The file.
        path: PathBuf,
        /// Size in the manifest.
        expected: u64,
        /// Actual size.
        found: u64,
    },
    /// The hash of a file differs from the manifest.
    #[error("{}: file is damaged: its BLAKE3 hash is {found}, but the manifest states {expected}", path.display())]
    FileHash {
        /// The file.
        path: PathBuf,
        /// Hash in the manifest.
        expected: String,
        /// Actual hash.
        found: String,
    },
    /// A file is not a safetensors file, or belongs to another checkpoint.
    #[error("{}: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The reason, for the message.
        reason: String,
    },
    /// A tensor does not match the manifest.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason, for the message.
        reason: String,
    },
    /// A sharded tensor cannot be saved, or not be loaded in the given placements.
    #[error("tensor {tensor}: {source}")]
    ShardedTensor {
        /// The tensor.
        tensor: String,
        /// The reason, for the message.
        source: Box<PlacementError>,
    },
    /// A parameter would overflow in the dtype of an export.
    #[error("parameter {name}: {value} is out of range for {dtype}; export with another dtype")]
    OutOfRange {
        /// The parameter.
        name: String,
        /// The element.
        value: f32,
        /// The dtype.
        dtype: &'static str,
    },
    /// A valid checkpoint of another model, optimizer or run.
    #[error("{}: {what} is {saved} in the checkpoint, but {wanted} in this run", path.display())]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: String,
        /// Value in the checkpoint.
        saved: String,
        /// Value in this run.
        wanted: String,
    },
    /// A rank failed to save its part; nothing was published.
    #[error("checkpoint of step {step} was not saved: rank {rank}: {reason}")]
    NotSaved {
        /// The step.
        step: u64,
        /// The first rank that failed, within the group that saves.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// At least one rank could not open or verify a checkpoint.
    #[error("rank {rank}: {reason}")]
    Refused {
        /// The first rank that failed, within the group that loads.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// The newest checkpoint cannot be read, but nothing shows that it is damaged.
    #[error(
        "rank {rank}: {reason}; it may be intact, so it is not skipped: fix the cause, or resume from an older checkpoint by its directory \
         with another output"
    )]
    Unreadable {
        /// The first rank that failed, within the group that loads.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// No checkpoint in the directory is valid.
    #[error("{}: no valid checkpoint; error of the newest: {newest}", directory.display())]
    NoneVerifies {
        /// The directory.
        directory: PathBuf,
        /// The error of the newest checkpoint.
        newest: String,
    },
    /// Another job writes to the directory.
    #[error("{} is in use by {holder}", directory.display())]
    InUse {
        /// The directory.
        directory: PathBuf,
        /// The job that holds the lock, according to the lock file.
        holder: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl From<ModelError> for CheckpointError {
    fn from(error: ModelError) -> Self {
        Self::Model(Box::new(error))
    }
}

impl CheckpointError {
    /// Returns whether the checkpoint is damaged or incomplete. Otherwise it may be intact, and only this program or this user
    /// cannot read it.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            // Without a number of the operating system: the file is of another kind, or ends too early.
            Self::Io { source, .. } => {
                source.raw_os_error().is_none()
                    || matches!(
                        source.kind(),
                        ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory
                    )
            }
            Self::Manifest { .. }
            | Self::FileSize { .. }
            | Self::FileHash { .. }
            | Self::Header { .. }
            | Self::Tensor { .. } => true,
            _ => false,
        }
    }

    /// Returns a converter for `map_err` of an operation on a sharded tensor.
    pub(super) fn of_tensor<E: Into<PlacementError>>(tensor: &str) -> impl FnOnce(E) -> Self + use<E> {
        let tensor = tensor.to_owned();
        move |source| Self::ShardedTensor { tensor, source: Box::new(source.into()) }
    }

    /// Returns a converter for `map_err` of an operation on a path.
    pub(super) fn io(
        operation: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { operation, path, source }
    }
}
