//! Errors of the trainer.

use super::observer::ObserverError;
use crate::checkpoint::CheckpointError;
use crate::comm::CommError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::engine::EngineError;
use std::path::PathBuf;

/// An error of a training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// A step or an evaluation failed.
    #[error(transparent)]
    Engine(Box<EngineError>),
    /// A step or an evaluation of a job failed for lack of memory.
    #[error("out of memory {circumstances}")]
    OutOfMemory {
        /// When it failed, what is stored, what was planned, and what would need less.
        circumstances: String,
        /// The error.
        source: Box<EngineError>,
    },
    /// The config is incomplete.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// The data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint was not saved, or cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint does not match the run.
    #[error("{0}; the run cannot resume")]
    CannotResume(#[source] CheckpointError),
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// An observer failed.
    #[error(transparent)]
    Observer(ObserverError),
    /// A file of the run cannot be written.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed, with the path.
        what: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// `--resume` names a directory without checkpoints.
    #[error("{}: expected a checkpoint, or an output directory with checkpoints, found {found}", path.display())]
    NothingToResume {
        /// The directory.
        path: PathBuf,
        /// `neither`, or `nothing` if there is no such directory.
        found: &'static str,
    },
    /// Checkpoints need an output directory.
    #[error("the run saves or resumes checkpoints, but has no output directory: set `ulysses.output`")]
    NoOutput,
    /// The output directory contains checkpoints of another run.
    #[error(
        "{} contains checkpoints of an earlier run, up to {newest}: resume it, or choose another output directory",
        output.display()
    )]
    OutputInUse {
        /// The directory.
        output: PathBuf,
        /// The name of its newest checkpoint.
        newest: String,
    },
    /// The data does not match the config's `seq_len_schedule`.
    #[error(
        "the training data has {found} phase(s), but `ulysses.seq_len_schedule` has {expected}: the first must start at \
         step 0, and each later one at a step of the schedule"
    )]
    Phases {
        /// Phases of the config.
        expected: usize,
        /// Phases of the data.
        found: usize,
    },
    /// `ulysses.validation` without held-out data.
    #[error("`ulysses.validation` is set, but the training data has no held-out data")]
    NoHeldOutData,
    /// `keep_best` without evaluations.
    #[error(
        "`checkpoint.keep_best` requires `ulysses.validation`: the best checkpoint is the one with the lowest evaluation \
         loss"
    )]
    KeepBestWithoutValidation,
    /// Epochs with several sequence lengths.
    #[error(
        "`ulysses.epochs` cannot be combined with `ulysses.seq_len_schedule`, because an epoch has one sequence length: \
         set `ulysses.steps`"
    )]
    EpochsOfSeveralLengths,
    /// Epochs of weighted sources.
    #[error(
        "`ulysses.epochs` cannot be combined with weights in `ulysses.data`, because each source has its own epochs: set \
         `ulysses.steps`"
    )]
    EpochsOfWeightedSources,
    /// A number of samples that overflows.
    #[error("the number of samples in `ulysses.epochs` epochs overflows")]
    TooManyEpochs,
    /// A learning rate that ends with epochs whose number of steps is not set.
    #[error(
        "`scheduler.params.total_num_steps` is \"auto\" with `ulysses.epochs`: call `Config::resolve_steps` with \
         `TrainingData::steps_of_epochs` before `initialize`"
    )]
    OpenSchedule,
    /// The held-out data has no labels.
    #[error("the first {num_sequences} sequence(s) of the evaluation data have no labels")]
    NoLabels {
        /// Number of evaluated sequences.
        num_sequences: u64,
    },
}

impl From<EngineError> for TrainerError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Checkpoint(error) => Self::Checkpoint(*error),
            error => Self::Engine(Box::new(error)),
        }
    }
}

impl From<ConfigError> for TrainerError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

impl From<CommError> for TrainerError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
