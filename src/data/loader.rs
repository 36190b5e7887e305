//! [`DataLoader`]: the micro batches of one rank.

use super::sample_order::SampleOrder;
use super::{DataError, Dataset, GlobalBatch, MicroBatch, PackedSequence};
use crate::mesh::{DeviceMesh, SeqSharding};

/// The coordinates of a rank on the axes that split the data: sequences over dp, the tokens of each sequence over sp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Number of ranks with different sequences.
    pub dp_size: usize,
    /// The rank along dp.
    pub dp_rank: usize,
    /// How the ranks along sp share each sequence.
    pub sharding: SeqSharding,
    /// The rank along sp.
    pub sp_rank: usize,
}

impl Placement {
    /// Returns the placement of a single rank: all sequences, unsharded.
    pub fn single() -> Self {
        Self { dp_size: 1, dp_rank: 0, sharding: SeqSharding::from(1), sp_rank: 0 }
    }

    /// Returns the coordinates of a rank on the axes `dp` and `sp`, without a ring; a missing axis has size 1.
    ///
    /// Ranks that differ only on other axes get the same data.
    ///
    /// # Errors
    /// When the rank is not in the mesh.
    pub fn of(mesh: &DeviceMesh, global_rank: usize) -> Result<Self, DataError> {
        // A rank outside the mesh is an error even if the mesh has neither axis.
        mesh.coordinate(global_rank)?;
        let on = |axis| match mesh.has_axis(axis) {
            true => Ok::<_, DataError>((mesh.axis_size(axis)?, mesh.coordinate_on(axis, global_rank)?)),
            false => Ok((1, 0)),
        };
        let ((dp_size, dp_rank), (sp_size, sp_rank)) = (on("dp")?, on("sp")?);
        Ok(Self { dp_size, dp_rank, sharding: SeqSharding::from(sp_size), sp_rank })
    }

    fn check(&self) -> Result<(), DataError> {
        let axes = [("dp", self.dp_rank, self.dp_size), ("sp", self.sp_rank, self.sharding.sp_size())];
        match axes.into_iter().find(|(_, rank, size)| rank >= size) {
            Some((axis, rank, size)) => Err(DataError::RankOutOfRange { axis, rank, size }),
            None => Ok(()),
        }
    }
}

/// Options of a data loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Seed of the data order.
    pub seed: u64,
    /// Sequences per rank and micro step.
    pub micro_batch: usize,
    /// Micro steps per step.
    pub accumulation: usize,
    /// The coordinates of the rank.
    pub placement: Placement,
}

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
/// use ulysses::data::{Corpus, DataLoader, LoaderOptions, PackedSequences, Placement};
///
/// let data = Arc::new(PackedSequences::new(Corpus::from_documents([(0..32).collect()])?, 8)?);
/// let placement = Placement { dp_size: 1, dp_rank: 0, sharding: 2.into(), sp_rank: 1 };
/// let options = LoaderOptions { seed: 1, micro_batch: 2, accumulation: 1, placement };
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
}

impl DataLoader {
    /// Creates a loader at the start of the data, shuffled by the seed.
    ///
    /// # Errors
    /// When a count is 0 or overflows, the rank does not exist, or a sequence has fewer tokens than there are sp ranks.
    pub fn new(data: impl Into<Dataset>, options: LoaderOptions) -> Result<Self, DataError> {
        let data = data.into();
        let order = SampleOrder::shuffled(&data, options.seed);
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
        let LoaderOptions { micro_batch, accumulation, placement, .. } = options;
        for (name, count) in [("micro_batch", micro_batch), ("accumulation", accumulation)] {
            if count == 0 {
                return Err(DataError::Zero { name });
            }
        }
        placement.check()?;
        let (dp_size, sp_size) = (placement.dp_size, placement.sharding.sp_size());
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
        })
    }

    /// Ends the data after `samples` samples. Later sequences of the last step are fully masked, the same ones on every
    /// mesh.
    #[must_use]
    pub fn ending_at(self, samples: u64) -> Self {
        Self { end: Some(samples), ..self }
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
    }

    /// Returns this rank's part of the next micro step; `accumulation` micro steps complete a step.
    ///
    /// # Errors
    /// When the number of consumed samples overflows, or data cannot be read.
    pub fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
        let LoaderOptions { micro_batch, placement, .. } = self.options;
        self.step_end()?;
        let block = self.micro_step * placement.dp_size + placement.dp_rank;
        let first = self.samples_consumed + (block * micro_batch) as u64;
        let samples = first..first + micro_batch as u64;
        let sequences = samples.map(|sample| self.sample(sample)).collect::<Result<Vec<_>, _>>()?;
        let shard = GlobalBatch::from_sequences(sequences, self.data.seq_len()).micro_batch(
            0..micro_batch,
            placement.sharding,
            placement.sp_rank,
        )?;
        self.advance()?;
        Ok(shard)
    }

    /// Skips a micro step.
    pub(super) fn advance(&mut self) -> Result<(), DataError> {
        let step_end = self.step_end()?;
        self.micro_step += 1;
        if self.micro_step == self.options.accumulation {
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
        let (source, sequence) = self.order.locate(sample);
        self.data.sequence(source, sequence)
    }

    fn step_end(&self) -> Result<u64, DataError> {
        let Self { samples_consumed, train_batch_size, .. } = *self;
        let overflow = DataError::CursorOverflow { samples_consumed, train_batch_size };
        samples_consumed.checked_add(train_batch_size).ok_or(overflow)
    }
}
