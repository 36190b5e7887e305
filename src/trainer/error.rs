//! Errors of the trainer.

use super::observer::ObserverError;
use crate::checkpoint::CheckpointError;
use crate::comm::CommError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::engine::EngineError;
use std::path::PathBuf;

/// What can go wrong in a training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// A step or an evaluation failed.
    #[error(transparent)]
    Engine(Box<EngineError>),
    /// The config lacks what a run needs.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// The data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint was not saved, or cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint does not fit the run.
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
        /// What was tried, with the path.
        what: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// `--resume` names a directory without checkpoints.
    #[error("{}: neither a checkpoint nor an output directory that holds one", path.display())]
    NothingToResume {
        /// The directory.
        path: PathBuf,
    },
    /// Checkpoints need an output directory.
    #[error("the run saves or resumes checkpoints, but has no output directory: give `ulysses.output`")]
    NoOutput,
    /// The output directory holds the checkpoints of another run.
    #[error(
        "{} holds checkpoints of an earlier run, up to {newest}: resume it, or choose another output directory",
        output.display()
    )]
    OutputInUse {
        /// The directory.
        output: PathBuf,
        /// Name of its newest checkpoint.
        newest: String,
    },
    /// The data does not follow the config's `seq_len_schedule`.
    #[error(
        "the training data has {found} phase(s), but `ulysses.seq_len_schedule` makes {expected}: the first begins with \
         step 0, and each later one with a step of the schedule"
    )]
    Phases {
        /// Phases by the config.
        expected: usize,
        /// Phases of the data.
        found: usize,
    },
    /// `ulysses.validation` without held-out data.
    #[error("`ulysses.validation` asks for evaluations, but the training data has no held-out part")]
    NoHeldOutData,
    /// `keep_best` without evaluations.
    #[error(
        "`checkpoint.keep_best` needs the section `ulysses.validation`: the best checkpoint is the one with the lowest \
         evaluation loss"
    )]
    KeepBestWithoutValidation,
    /// Epochs of sequences of several lengths.
    #[error(
        "`ulysses.epochs` and `ulysses.seq_len_schedule`: an epoch is one of rows of one length, give `ulysses.steps`"
    )]
    EpochsOfSeveralLengths,
    /// Epochs of weighted sources.
    #[error(
        "`ulysses.epochs` and weights in `ulysses.data`: weighted sources have epochs of their own, give `ulysses.steps`"
    )]
    EpochsOfWeightedSources,
    /// More samples than 64 bits count.
    #[error("so many epochs have more samples than can be counted")]
    TooManyEpochs,
    /// The held-out data has no label.
    #[error("no token of the first {num_sequences} row(s) of the data to evaluate has a label")]
    NoLabels {
        /// Sequences that were looked at.
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
