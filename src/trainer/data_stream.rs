//! [`DataStream`]: the training data, whose sequence length may change during the run.

use super::error::TrainerError;
use crate::checkpoint::{Checkpoint, CheckpointError, DataCursor};
use crate::config::Config;
use crate::data::{
    DataError, DataLoader, DataRank, Dataset, DocumentCost, FlexibleStep, LoaderOptions, MicroBatch,
    ReadAhead,
};
use crate::engine::Passes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A range of steps with one sequence length. Each phase starts at the beginning of the data, packed for its length.
#[derive(Debug, Clone)]
pub struct Phase {
    /// Number of steps before the phase.
    pub first_step: u64,
    /// The training data.
    pub data: Dataset,
    /// The held-out data.
    pub held_out: Option<Dataset>,
    data_hash: u64,
    /// Hash of `held_out`; 0 without it.
    held_out_hash: u64,
}

/// The datasets of a run, by phase. Clones share the data.
#[derive(Debug, Clone)]
pub struct TrainingData {
    /// Ordered by step; the first phase starts at step 0.
    phases: Arc<[Phase]>,
}

/// The end of a run.
#[derive(Debug, Clone, Copy)]
enum Limit {
    Steps(u64),
    /// Number of epochs, with a single phase.
    Epochs(u64),
}

/// How one rank loads the data of a phase.
#[derive(Debug)]
struct Loading {
    options: LoaderOptions,
    limit: Limit,
    /// With flexible sequence parallelism.
    cost: Option<DocumentCost>,
}

/// The micro batches of one rank, phase by phase.
#[derive(Debug)]
pub struct DataStream {
    data: TrainingData,
    loading: Loading,
    phase: usize,
    loader: ReadAhead,
    waited: Duration,
    /// By phase, then by row length and block size of flexible sequence parallelism.
    passes: Vec<Passes>,
}

impl Phase {
    /// Creates a phase that starts after `first_step` steps.
    ///
    /// # Errors
    /// When the data cannot be read.
    pub fn new(first_step: u64, data: Dataset, held_out: Option<Dataset>) -> Result<Self, DataError> {
        let data_hash = data.sampled_hash()?;
        // This also finds ids outside the vocabulary before training starts.
        let held_out_hash = held_out.as_ref().map_or(Ok(0), Dataset::sampled_hash)?;
        Ok(Self { first_step, data, held_out, data_hash, held_out_hash })
    }

    /// Returns the data position for a checkpoint, `samples_consumed` samples into the phase.
    fn cursor(&self, seed: u64, samples_consumed: u64) -> DataCursor {
        let Self { data, data_hash, .. } = self;
        let (seq_len, num_sequences) = (data.seq_len(), data.num_sequences());
        DataCursor { samples_consumed, seed, seq_len, num_sequences, data_hash: Some(*data_hash) }
    }
}

impl TrainingData {
    /// Creates training data of one sequence length, with held-out data for evaluation.
    ///
    /// # Errors
    /// When the data cannot be read.
    pub fn new(data: impl Into<Dataset>, held_out: Option<Dataset>) -> Result<Self, DataError> {
        Ok(Self { phases: [Phase::new(0, data.into(), held_out)?].into() })
    }

    /// Creates training data of the phases of the config's `seq_len` and `seq_len_schedule`, in order.
    ///
    /// # Errors
    /// When the phases do not match the config.
    pub fn by_phase(phases: Vec<Phase>, config: &Config) -> Result<Self, TrainerError> {
        let data = Self { phases: phases.into() };
        data.check_phases(config)?;
        Ok(data)
    }

    /// Returns all phases, at least one.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// Returns the number of steps of the config's epochs, for [`Config::resolve_steps`]; `None` without epochs.
    pub fn steps_of_epochs(&self, config: &Config) -> Option<u64> {
        let samples = config.ulysses.epochs?.saturating_mul(self.phases[0].data.num_sequences() as u64);
        Some(samples.div_ceil(config.train_batch_size as u64))
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

    /// Checks that the data position of a checkpoint is valid: the samples and their order must be the same.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] with the difference.
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
                "the number of sequences (data, packing and held-out data)",
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

    /// Returns the hashes of training and held-out data, by phase.
    pub(super) fn hashes(&self) -> [Vec<u64>; 2] {
        let all = |hash: fn(&Phase) -> u64| self.phases.iter().map(hash).collect();
        [all(|phase| phase.data_hash), all(|phase| phase.held_out_hash)]
    }

    /// Returns the hash of the first phase's held-out data; 0 without it.
    pub(super) fn held_out_hash(&self) -> u64 {
        self.phases[0].held_out_hash
    }

    /// Returns the phase of the step after `steps` steps.
    fn phase_of_next(&self, steps: u64) -> usize {
        // The first phase starts at step 0.
        self.phases.partition_point(|phase| phase.first_step <= steps) - 1
    }

    /// Returns the phase of the last of `steps` steps.
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

/// Checks that the config sets the end of the run.
pub(super) fn check_limit(config: &Config) -> Result<(), TrainerError> {
    Limit::of(config).map(drop)
}

impl DataStream {
    /// Creates a stream at the beginning of the data. `cost` turns on flexible sequence parallelism.
    pub(super) fn new(
        data: TrainingData,
        config: &Config,
        rank: DataRank,
        cost: Option<DocumentCost>,
    ) -> Result<Self, TrainerError> {
        data.check_phases(config)?;
        if config.lacks_steps() {
            return Err(TrainerError::OpenSchedule);
        }
        let options = LoaderOptions {
            seed: config.seed,
            micro_batch: config.micro_batch_size,
            accumulation: config.gradient_accumulation_steps,
            rank,
        };
        let loading = Loading { options, limit: Limit::of(config)?, cost };
        let passes = |phase: &Phase| Passes {
            seq_len: phase.data.seq_len(),
            block_size: None,
            trained: 0,
            evaluated: 0,
        };
        Ok(Self {
            loader: loading.start(&data.phases[0].data, 0)?,
            passes: data.phases.iter().map(passes).collect(),
            data,
            loading,
            phase: 0,
            waited: Duration::ZERO,
        })
    }

    /// Resumes after `steps` steps, whose last phase has consumed `samples_consumed` samples.
    pub(super) fn resume(&mut self, steps: u64, samples_consumed: u64) -> Result<(), TrainerError> {
        self.phase = self.data.phase_of_last(steps);
        self.loader = self.loading.start(&self.phase().data, samples_consumed)?;
        Ok(())
    }

    /// Returns the number of the run's last step, when `steps` steps are done.
    pub(super) fn last_step(&self, steps: u64) -> u64 {
        match self.loading.limit {
            Limit::Steps(last) => last,
            Limit::Epochs(_) => steps + self.loader.cursor().steps_left().unwrap_or(0),
        }
    }

    /// Moves to the phase of the step after `steps` steps; returns whether it is a new phase.
    pub(super) fn begin_step(&mut self, steps: u64) -> Result<bool, TrainerError> {
        let phase = self.data.phase_of_next(steps);
        let is_new = phase != self.phase;
        if is_new {
            self.phase = phase;
            self.loader = self.loading.start(&self.phase().data, 0)?;
        }
        Ok(is_new)
    }

    /// Returns this rank's part of the next micro step.
    ///
    /// # Errors
    /// When the data cannot be read.
    pub fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
        let _data = tracing::trace_span!("data").entered();
        let start = Instant::now();
        let batch = self.loader.next_micro_batch()?;
        self.waited += start.elapsed();
        self.passes_of(&batch).trained += 1;
        Ok(batch)
    }

    /// Returns the passes over micro batches like this one.
    fn passes_of(&mut self, batch: &MicroBatch) -> &mut Passes {
        let Some(FlexibleStep { block_size, .. }) = batch.flexible else {
            return &mut self.passes[self.phase];
        };
        let (seq_len, block_size) = (batch.seq_len, Some(block_size));
        let is_alike = |passes: &Passes| (passes.seq_len, passes.block_size) == (seq_len, block_size);
        let index = self.passes.iter().position(is_alike).unwrap_or(self.passes.len());
        if index == self.passes.len() {
            self.passes.push(Passes { seq_len, block_size, trained: 0, evaluated: 0 });
        }
        &mut self.passes[index]
    }

    /// Returns the planned ratio of the longest to the mean rank in the next step, with flexible sequence parallelism.
    pub(super) fn imbalance(&self) -> Result<Option<f64>, DataError> {
        self.loader.cursor().clone().imbalance()
    }

    /// Returns the seconds spent waiting for data since the last call.
    pub(super) fn take_wait_seconds(&mut self) -> f64 {
        std::mem::take(&mut self.waited).as_secs_f64()
    }

    /// Returns the training data of all phases.
    pub(super) fn data(&self) -> &TrainingData {
        &self.data
    }

    /// Returns the current phase.
    pub fn phase(&self) -> &Phase {
        &self.data.phases[self.phase]
    }

    /// Returns the number of micro batches so far: by phase, then by row length and block size of flexible sequence
    /// parallelism.
    pub fn passes(&self) -> &[Passes] {
        &self.passes
    }

    pub(super) fn add_evaluated(&mut self, micro_batches: u64) {
        self.passes[self.phase].evaluated += micro_batches;
    }

    /// Returns the data position for a checkpoint.
    pub(super) fn cursor(&self) -> DataCursor {
        self.phase().cursor(self.loading.options.seed, self.loader.cursor().samples_consumed())
    }
}

impl Loading {
    /// Loads after `samples_consumed` samples of a phase's data.
    fn start(&self, data: &Dataset, samples_consumed: u64) -> Result<ReadAhead, TrainerError> {
        let mut loader = DataLoader::new(data.clone(), self.options)?;
        if let Limit::Epochs(epochs) = self.limit {
            let end = epochs.checked_mul(data.num_sequences() as u64).ok_or(TrainerError::TooManyEpochs)?;
            loader = loader.ending_at(end);
        }
        if let Some(cost) = self.cost {
            loader = loader.balanced(cost);
        }
        loader.set_samples_consumed(samples_consumed);
        Ok(ReadAhead::new(loader))
    }
}
