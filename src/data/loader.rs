//! [`DataLoader`]: the micro batches of one rank.

use super::balance::DocumentCost;
use super::flexible::{SourceSegment, StepPlan};
use super::sample_order::{SampleOrder, SequenceIndex};
use super::{DataError, Dataset, FlexibleStep, GlobalBatch, LoaderOptions, MicroBatch, PackedSequence};
use std::sync::Arc;

/// Loads the micro batches of one rank, in an order that does not depend on the mesh.
///
/// With `B = micro_batch × accumulation × dp_size`, a step consumes the next B samples. Micro step a of dp rank d takes
/// `micro_batch` samples of them, from `(a·dp_size + d)·micro_batch` on. Over micro steps and dp ranks, in this order,
/// the samples of a step are in global order on every mesh.
///
/// Epochs follow each other without a gap: a step may contain the last sequences of one epoch and the first of the next.
/// Where the data [ends](Self::ending_at), fully masked sequences fill the last step. They do not count as consumed: a
/// loader that resumes with a later end continues with the next sample.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use ulysses::data::{Corpus, DataLoader, LoaderOptions, PackedSequences, DataRank};
///
/// let data = Arc::new(PackedSequences::new(Corpus::from_documents([(0..32).collect()])?, 8)?);
/// let rank = DataRank { dp_size: 1, dp_rank: 0, sharding: 2.into(), sp_rank: 1 };
/// let options = LoaderOptions { seed: 1, micro_batch: 2, accumulation: 1, rank };
/// let batch = DataLoader::new(data, options)?.next_micro_batch()?;
/// assert_eq!((batch.batch_size, batch.seq_len, batch.seq_len_local()), (2, 8, 4));
/// # Ok::<(), ulysses::data::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct DataLoader {
    data: Dataset,
    options: LoaderOptions,
    train_batch_size: u64,
    order: SampleOrder,
    /// Samples from this one on are masked.
    end: Option<u64>,
    samples_consumed: u64,
    /// Micro steps of the current step so far.
    micro_step: usize,
    /// With flexible sequence parallelism, the cost by which documents are divided among the ranks.
    cost: Option<DocumentCost>,
    /// The documents of the current step, with flexible sequence parallelism; made with its first micro batch.
    plan: Option<Arc<StepPlan>>,
}

impl DataLoader {
    /// Creates a loader at the start of the data, shuffled by the seed.
    ///
    /// # Errors
    /// When a count is 0 or overflows, the rank does not exist, or a sequence has fewer tokens than there are sp ranks, or
    /// there are 2³² sequences or more.
    pub fn new(data: impl Into<Dataset>, options: LoaderOptions) -> Result<Self, DataError> {
        let data = data.into();
        let order = SampleOrder::shuffled(&data, options.seed)?;
        Self::with_order(data, options, order)
    }

    /// Creates a loader that reads all sequences once, in order, ignoring weights: for evaluation.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn once_in_order(data: impl Into<Dataset>, options: LoaderOptions) -> Result<Self, DataError> {
        let data = data.into();
        let (order, end) = (SampleOrder::in_order(&data), data.num_sequences() as u64);
        Ok(Self::with_order(data, options, order)?.ending_at(end))
    }

    fn with_order(data: Dataset, options: LoaderOptions, order: SampleOrder) -> Result<Self, DataError> {
        let LoaderOptions { micro_batch, accumulation, rank, .. } = options;
        for (name, count) in [("micro_batch", micro_batch), ("accumulation", accumulation)] {
            if count == 0 {
                return Err(DataError::Zero { name });
            }
        }
        rank.check()?;
        let (dp_size, sp_size) = (rank.dp_size, rank.sharding.sp_size());
        if data.seq_len() < sp_size {
            return Err(DataError::SeqLenBelowSp { seq_len: data.seq_len(), sp_size });
        }
        let train_batch_size = micro_batch
            .checked_mul(accumulation)
            .and_then(|per_rank| per_rank.checked_mul(dp_size))
            .ok_or(DataError::BatchTooLarge { micro_batch, accumulation, dp_size })?;
        Ok(Self {
            data,
            options,
            train_batch_size: train_batch_size as u64,
            order,
            end: None,
            samples_consumed: 0,
            micro_step: 0,
            cost: None,
            plan: None,
        })
    }

    /// Ends the data after `samples` samples. Later sequences of the last step are fully masked, the same ones on every
    /// mesh.
    #[must_use]
    pub fn ending_at(self, samples: u64) -> Self {
        Self { end: Some(samples), ..self }
    }

    /// Turns on flexible sequence parallelism: divides the documents of each step among all ranks by their cost, instead of
    /// each sequence among the sp ranks. Steps consume the same samples. The number of micro steps follows from the
    /// documents ([`FlexibleStep::micro_steps`]), instead of `accumulation`. The ranks must not form a ring.
    #[must_use]
    pub fn balanced(self, cost: DocumentCost) -> Self {
        Self { cost: Some(cost), plan: None, ..self }
    }

    /// Returns the ratio of the longest to the mean rank in the FLOPs of the next step
    /// ([`Assignment::imbalance`](super::Assignment::imbalance)), with flexible sequence parallelism.
    ///
    /// # Errors
    /// When data cannot be read.
    pub fn imbalance(&mut self) -> Result<Option<f64>, DataError> {
        let Some(cost) = self.cost else { return Ok(None) };
        Ok(Some(self.plan(&cost)?.imbalance()))
    }

    /// Returns the options.
    pub fn options(&self) -> LoaderOptions {
        self.options
    }

    /// Returns the dataset.
    pub fn data(&self) -> &Dataset {
        &self.data
    }

    /// Returns the samples per step, over all ranks and micro steps.
    pub fn train_batch_size(&self) -> u64 {
        self.train_batch_size
    }

    /// Returns the samples of all complete steps so far, over all ranks, without those after the end: the state that a
    /// checkpoint stores.
    pub fn samples_consumed(&self) -> u64 {
        self.samples_consumed
    }

    /// Returns the steps until the data ends, or `None` if it does not end.
    pub fn steps_left(&self) -> Option<u64> {
        Some(self.end?.saturating_sub(self.samples_consumed).div_ceil(self.train_batch_size))
    }

    /// Returns the epoch of the next step's first sample, from 0. For weighted sources, which have their own epochs, it is
    /// the number of consumed samples divided by the number of sequences.
    pub fn epoch(&self) -> u64 {
        self.samples_consumed / self.data.num_sequences() as u64
    }

    /// Moves to the start of a step, whatever mesh consumed the previous samples.
    pub fn set_samples_consumed(&mut self, samples_consumed: u64) {
        self.samples_consumed = samples_consumed;
        self.micro_step = 0;
        self.plan = None;
    }

    /// Returns this rank's part of the next micro step; `accumulation` micro steps complete a step, unless its documents are
    /// [balanced](Self::balanced).
    ///
    /// # Errors
    /// When the number of consumed samples overflows, or data cannot be read.
    pub fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
        let LoaderOptions { micro_batch, rank, .. } = self.options;
        self.step_end()?;
        if let Some(cost) = self.cost {
            let batch = self.plan(&cost)?.micro_batch(&self.data, self.options, self.micro_step)?;
            self.advance(batch.flexible)?;
            return Ok(batch);
        }
        let block = self.micro_step * rank.dp_size + rank.dp_rank;
        let first = self.samples_consumed + (block * micro_batch) as u64;
        let samples = first..first + micro_batch as u64;
        let sequences = samples.map(|sample| self.sample(sample)).collect::<Result<Vec<_>, _>>()?;
        let shard = GlobalBatch::from_sequences(sequences, self.data.seq_len()).micro_batch(
            0..micro_batch,
            rank.sharding,
            rank.sp_rank,
        )?;
        self.advance(None)?;
        Ok(shard)
    }

    /// Returns the plan of the current step.
    fn plan(&mut self, cost: &DocumentCost) -> Result<Arc<StepPlan>, DataError> {
        if let Some(plan) = &self.plan {
            return Ok(plan.clone());
        }
        let mut documents = Vec::new();
        let end = self.end.unwrap_or(u64::MAX).min(self.step_end()?);
        for sample in self.samples_consumed..end {
            let SequenceIndex { source, sequence } = self.order.locate(sample);
            let segments = self.data.source(source)?.segments(sequence)?;
            documents.extend(segments.into_iter().map(|segment| SourceSegment { source, segment }));
        }
        let plan = Arc::new(StepPlan::new(documents, cost, self.data.seq_len(), self.options));
        Ok(self.plan.insert(plan).clone())
    }

    /// Skips a micro step. `flexible` is that of its micro batch.
    pub(super) fn advance(&mut self, flexible: Option<FlexibleStep>) -> Result<(), DataError> {
        let step_end = self.step_end()?;
        self.micro_step += 1;
        if self.micro_step == flexible.map_or(self.options.accumulation, |step| step.micro_steps) {
            // A cursor past the end, as in a run that resumes with fewer epochs, stays there.
            let end = self.end.unwrap_or(u64::MAX).max(self.samples_consumed);
            self.set_samples_consumed(step_end.min(end));
        }
        Ok(())
    }

    fn sample(&mut self, sample: u64) -> Result<PackedSequence, DataError> {
        if self.end.is_some_and(|end| sample >= end) {
            return Ok(PackedSequence::masked(self.data.seq_len()));
        }
        let SequenceIndex { source, sequence } = self.order.locate(sample);
        self.data.sequence(source, sequence)
    }

    fn step_end(&self) -> Result<u64, DataError> {
        let Self { samples_consumed, train_batch_size, .. } = *self;
        let overflow = DataError::CursorOverflow { samples_consumed, train_batch_size };
        samples_consumed.checked_add(train_batch_size).ok_or(overflow)
    }
}
