//! [`Job`]: a config file, from its data and its model to the trained ranks, as `ulysses train` does it.
//!
//! ```no_run
//! let report = ulysses::trainer::Job::from_config("configs/long_sequence.json")?.train()?;
//! println!("{}", report.summary);
//! # Ok::<(), ulysses::trainer::JobError>(())
//! ```
//!
//! A job joins the processes of a launcher, if there is one ([`JobRanks`]), resolves its config for them, and decides the
//! devices of its ranks ([`DevicePlacement`]). It reads the model ([`ModelSource`]) and the data ([`Sources`]), and checks
//! everything before any rank starts ([`PreparedJob`]). [`Job::train`] then starts the ranks, each with a [`Trainer`].

mod available;
mod checks;
mod comms;
mod devices;
mod join;
mod model_source;
mod options;
mod out_of_memory;
mod output;
mod planned_memory;
mod prepared;
mod ranks;
mod resolve;
mod sources;
#[cfg(test)]
mod tests;

pub use devices::{DevicePlacement, DeviceRequest};
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
pub use checks::{check_memory, config_launch_options, fit_model, launch_options};
#[doc(hidden)]
pub use devices::likely_device;
#[doc(hidden)]
pub use model_source::{check_exchange, check_layers, named_shape, resolve_ring};
#[doc(hidden)]
pub use prepared::config_warnings;
#[doc(hidden)]
pub use resolve::stated_mesh;
#[doc(hidden)]
pub use sources::open_tokenizer;

use super::event_files::EventFiles;
use super::{MemoryWatch, ObserverError, RankMemory, TrainReport, Trainer, TrainerError};
use crate::checkpoint::OutputLock;
use crate::comm::RankContext;
use crate::monitor::{Progress, RankComms, RankSummary, RunSummary, RunTotals, TraceData};
use candle_core::Device;
use serde::{Deserialize, Serialize};
use std::borrow::BorrowMut;
use std::path::{Path, PathBuf};

/// Adds observers to the trainer of a rank.
type AddObservers =
    Box<dyn for<'a> Fn(&'a PreparedJob, &mut Trainer<'a>) -> Result<(), ObserverError> + Send + Sync>;

/// A checked job whose ranks have not started: threads of this process, or the processes of the job that a launcher has
/// started, of which this is one. `R` is [`JobRanks`], or a reference to those of a process that leaves the job later than
/// the [`Job`] ends.
///
/// It writes what the config asks for, that is checkpoints and the files of `tensorboard` and `csv_monitor`, and nothing
/// else: other files are observers'. While it exists, it has the lock of its output directory.
pub struct Job<R = JobRanks> {
    /// Of the output directory, in the first process. Dropped before `ranks`, so that the directory is free when another
    /// process sees that this one has left.
    lock: Option<OutputLock>,
    has_output: bool,
    has_trained: bool,
    observers: Vec<AddObservers>,
    prepared: PreparedJob,
    ranks: R,
}

/// The result of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct JobReport {
    /// The end of the run.
    pub train: TrainReport,
    /// Whether the run was complete before this job, which then had nothing to do.
    pub was_complete: bool,
    /// The output directory, if the config asks for files; without `ulysses.output` it is a new one, `runs/NAME-N`.
    pub output: Option<PathBuf>,
    /// Loss, throughput, traffic and memory of all ranks; its `verbose` has more.
    pub summary: RunSummary,
    /// The collectives of each rank, planned and measured.
    pub comms: Vec<RankComms>,
    /// The memory of each rank.
    pub memory: Vec<RankMemory>,
    /// The timeline of all ranks, for [`JobOptions::tracer`].
    pub trace: TraceData,
}

/// The result of a rank.
#[derive(Serialize, Deserialize)]
struct RankReport {
    train: TrainReport,
    was_complete: bool,
    totals: RunTotals,
    summary: RankSummary,
    comms: RankComms,
    memory: RankMemory,
    trace: TraceData,
}

impl Job {
    /// Prepares what `ulysses train FILE` trains.
    ///
    /// # Errors
    /// Whatever is wrong with the config, the model, the data or the machine.
    pub fn from_config(file: impl AsRef<Path>) -> Result<Self, JobError> {
        Self::new(file.as_ref(), JobOptions::default())
    }

    /// As [`from_config`](Self::from_config), with the flags of the command.
    ///
    /// # Errors
    /// As for [`from_config`](Self::from_config).
    pub fn new(file: &Path, options: JobOptions) -> Result<Self, JobError> {
        Self::on(JobRanks::default(), file, options)
    }
}

impl<R: BorrowMut<JobRanks>> Job<R> {
    /// As [`Job::new`], on ranks that may outlive the job.
    ///
    /// # Errors
    /// As for [`Job::from_config`].
    pub fn on(mut ranks: R, file: &Path, options: JobOptions) -> Result<Self, JobError> {
        let joined = ranks.borrow_mut();
        let prepared = PreparedJob::new(joined, file, options);
        let mut prepared = joined.agree(prepared)?;
        prepared.decide_attention_output(joined)?;
        let (lock, observers) = (None, Vec::new());
        Ok(Self { lock, has_output: false, has_trained: false, observers, prepared, ranks })
    }

    /// Calls `add` with the trainer of each rank before it trains, to add observers
    /// ([`Trainer::observe`](super::Trainer::observe)). Its error ends the job.
    pub fn observe(
        &mut self,
        add: impl for<'a> Fn(&'a PreparedJob, &mut Trainer<'a>) -> Result<(), ObserverError>
        + Send
        + Sync
        + 'static,
    ) {
        self.observers.push(Box::new(add));
    }

    /// Prints the lines of [`Progress`] while the job trains.
    pub fn show_progress(&mut self) {
        self.observe(|job, trainer| {
            if trainer.group().rank() == 0 {
                trainer.observe(Progress::new(trainer.steps(), job.config.steps_per_print));
            }
            Ok(())
        });
    }

    /// Returns whether this process reports to the user; if ranks are processes, it is rank 0.
    pub fn is_first(&self) -> bool {
        self.ranks.borrow().is_first()
    }

    /// Returns the config, mesh, model and data.
    pub fn prepared(&self) -> &PreparedJob {
        &self.prepared
    }

    /// Creates and locks the output directory, as [`train`](Self::train) does if the config asks for files, and returns
    /// it. `check` runs in all processes before; a rejected job leaves nothing behind. Collective.
    ///
    /// # Errors
    /// A failed check, a directory that cannot be created, or one that another job uses.
    pub fn acquire_output(
        &mut self,
        check: impl FnOnce() -> Result<(), JobError>,
    ) -> Result<PathBuf, JobError> {
        self.lock = self.prepared.acquire_output(self.ranks.borrow_mut(), check)?;
        self.has_output = true;
        Ok(self.prepared.options.output.clone().unwrap_or_default())
    }

    /// Trains on all ranks, once. Every process gets the results of all.
    ///
    /// # Errors
    /// An output directory that cannot be used, the failure of a rank, or a second call. A checkpoint that does not fit the
    /// config is [`JobError::Usage`].
    pub fn train(&mut self) -> Result<JobReport, JobError> {
        if std::mem::replace(&mut self.has_trained, true) {
            return Err(JobError::run("a job trains once: `Job::train` was called before"));
        }
        if self.prepared.writes_output() && !self.has_output {
            self.acquire_output(|| Ok(()))?;
        }
        let (prepared, ranks) = (&self.prepared, self.ranks.borrow_mut());
        prepared.log_planned_memory(ranks);
        let train = |rank: &RankContext, device| train(prepared, &self.observers, rank, device);
        let world_size = prepared.mesh.world_size();
        let mut reports = ranks.launch(world_size, &prepared.launch, train)?;
        let trace = reports.iter_mut().map(|report| std::mem::take(&mut report.trace)).collect();
        let first = reports.first().ok_or_else(|| JobError::run("a mesh has a rank"))?;
        let (train, totals) = (first.train.clone(), first.totals.clone());
        let mut report = JobReport {
            train,
            was_complete: first.was_complete,
            output: prepared.options.output.clone(),
            summary: RunSummary { totals, ranks: Vec::new() },
            comms: Vec::new(),
            memory: Vec::new(),
            trace,
        };
        for RankReport { summary, comms, memory, .. } in reports {
            report.summary.ranks.push(summary);
            report.comms.push(comms);
            report.memory.push(memory);
        }
        Ok(report)
    }
}

/// Trains on one rank.
fn train(
    job: &PreparedJob,
    observers: &[AddObservers],
    rank: &RankContext,
    device: Device,
) -> Result<RankReport, TrainerError> {
    let _rank = tracing::info_span!("rank", rank = rank.rank).entered();
    let mut memory = MemoryWatch::new(job.tracer.clone(), rank.rank, device.clone());
    let mut totals = RunTotals::default();
    let mut trainer = job.trainer(rank, device).map_err(|error| job.explain(error, None))?;
    trainer.observe(&mut memory);
    trainer.observe(&mut totals);
    let was_complete = trainer.is_done();
    observers.iter().try_for_each(|add| add(job, &mut trainer)).map_err(TrainerError::Observer)?;
    // The last one, since observers may change the metrics.
    let output =
        job.options.output.as_ref().filter(|_| job.writes_event_files && rank.rank == 0 && !was_complete);
    if let Some(output) = output {
        trainer.observe(EventFiles::new(&job.config, output)?);
    }
    let train = trainer.train();
    let train = train.map_err(|error| job.explain(error, Some(trainer.engine())))?;
    let summary = trainer.engine().summary(&job.model.config, trainer.data().passes())?;
    let comms = comms::measure(job, &trainer, &summary);
    drop(trainer);
    let trace = job.tracer.as_ref().map(|tracer| tracer.take(rank.rank as u64)).unwrap_or_default();
    Ok(RankReport { train, was_complete, totals, summary, comms, memory: memory.finish(), trace })
}
