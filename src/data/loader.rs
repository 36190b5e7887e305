//! Hands one rank its micro batches, step after step.

use super::sample_order::SampleOrder;
use super::{DataError, Dataset, GlobalBatch, MicroBatch, PackedSequence};
use crate::mesh::DeviceMesh;

/// Where a rank stands for the purpose of data: its sequences by dp, its tokens of each sequence by sp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Ranks that take different sequences.
    pub dp_size: usize,
    /// This rank among them.
    pub dp_rank: usize,
    /// Ranks that share each sequence.
    pub sp_size: usize,
    /// This rank among them.
    pub sp_rank: usize,
}

impl Placement {
    /// A rank that takes all sequences whole.
    pub fn single() -> Self {
        Self { dp_size: 1, dp_rank: 0, sp_size: 1, sp_rank: 0 }
    }

    /// The place of a rank on the axes `dp` and `sp`; an axis that the mesh lacks has size 1.
    ///
    /// Ranks that differ on other axes only see the same data.
    ///
    /// # Errors
    /// When the rank is not in the mesh.
    pub fn of(mesh: &DeviceMesh, global_rank: usize) -> Result<Self, DataError> {
        // Also when the mesh has neither axis, a stranger is an error.
        mesh.coordinate(global_rank)?;
        let on = |axis| match mesh.has_axis(axis) {
            true => Ok::<_, DataError>((mesh.axis_size(axis)?, mesh.coordinate_on(axis, global_rank)?)),
            false => Ok((1, 0)),
        };
        let ((dp_size, dp_rank), (sp_size, sp_rank)) = (on("dp")?, on("sp")?);
        Ok(Self { dp_size, dp_rank, sp_size, sp_rank })
    }

    fn check(&self) -> Result<(), DataError> {
        let axes = [("dp", self.dp_rank, self.dp_size), ("sp", self.sp_rank, self.sp_size)];
        match axes.into_iter().find(|(_, rank, size)| rank >= size) {
            Some((axis, rank, size)) => Err(DataError::RankOutOfRange { axis, rank, size }),
            None => Ok(()),
        }
    }
}

/// How a loader draws from its sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Seed of the order of the sequences.
    pub seed: u64,
    /// Sequences that a rank takes at once.
    pub micro_batch: usize,
    /// Micro steps per step.
    pub accumulation: usize,
    /// The rank that is served.
    pub placement: Placement,
}

/// The micro batches of one rank, in an order that does not depend on the mesh.
///
/// With `B = micro_batch × accumulation × dp_size`, a step consumes the next B samples. Within them, micro step
/// a of dp rank d takes samples `(a·dp_size + d)·micro_batch ..` — contiguous sequences, so over the micro steps and
/// dp ranks, in this order, the step's samples come out in their global order on every mesh.
///
/// Epochs follow each other without a gap: a step may take the last sequences of one and the first of the next.
/// Where the data [ends](Self::ending_at), fully masked sequences fill the last step. They count as nothing: a loader
/// that goes on from there with a later end takes the next sample, and none is left out.
#[derive(Debug, Clone)]
pub struct DataLoader {
    data: Dataset,
    options: LoaderOptions,
    train_batch_size: u64,
    order: SampleOrder,
    /// Samples from here on are masked.
    end: Option<u64>,
    samples_consumed: u64,
    /// Micro steps of the current step that were handed out.
    micro_step: usize,
}

impl DataLoader {
    /// A loader at the start of the data, in an order that the seed gives.
    ///
    /// # Errors
    /// When a count is 0 or overflows, the rank does not exist, or a sequence has fewer tokens than sp ranks.
    pub fn new(data: impl Into<Dataset>, options: LoaderOptions) -> Result<Self, DataError> {
        let data = data.into();
        let order = SampleOrder::shuffled(&data, options.seed);
        Self::with_order(data, options, order)
    }

    /// A loader that goes once through all sequences, as they are, whatever their weights: for data that is only looked
    /// at.
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
        let Placement { dp_size, sp_size, .. } = placement;
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

    /// Lets the data end after a number of samples. Sequences that a step has beyond it are fully masked, on every
    /// mesh the same ones.
    #[must_use]
    pub fn ending_at(self, samples: u64) -> Self {
        Self { end: Some(samples), ..self }
    }

    /// How samples are drawn.
    pub fn options(&self) -> LoaderOptions {
        self.options
    }

    /// What the samples are drawn from.
    pub fn data(&self) -> &Dataset {
        &self.data
    }

    /// Samples of a step, over all ranks and micro steps.
    pub fn train_batch_size(&self) -> u64 {
        self.train_batch_size
    }

    /// Samples of all whole steps so far, over all ranks, those beyond the end not counted: the state that a
    /// checkpoint keeps.
    pub fn samples_consumed(&self) -> u64 {
        self.samples_consumed
    }

    /// Steps until the data ends; `None` where it never does.
    pub fn steps_left(&self) -> Option<u64> {
        Some(self.end?.saturating_sub(self.samples_consumed).div_ceil(self.train_batch_size))
    }

    /// The epoch that the next step's first sample is in, from 0. Of weighted sources, which have epochs of their
    /// own, it is the number of times that as many samples as there are sequences were seen.
    pub fn epoch(&self) -> u64 {
        self.samples_consumed / self.data.num_sequences() as u64
    }

    /// Continues at the beginning of a step, whatever mesh consumed the samples before.
    pub fn set_samples_consumed(&mut self, samples_consumed: u64) {
        self.samples_consumed = samples_consumed;
        self.micro_step = 0;
    }

    /// This rank's part of the next micro step; every `accumulation` of them complete a step.
    ///
    /// # Errors
    /// When the cursor was set so far that samples can no longer be counted, or data cannot be read.
    pub fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
        let LoaderOptions { micro_batch, placement, .. } = self.options;
        self.step_end()?;
        let block = self.micro_step * placement.dp_size + placement.dp_rank;
        let first = self.samples_consumed + (block * micro_batch) as u64;
        let samples = first..first + micro_batch as u64;
        let sequences = samples.map(|sample| self.sample(sample)).collect::<Result<Vec<_>, _>>()?;
        let shard = GlobalBatch::from_sequences(sequences, self.data.seq_len()).micro_batch(
            0..micro_batch,
            placement.sp_size,
            placement.sp_rank,
        )?;
        self.advance()?;
        Ok(shard)
    }

    /// Moves on by a micro step without reading it.
    pub(super) fn advance(&mut self) -> Result<(), DataError> {
        let step_end = self.step_end()?;
        self.micro_step += 1;
        if self.micro_step == self.options.accumulation {
            // A cursor that is beyond the end already, as when a run resumes with fewer epochs, stays there.
            let end = self.end.unwrap_or(u64::MAX).max(self.samples_consumed);
            self.set_samples_consumed(step_end.min(end));
        }
        Ok(())
    }

    fn sample(&mut self, sample: u64) -> Result<PackedSequence, DataError> {
        if self.end.is_some_and(|end| sample >= end) {
            return Ok(PackedSequence::masked(self.data.seq_len()));
        }
        let (source, sequence) = self.order.place(sample);
        self.data.sequence(source, sequence)
    }

    fn step_end(&self) -> Result<u64, DataError> {
        let Self { samples_consumed, train_batch_size, .. } = *self;
        let overflow = DataError::CursorOverflow { samples_consumed, train_batch_size };
        samples_consumed.checked_add(train_batch_size).ok_or(overflow)
    }
}
