//! Training data: sequences whose length may change with the steps.

use super::error::TrainerError;
use crate::checkpoint::{Checkpoint, CheckpointError, DataCursor};
use crate::config::Config;
use crate::data::{DataError, DataLoader, Dataset, LoaderOptions, MicroBatch, Placement, ReadAhead};
use crate::engine::Passes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps whose sequences have one length. Each phase goes through the data from its beginning, packed anew.
#[derive(Debug, Clone)]
pub struct Phase {
    /// Steps that are done before it.
    pub first_step: u64,
    /// What is trained on.
    pub data: Dataset,
    /// What is evaluated.
    pub held_out: Option<Dataset>,
    data_hash: u64,
    /// Of `held_out`; 0 without it.
    held_out_hash: u64,
}

/// The datasets of a run, by phase. Cloning it copies no data.
#[derive(Debug, Clone)]
pub struct TrainingData {
    /// By ascending step, the first from the start.
    phases: Arc<[Phase]>,
}

/// When a run is done.
#[derive(Debug, Clone, Copy)]
enum Limit {
    Steps(u64),
    /// Number of epochs. There is only one phase then.
    Epochs(u64),
}

/// One rank's micro batches, phase after phase.
#[derive(Debug)]
pub struct DataStream {
    data: TrainingData,
    options: LoaderOptions,
    limit: Limit,
    phase: usize,
    loader: ReadAhead,
    waited: Duration,
    /// By phase.
    passes: Vec<Passes>,
}

impl Phase {
    /// A phase that begins after `first_step` steps.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub fn new(first_step: u64, data: Dataset, held_out: Option<Dataset>) -> Result<Self, DataError> {
        let data_hash = data.sampled_hash()?;
        // Reading it here also finds ids that the model does not know before any training.
        let held_out_hash = held_out.as_ref().map_or(Ok(0), Dataset::sampled_hash)?;
        Ok(Self { first_step, data, held_out, data_hash, held_out_hash })
    }

    /// What a checkpoint records of the data, `samples_consumed` samples into the phase.
    fn cursor(&self, seed: u64, samples_consumed: u64) -> DataCursor {
        let Self { data, data_hash, .. } = self;
        let (seq_len, num_sequences) = (data.seq_len(), data.num_rows());
        DataCursor { samples_consumed, seed, seq_len, num_sequences, data_hash: Some(*data_hash) }
    }
}

impl TrainingData {
    /// Sequences of one length, and what is held out of them for evaluation.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub fn new(data: impl Into<Dataset>, held_out: Option<Dataset>) -> Result<Self, DataError> {
        Ok(Self { phases: [Phase::new(0, data.into(), held_out)?].into() })
    }

    /// Phases as the config's `seq_len` and `seq_len_schedule` make them, by ascending step.
    ///
    /// # Errors
    /// Phases that are not the config's.
    pub fn by_phase(phases: Vec<Phase>, config: &Config) -> Result<Self, TrainerError> {
        let data = Self { phases: phases.into() };
        data.check_phases(config)?;
        Ok(data)
    }

    /// All phases, at least one.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    fn check_phases(&self, config: &Config) -> Result<(), TrainerError> {
        let starts =
            std::iter::once(0).chain(config.ulysses.seq_len_schedule.iter().map(|change| change.step));
        match starts.eq(self.phases.iter().map(|phase| phase.first_step)) {
            true => Ok(()),
            false => Err(TrainerError::Phases {
                expected: 1 + config.ulysses.seq_len_schedule.len(),
                found: self.phases.len(),
            }),
        }
    }

    /// Whether a checkpoint's cursor means something here: it does only in the same samples in the same order.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] with what differs.
    pub fn check_resumes(&self, checkpoint: &Checkpoint, seed: u64) -> Result<(), CheckpointError> {
        let progress = &checkpoint.manifest().progress;
        let saved = progress.data;
        let here = self.phases[self.phase_of_last(progress.step)].cursor(seed, saved.samples_consumed);
        let hash =
            |hash: Option<u64>| hash.map_or_else(|| "not known".to_owned(), |hash| format!("{hash:016x}"));
        // Checkpoints of earlier versions have no hash.
        let saved_hash = saved.data_hash.or(here.data_hash);
        let number = |what, saved: u64, here: u64| (what, saved.to_string(), here.to_string());
        let facts = [
            number("`seed` (--seed)", saved.seed, here.seed),
            number("`ulysses.seq_len` (--seq-len)", saved.seq_len as u64, here.seq_len as u64),
            number(
                "the number of rows that data, packing and held-out data make",
                saved.num_sequences as u64,
                here.num_sequences as u64,
            ),
            ("the hash of data, packing and weights", hash(saved_hash), hash(here.data_hash)),
        ];
        match facts.into_iter().find(|(_, saved, here)| saved != here) {
            None => Ok(()),
            Some((what, saved, here)) => Err(CheckpointError::Mismatch {
                path: checkpoint.dir().to_owned(),
                what: what.to_owned(),
                saved,
                wanted: here,
            }),
        }
    }

    /// Hashes of training data and held-out data by phase.
    pub(super) fn hashes(&self) -> [Vec<u64>; 2] {
        let all = |hash: fn(&Phase) -> u64| self.phases.iter().map(hash).collect();
        [all(|phase| phase.data_hash), all(|phase| phase.held_out_hash)]
    }

    /// Hash of the first phase's held-out data; 0 without it.
    pub(super) fn held_out_hash(&self) -> u64 {
        self.phases[0].held_out_hash
    }

    /// The phase of the step that follows `steps` others.
    fn phase_of_next(&self, steps: u64) -> usize {
        // The first phase begins with the first step.
        self.phases.partition_point(|phase| phase.first_step <= steps) - 1
    }

    /// The phase of the last of `steps` steps.
    fn phase_of_last(&self, steps: u64) -> usize {
        self.phase_of_next(steps.saturating_sub(1))
    }
}

impl Limit {
    fn of(config: &Config) -> Result<Self, TrainerError> {
        let Some(epochs) = config.ulysses.epochs else { return Ok(Self::Steps(config.require_steps()?)) };
        if !config.ulysses.seq_len_schedule.is_empty() {
            return Err(TrainerError::EpochsOfSeveralLengths);
        }
        if config.ulysses.data.iter().any(|source| source.weight.is_some()) {
            return Err(TrainerError::EpochsOfWeightedSources);
        }
        Ok(Self::Epochs(epochs))
    }
}

/// Refuses a config that does not state when the run ends.
pub(super) fn check_limit(config: &Config) -> Result<(), TrainerError> {
    Limit::of(config).map(drop)
}

impl DataStream {
    /// The beginning of the data.
    pub(super) fn new(
        data: TrainingData,
        config: &Config,
        placement: Placement,
    ) -> Result<Self, TrainerError> {
        data.check_phases(config)?;
        let options = LoaderOptions {
            seed: config.seed,
            micro_batch: config.micro_batch_size,
            accumulation: config.gradient_accumulation_steps,
            placement,
        };
        let limit = Limit::of(config)?;
        let passes = |phase: &Phase| Passes { seq_len: phase.data.seq_len(), trained: 0, evaluated: 0 };
        Ok(Self {
            loader: loader(&data.phases[0].data, options, limit, 0)?,
            passes: data.phases.iter().map(passes).collect(),
            data,
            options,
            limit,
            phase: 0,
            waited: Duration::ZERO,
        })
    }

    /// Goes on after `steps` steps, of which those in the last phase consumed `samples_consumed` samples.
    pub(super) fn resume(&mut self, steps: u64, samples_consumed: u64) -> Result<(), TrainerError> {
        self.phase = self.data.phase_of_last(steps);
        self.loader = loader(&self.phase().data, self.options, self.limit, samples_consumed)?;
        Ok(())
    }

    /// The number of the run's last step, when `steps` are done.
    pub(super) fn last_step(&self, steps: u64) -> u64 {
        match self.limit {
            Limit::Steps(last) => last,
            Limit::Epochs(_) => steps + self.loader.cursor().steps_left().unwrap_or(0),
        }
    }

    /// Moves on to the phase of the step that follows `steps` others; whether it is a new one.
    pub(super) fn begin_step(&mut self, steps: u64) -> Result<bool, TrainerError> {
        let phase = self.data.phase_of_next(steps);
        let is_new = phase != self.phase;
        if is_new {
            self.phase = phase;
            self.loader = loader(&self.phase().data, self.options, self.limit, 0)?;
        }
        Ok(is_new)
    }

    /// This rank's part of the next micro step.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
        let _data = tracing::trace_span!("data").entered();
        let start = Instant::now();
        let batch = self.loader.next_micro_batch()?;
        self.waited += start.elapsed();
        self.passes[self.phase].trained += 1;
        Ok(batch)
    }

    /// Seconds that were spent waiting since this was asked last.
    pub(super) fn take_waited(&mut self) -> f64 {
        std::mem::take(&mut self.waited).as_secs_f64()
    }

    /// All the data.
    pub(super) fn data(&self) -> &TrainingData {
        &self.data
    }

    /// The phase of the last step.
    pub fn phase(&self) -> &Phase {
        &self.data.phases[self.phase]
    }

    /// Micro batches so far, by phase.
    pub fn passes(&self) -> &[Passes] {
        &self.passes
    }

    pub(super) fn add_evaluated(&mut self, micro_batches: u64) {
        self.passes[self.phase].evaluated += micro_batches;
    }

    /// What a checkpoint records.
    pub(super) fn cursor(&self) -> DataCursor {
        self.phase().cursor(self.options.seed, self.loader.cursor().samples_consumed())
    }
}

fn loader(
    data: &Dataset,
    options: LoaderOptions,
    limit: Limit,
    samples_consumed: u64,
) -> Result<ReadAhead, TrainerError> {
    let mut loader = DataLoader::new(data.clone(), options)?;
    if let Limit::Epochs(epochs) = limit {
        let end = epochs.checked_mul(data.num_rows() as u64).ok_or(TrainerError::TooManyEpochs)?;
        loader = loader.ending_at(end);
    }
    loader.set_samples_consumed(samples_consumed);
    Ok(ReadAhead::new(loader))
}
