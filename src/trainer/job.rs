//! [`Job`]: a config file, from its data and its model to the trained ranks, as `ulysses train` does it.
//!
//! ```no_run
//! let report = ulysses::trainer::Job::from_config("configs/long_sequence.json")?.train()?;
//! println!("{}", report.summary);
//! # Ok::<(), ulysses::trainer::JobError>(())
//! ```
//!
//! 1. [`JobRanks`] joins the processes of a launcher's job, if there is one ([`join()`]), resolves the config for it, and
//!    decides the devices of the ranks ([`DevicePlacement`]).
//! 2. [`PreparedJob`] reads the model ([`ModelSource`]) and the data ([`Sources`]), and checks everything before any rank
//!    starts. [`PreparedJob::decide_attention_output`] and [`PreparedJob::acquire_output`] then agree with the other
//!    processes on what depends on all machines.
//! 3. [`PreparedJob::run`] starts the ranks, and [`PreparedJob::trainer`] creates the trainer of each.

mod available;
mod checks;
mod devices;
mod join;
mod model_source;
mod options;
mod output;
mod planned_memory;
mod prepared;
mod ranks;
mod sources;
#[cfg(test)]
mod tests;

pub use devices::{DevicePlacement, DeviceRequest};
pub use join::join;
pub use model_source::ModelSource;
pub use options::{JobError, JobLog, JobOptions, OpenTokenizer};
pub use planned_memory::PlannedMemory;
pub use prepared::PreparedJob;
pub use ranks::JobRanks;
pub use sources::Sources;

// For the command: checks and steps that its other subcommands share with a job.
#[doc(hidden)]
pub use available::{GPU_RESERVE_BYTES, meminfo_bytes, proc_bytes};
#[doc(hidden)]
pub use checks::{check_memory, launch_options};
#[doc(hidden)]
pub use devices::likely_device;
#[doc(hidden)]
pub use join::{check_backend, check_build, check_processes, check_threads, launched_backend};
#[doc(hidden)]
pub use model_source::{check_exchange, check_layers, named_shape, resolve_ring};
#[doc(hidden)]
pub use prepared::config_warnings;
#[doc(hidden)]
pub use ranks::{resolve, with_location};
#[doc(hidden)]
pub use sources::open_tokenizer;

use super::event_files::EventFiles;
use super::{Observer, ObserverError, TrainReport, Trainer, TrainerError};
use crate::comm::RankContext;
use crate::config::Overrides;
use crate::monitor::{Progress, RankSummary, RunSummary, RunTotals};
use candle_core::Device;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Adds an observer to the trainer of a rank, if the rank has it.
type AddObserver = Box<dyn Fn(&mut Trainer<'_>) -> Result<(), ObserverError> + Send + Sync>;

/// A checked job whose ranks have not started: threads of this process, or the processes of the job that a launcher has
/// started, of which this is one.
///
/// It writes what the config asks for, that is checkpoints and the files of `tensorboard` and `csv_monitor`, and nothing
/// else: other files are observers'. ([`MetricsFiles`](super::MetricsFiles) would write these files a second time.) While
/// it trains, it has the lock of its output directory.
pub struct Job {
    ranks: JobRanks,
    prepared: PreparedJob,
    observers: Vec<AddObserver>,
}

/// The result of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct JobReport {
    /// The end of the run.
    pub train: TrainReport,
    /// The output directory, if the config asks for files; without `ulysses.output` it is a new one, `runs/NAME-N`.
    pub output: Option<PathBuf>,
    /// Loss, throughput, traffic and memory of all ranks; its `verbose` has more.
    pub summary: RunSummary,
}

/// The result of a rank.
#[derive(Serialize, Deserialize)]
struct RankReport {
    train: TrainReport,
    totals: RunTotals,
    summary: RankSummary,
}

impl Job {
    /// Prepares what `ulysses train FILE` trains.
    ///
    /// # Errors
    /// Whatever is wrong with the config, the model, the data or the machine.
    pub fn from_config(file: impl AsRef<Path>) -> Result<Self, JobError> {
        Self::new(file.as_ref(), JobOptions::default(), Overrides::default())
    }

    /// As [`from_config`](Self::from_config), with the flags of the command.
    ///
    /// # Errors
    /// As for [`from_config`](Self::from_config).
    pub fn new(file: &Path, options: JobOptions, overrides: Overrides) -> Result<Self, JobError> {
        let mut ranks = JobRanks::default();
        let prepared = PreparedJob::new(&mut ranks, file, options, |_, _| Ok(overrides));
        let mut prepared = ranks.agree(prepared, JobError::is_usage)?;
        prepared.decide_attention_output(&mut ranks)?;
        Ok(Self { ranks, prepared, observers: Vec::new() })
    }

    /// Adds an observer to the ranks for which `new_observer` returns one. Its error ends the job.
    pub fn observe<O: Observer + 'static>(
        &mut self,
        new_observer: impl Fn(&Trainer<'_>) -> Result<Option<O>, ObserverError> + Send + Sync + 'static,
    ) {
        self.observers.push(Box::new(move |trainer| {
            if let Some(observer) = new_observer(trainer)? {
                trainer.observe(observer);
            }
            Ok(())
        }));
    }

    /// Prints the lines of [`Progress`] while the job trains.
    pub fn show_progress(&mut self) {
        let steps_per_print = self.prepared.config.steps_per_print;
        self.observe(move |trainer| {
            Ok((trainer.group().rank() == 0).then(|| Progress::new(trainer.steps(), steps_per_print)))
        });
    }

    /// Returns whether this process reports to the user; if ranks are processes, it is rank 0.
    pub fn is_first(&self) -> bool {
        self.ranks.is_first()
    }

    /// Returns the config, mesh, model and data.
    pub fn prepared(&self) -> &PreparedJob {
        &self.prepared
    }

    /// Trains on all ranks. Every process gets the results of all.
    ///
    /// # Errors
    /// An output directory that cannot be used, or the failure of a rank.
    pub fn train(self) -> Result<JobReport, JobError> {
        let Self { mut ranks, mut prepared, observers } = self;
        let acquired = prepared.writes_output().then(|| prepared.acquire_output(&mut ranks, || Ok(())));
        let _lock = acquired.transpose()?;
        prepared.log_planned_memory(&ranks);
        let reports = prepared.run(&mut ranks, |rank, device| train(&prepared, &observers, rank, device))?;
        let summaries = reports.iter().map(|report| report.summary.clone()).collect();
        let first = reports.into_iter().next().ok_or_else(|| JobError::run("a mesh has a rank"))?;
        let summary = RunSummary { totals: first.totals, ranks: summaries };
        Ok(JobReport { train: first.train, output: prepared.output, summary })
    }
}

/// Trains on one rank.
fn train(
    prepared: &PreparedJob,
    observers: &[AddObserver],
    rank: &RankContext,
    device: Device,
) -> Result<RankReport, TrainerError> {
    let _rank = tracing::info_span!("rank", rank = rank.rank).entered();
    let mut totals = RunTotals::default();
    let mut trainer = prepared.trainer(rank, device)?;
    trainer.observe(&mut totals);
    observers.iter().try_for_each(|add| add(&mut trainer)).map_err(TrainerError::Observer)?;
    // The last one, since observers may change the metrics.
    if let Some(output) = prepared.output.as_ref().filter(|_| rank.rank == 0 && !trainer.is_done()) {
        trainer.observe(EventFiles::new(&prepared.config, output)?);
    }
    let train = trainer.train()?;
    let summary = trainer.engine().summary(&prepared.model.config, trainer.data().passes())?;
    drop(trainer);
    Ok(RankReport { train, totals, summary })
}
