//! What a rank is fed with: rows whose length may change with the steps.

use super::Run;
use anyhow::Context;
use std::time::{Duration, Instant};
use ulysses::checkpoint::DataCursor;
use ulysses::data::{DataError, DataLoader, Dataset, LoaderOptions, MicroBatch, Placement, ReadAhead};
use ulysses::engine::Passes;

/// Steps whose rows have one length. Each phase goes through the data from its beginning, packed anew.
pub(super) struct Phase {
    /// Steps that are done before it.
    pub(super) first_step: u64,
    pub(super) data: Dataset,
    pub(super) held_out: Option<Dataset>,
    pub(super) data_hash: u64,
    /// Of `held_out`; 0 without it.
    pub(super) held_out_hash: u64,
}

/// When a run is done.
#[derive(Clone, Copy)]
pub(super) enum Limit {
    Steps(u64),
    /// The data has been gone through this often. There is only one phase then.
    Epochs(u64),
}

/// One rank's loader in the phase that it is in.
pub(super) struct Feed<'a> {
    run: &'a Run,
    pub(super) placement: Placement,
    phase: usize,
    loader: ReadAhead,
    waited: Duration,
    /// By phase.
    passes: Vec<Passes>,
}

impl<'a> Feed<'a> {
    /// At the beginning of the data.
    pub(super) fn new(run: &'a Run, placement: Placement) -> anyhow::Result<Self> {
        let passes = |phase: &Phase| Passes { seq_len: phase.data.seq_len(), trained: 0, evaluated: 0 };
        Ok(Self {
            run,
            placement,
            phase: 0,
            loader: loader(run, placement, 0, 0)?,
            waited: Duration::ZERO,
            passes: run.phases.iter().map(passes).collect(),
        })
    }

    /// Goes on after `steps` steps, of which those in the last phase consumed `samples_consumed` samples.
    pub(super) fn resume(&mut self, steps: u64, samples_consumed: u64) -> anyhow::Result<()> {
        self.phase = phase_of_last(&self.run.phases, steps);
        self.loader = loader(self.run, self.placement, self.phase, samples_consumed)?;
        Ok(())
    }

    /// The number of the run's last step, when `steps` are done.
    pub(super) fn last_step(&self, steps: u64) -> u64 {
        match self.run.limit {
            Limit::Steps(last) => last,
            Limit::Epochs(_) => steps + self.loader.cursor().steps_left().unwrap_or(0),
        }
    }

    /// Moves on to the phase of the step that follows `steps` others; whether it is a new one.
    pub(super) fn begin_step(&mut self, steps: u64) -> anyhow::Result<bool> {
        let phase = phase_of_next(&self.run.phases, steps);
        let is_new = phase != self.phase;
        if is_new {
            self.phase = phase;
            self.loader = loader(self.run, self.placement, phase, 0)?;
        }
        Ok(is_new)
    }

    /// This rank's part of the next micro step.
    pub(super) fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
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

    /// The phase of the last step.
    pub(super) fn phase(&self) -> &'a Phase {
        &self.run.phases[self.phase]
    }

    pub(super) fn passes(&self) -> &[Passes] {
        &self.passes
    }

    pub(super) fn add_evaluated(&mut self, micro_batches: u64) {
        self.passes[self.phase].evaluated += micro_batches;
    }

    /// What a checkpoint keeps.
    pub(super) fn cursor(&self) -> DataCursor {
        self.phase().cursor(self.run.config.seed, self.loader.cursor().samples_consumed())
    }
}

impl Phase {
    /// What a checkpoint keeps of the data, `samples_consumed` samples into the phase.
    pub(super) fn cursor(&self, seed: u64, samples_consumed: u64) -> DataCursor {
        let Self { data, data_hash, .. } = self;
        let (seq_len, num_rows) = (data.seq_len(), data.num_rows());
        DataCursor { samples_consumed, seed, seq_len, num_rows, data_hash: Some(*data_hash) }
    }
}

/// The phase of the step that follows `steps` others.
fn phase_of_next(phases: &[Phase], steps: u64) -> usize {
    // The first phase begins with the first step.
    phases.partition_point(|phase| phase.first_step <= steps) - 1
}

/// The phase of the last of `steps` steps.
pub(super) fn phase_of_last(phases: &[Phase], steps: u64) -> usize {
    phase_of_next(phases, steps.saturating_sub(1))
}

fn loader(run: &Run, placement: Placement, phase: usize, samples_consumed: u64) -> anyhow::Result<ReadAhead> {
    let options = LoaderOptions {
        seed: run.config.seed,
        micro_batch: run.config.micro_batch_size,
        accumulation: run.config.gradient_accumulation_steps,
        placement,
    };
    let data = &run.phases[phase].data;
    let mut loader = DataLoader::new(data.clone(), options)?;
    if let Limit::Epochs(epochs) = run.limit {
        let end = epochs.checked_mul(data.num_rows() as u64);
        loader = loader.ending_at(end.context("so many epochs have more samples than can be counted")?);
    }
    loader.set_samples_consumed(samples_consumed);
    Ok(ReadAhead::new(loader))
}
