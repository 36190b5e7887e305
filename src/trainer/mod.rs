//! The training loop: data, evaluations, checkpoints and observers around an [`Engine`](crate::engine::Engine).
//!
//! ```text
//! let mut trainer = Trainer::new(engine, &groups, data, TrainerOptions::default())?; // may resume a checkpoint
//! trainer.observe(&mut observer);
//! let report = trainer.train()?;   // steps, evaluations and checkpoints, until the last step
//! ```
//!
//! - [`Trainer`]: the training loop of one rank. Every rank of the mesh has one.
//! - [`TrainingData`]: the datasets of a run, by sequence length; [`DataStream`]: their micro batches on one rank.
//! - [`Observer`]: hooks of the training loop. [`MetricsFiles`], [`MemoryWatch`],
//!   [`Progress`](crate::monitor::Progress) and [`RunTotals`](crate::monitor::RunTotals) are observers.
//! - [`Resume`]: the checkpoint that a run resumes from.
//! - [`evaluate`]: the loss of held-out data.
//! - [`Job`]: a config file, from its data and its model to the trained ranks.
//!
//! The engine's config determines steps or epochs, seed, evaluations, early stopping and checkpoints.

mod agreement;
mod checkpoints;
mod created_dirs;
mod data_stream;
mod error;
mod evaluate;
mod evaluation_tracker;
mod event_files;
pub mod job;
mod memory_checkpoints;
mod memory_watch;
mod metrics_files;
mod observer;
mod options;
mod resume;
mod stragglers;
#[cfg(test)]
mod tests;
mod train;

pub use created_dirs::CreatedDirs;
pub use data_stream::{DataStream, Phase, TrainingData};
pub use error::TrainerError;
pub use evaluate::{Evaluation, evaluate};
pub use event_files::check_event_files;
pub use job::{Job, JobError, JobLog, JobOptions, JobReport};
pub use memory_watch::{MemoryWatch, PartMemory, RankMemory, StepMemory};
pub use metrics_files::MetricsFiles;
pub use observer::{Observer, ObserverError, StepEnd};
pub use options::{TrainReport, TrainerOptions, check_config};
pub use resume::{Resume, Resumed};
pub use train::Trainer;
