//! [`Trainer`]: the training loop of one rank.

use super::agreement::check_agreement;
use super::checkpoints::{Checkpoints, SaveOutcome};
use super::data_stream::{DataStream, TrainingData};
use super::error::TrainerError;
use super::evaluate::{broadcast_loss, broadcast_value, evaluate};
use super::evaluation_tracker::EvaluationTracker;
use super::memory_checkpoints::MemoryCheckpoints;
use super::observer::{Observer, ObserverError, StepEnd};
use super::options::{TrainReport, TrainerOptions, check_config};
use super::resume::{Resumed, Resumption};
use super::stragglers::Stragglers;
use crate::checkpoint::{EvaluationResult, step_directories};
use crate::comm::{CommError, MeshGroups, ProcessGroup, ProcessGroupExt, ReduceOp};
use crate::engine::{Engine, EngineError, RunRecord};
use crate::monitor::{EvalMetrics, Metrics};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The training loop of one rank. Every rank of the mesh has one, and all call the same methods in the same order.
pub struct Trainer<'a> {
    engine: Engine,
    data: DataStream,
    checkpoints: Option<Checkpoints>,
    memory: Option<MemoryCheckpoints>,
    evaluations: EvaluationTracker,
    observers: Vec<Box<dyn Observer + 'a>>,
    /// A separate group of all ranks, so that its traffic does not count for a step.
    group: Arc<dyn ProcessGroup>,
    options: TrainerOptions,
    run_id: String,
    resumed: Option<Resumed>,
    /// Steps completed at the start, and at the end of the run.
    steps: Range<u64>,
}

impl<'a> Trainer<'a> {
    /// Prepares the training of `engine` on `data`, and resumes the checkpoint of [`TrainerOptions::resume`]. `groups` are
    /// the groups of the engine. Collective.
    ///
    /// # Errors
    /// When [`check_config`] fails, the data does not match the config, a checkpoint cannot be resumed, or the ranks have
    /// different configs or data.
    pub fn new(
        mut engine: Engine,
        groups: &MeshGroups,
        data: TrainingData,
        mut options: TrainerOptions,
    ) -> Result<Self, TrainerError> {
        check_config(engine.config())?;
        let all = groups.whole()?;
        let group = all.split("control", Some(0), all.rank())?.unwrap_or(all);
        if group.rank() != 0 {
            options.log = |_| ();
        }
        if options.output.is_none() {
            options.output = engine.config().ulysses.output.as_ref().map(PathBuf::from);
        }
        let has_held_out = data.phases().iter().all(|phase| phase.held_out.is_some());
        if engine.config().ulysses.validation.is_some() && !has_held_out {
            return Err(TrainerError::NoHeldOutData);
        }
        let mut evaluations = EvaluationTracker::new(engine.config(), data.held_out_hash());
        let mut data = DataStream::new(data, engine.config(), engine.data_rank(), engine.document_cost())?;
        prepare_output(&engine, &*group, &options)?;
        let checkpoints = Checkpoints::new(&engine, &group, options.output.as_deref())?;
        let memory = MemoryCheckpoints::new(&engine, &group, options.memory_dir.as_deref(), options.log)?;
        let new_run_id = format!("{:016x}", broadcast_value(&*group, new_run_id())?);
        let mut resumed = None;
        if let Some(resume) = &options.resume {
            let resumption = Resumption {
                engine: &mut engine,
                data: &mut data,
                evaluations: &mut evaluations,
                group: &*group,
                output: options.output.as_deref(),
                memory: memory.as_ref(),
                reset_data: options.reset_data,
                log: options.log,
            };
            resumed = resumption.restore(resume)?;
        }
        let run_id = resumed.as_ref().map_or(new_run_id, |resumed| resumed.run_id.clone());
        let first_step = engine.attempted_steps();
        let steps = first_step..data.last_step(first_step);
        check_agreement(&mut engine, data.data(), &options.model, steps.end)?;
        let observers: Vec<Box<dyn Observer + 'a>> = vec![Box::new(Stragglers::new(groups)?)];
        Ok(Self {
            engine,
            data,
            checkpoints,
            memory,
            evaluations,
            observers,
            group,
            options,
            run_id,
            resumed,
            steps,
        })
    }

    /// Adds an observer, after the previous ones. It may be a `&mut` reference that the caller uses afterwards.
    pub fn observe(&mut self, observer: impl Observer + 'a) {
        self.observers.push(Box::new(observer));
    }

    /// Returns the engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the engine, and drops the trainer.
    pub fn into_engine(self) -> Engine {
        self.engine
    }

    /// Returns the data.
    pub fn data(&self) -> &DataStream {
        &self.data
    }

    /// Returns a group of all ranks, for communication that is not part of a step.
    pub fn group(&self) -> &dyn ProcessGroup {
        &*self.group
    }

    /// Returns the id of the run, which stays the same when it is resumed.
    pub fn run_id(&self) -> &str {
        &self.run_id
    }

    /// Returns the checkpoint that the run was resumed from, if it was.
    pub fn resumed(&self) -> Option<&Resumed> {
        self.resumed.as_ref()
    }

    /// Returns the steps completed at the start, and at the end of the run.
    pub fn steps(&self) -> Range<u64> {
        self.steps.clone()
    }

    /// Returns whether the run is complete.
    pub fn is_done(&self) -> bool {
        self.engine.attempted_steps() >= self.steps.end || self.evaluations.stops_early()
    }

    /// Trains to the last step, with the evaluations and checkpoints of the config. Collective.
    ///
    /// # Errors
    /// When a step, an evaluation, a save or an observer fails.
    pub fn train(&mut self) -> Result<TrainReport, TrainerError> {
        if !self.is_done() {
            let none = || "checkpoints: none; `checkpoint.interval` saves them".to_owned();
            (self.options.log)(&self.checkpoints.as_ref().map_or_else(none, Checkpoints::describe));
            if let Some(imbalance) = self.data.imbalance()? {
                (self.options.log)(&format!(
                    "flexible sp: planned imbalance of the next step: {imbalance:.2} (maximum / mean compute per rank)"
                ));
            }
        }
        if !self.is_done() && self.steps.start == 0 {
            self.evaluate_if_due(0)?;
        }
        let mut stopped = false;
        while !self.is_done() && !stopped {
            let step = self.step()?;
            self.evaluate_if_due(step)?;
            stopped = self.stop_is_requested()?;
            let is_last = stopped || self.is_done();
            self.save_if_due(step, is_last)?;
            self.copy_if_due(step, is_last)?;
            let is_saving = self.checkpoints.as_ref().is_some_and(Checkpoints::is_saving);
            self.notify(|observer, _| observer.after_step(is_saving))?;
        }
        self.engine.check_replicas()?;
        self.notify(|observer, _| observer.on_train_end())?;
        Ok(TrainReport {
            steps: self.engine.attempted_steps(),
            last_step: self.steps.end,
            stopped,
            stopped_early: self.evaluations.stops_early().then(|| self.evaluations.reason()),
            checkpoint: self.checkpoints.as_ref().and_then(Checkpoints::newest),
            evaluations: self.evaluations.state,
        })
    }

    /// Executes one step; returns its number.
    fn step(&mut self) -> Result<u64, TrainerError> {
        let done = self.engine.attempted_steps();
        let _step = tracing::debug_span!("step", step = done + 1, done = done - self.steps.start).entered();
        let start = Instant::now();
        if self.data.begin_step(done)? {
            // Buffers of the old length are not needed any more.
            self.engine.free_recycled_storage()?;
        }
        let phase = self.data.phase();
        let (seq_len, padding_share) = (phase.data.seq_len(), phase.data.padding_share());
        self.notify(|observer, engine| observer.on_step_begin(engine, seq_len))?;
        let report = self.engine.train_batch(|| self.data.next_micro_batch())?;
        // A GPU may still be computing the update: the step ends with it.
        self.engine.workspace().options().device.synchronize().map_err(EngineError::from)?;
        self.group().check().map_err(EngineError::from)?;
        let (step_seconds, data_seconds) = (start.elapsed().as_secs_f64(), self.data.take_wait_seconds());
        let time = self.engine.take_times()?.shares(step_seconds, data_seconds);
        let mesh = self.engine.config().mesh.shape();
        let of_engine = report.metrics(step_seconds);
        let metrics = Metrics { data_seconds, padding_share, time, mesh, ..of_engine };
        let mut step = StepEnd { metrics, seq_len };
        self.notify(|observer, engine| observer.on_step_end(engine, &mut step))?;
        Ok(report.step)
    }

    fn notify(
        &mut self,
        mut hook: impl FnMut(&mut dyn Observer, &mut Engine) -> Result<(), ObserverError>,
    ) -> Result<(), TrainerError> {
        let mut observers = self.observers.iter_mut();
        observers
            .try_for_each(|observer| hook(&mut **observer, &mut self.engine))
            .map_err(TrainerError::Observer)
    }

    /// Evaluates the held-out data after `step` steps, if it is due. Collective.
    fn evaluate_if_due(&mut self, step: u64) -> Result<(), TrainerError> {
        let config = self.engine.config();
        let (Some(validation), Some(held_out)) = (&config.ulysses.validation, &self.data.phase().held_out)
        else {
            return Ok(());
        };
        let is_due = match step {
            0 => validation.eval_on_start,
            _ => {
                step == self.steps.end
                    || validation.interval.is_some_and(|interval| step.is_multiple_of(interval))
            }
        };
        if !is_due {
            return Ok(());
        }
        let start = Instant::now();
        let max_sequences =
            validation.batches.map(|batches| batches.saturating_mul(config.train_batch_size as u64));
        let evaluation = evaluate(&mut self.engine, held_out, max_sequences)?;
        self.data.add_evaluated(evaluation.micro_batches);
        let eval_loss = broadcast_loss(&*self.group, evaluation.loss())?;
        self.evaluations.record(EvaluationResult { step, loss: eval_loss });
        let metrics = EvalMetrics {
            step,
            eval_loss,
            eval_perplexity: eval_loss.exp(),
            eval_tokens: evaluation.sum.valid_tokens,
            eval_seconds: start.elapsed().as_secs_f64(),
        };
        self.notify(|observer, _| observer.on_evaluate(&metrics))
    }

    /// Returns whether any rank was requested to stop. Collective.
    fn stop_is_requested(&self) -> Result<bool, CommError> {
        let own = i64::from(self.options.stop.load(Ordering::Relaxed));
        Ok(self.group.all_reduce_values(&[own], ReduceOp::Max)?[0] == 1)
    }

    /// Saves what is due after `step`. Collective.
    fn save_if_due(&mut self, step: u64, is_last: bool) -> Result<(), TrainerError> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let is_due = is_last || checkpoints.is_due(step) || self.evaluations.is_best_checkpoint(step);
        // A failed earlier save must not prevent this one.
        let earlier = checkpoints.settle(is_due)?;
        self.record_save(step, earlier)?;
        let record = self.run_record();
        match &mut self.checkpoints {
            Some(checkpoints) if is_due => {
                let outcome = checkpoints.save(&mut self.engine, record, is_last)?;
                self.record_save(step, outcome)
            }
            _ => Ok(()),
        }
    }

    /// Makes the copy in memory that is due after `step`. Collective.
    fn copy_if_due(&mut self, step: u64, is_last: bool) -> Result<(), TrainerError> {
        let record = self.run_record();
        match &mut self.memory {
            Some(memory) if !is_last && memory.is_due(step) => memory.copy(&mut self.engine, record),
            _ => Ok(()),
        }
    }

    fn run_record(&self) -> RunRecord {
        RunRecord {
            run_id: self.run_id.clone(),
            model: self.options.model.clone(),
            source: self.options.source.clone(),
            data: self.data.cursor(),
            evaluations: self.evaluations.state,
        }
    }

    fn record_save(&mut self, step: u64, outcome: Option<SaveOutcome>) -> Result<(), TrainerError> {
        let Some(outcome) = outcome else { return Ok(()) };
        outcome.lines(step).iter().for_each(|line| (self.options.log)(line));
        match outcome {
            SaveOutcome::Writing => Ok(()),
            SaveOutcome::Failed { step, .. } => {
                self.evaluations.not_saved(step);
                Ok(())
            }
            SaveOutcome::Saved(saved) => {
                self.evaluations.saved(saved.step);
                self.notify(|observer, _| observer.on_save(&saved))
            }
        }
    }
}

/// Creates the output directory of a run that saves; fails if it contains checkpoints of another run.
fn prepare_output(
    engine: &Engine,
    group: &dyn ProcessGroup,
    options: &TrainerOptions,
) -> Result<(), TrainerError> {
    let Some(output) = options.output.as_deref().filter(|_| engine.config().checkpoint.is_some()) else {
        return Ok(());
    };
    if group.rank() != 0 {
        return Ok(());
    }
    let create = |source| TrainerError::Io { what: format!("cannot create {}", output.display()), source };
    std::fs::create_dir_all(output).map_err(create)?;
    let Some(newest) = step_directories(output)?.into_iter().next() else { return Ok(()) };
    let resumed = options.resume.as_ref();
    match resumed.map_or(Ok(false), |resume| resume.may_save_beside(newest.step, output))? {
        true => Ok(()),
        false => Err(TrainerError::OutputInUse { output: output.to_owned(), newest: newest.name }),
    }
}

/// Returns a new run id: no two processes start at the same time with the same process id.
fn new_run_id() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let hash = blake3::hash(format!("{} {}", now.as_nanos(), std::process::id()).as_bytes());
    let mut word = [0; 8];
    word.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_be_bytes(word)
}
