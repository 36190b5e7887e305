//! Hands one rank its micro batches, step after step.

use super::order::SampleOrder;
use super::{DataError, GlobalBatch, MicroBatch, PackedRows};
use crate::mesh::DeviceMesh;
use std::sync::Arc;

/// Where a rank stands for the purpose of data: its rows by dp, its tokens of each row by sp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Ranks that take different rows.
    pub dp_size: usize,
    /// This rank among them.
    pub dp_rank: usize,
    /// Ranks that share each row.
    pub sp_size: usize,
    /// This rank among them.
    pub sp_rank: usize,
}

impl Placement {
    /// A rank that takes all rows whole.
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

/// How a loader draws from its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Seed of the order of the rows.
    pub seed: u64,
    /// Rows that a rank takes at once.
    pub micro_batch: usize,
    /// Micro steps per step.
    pub accumulation: usize,
    /// The rank that is served.
    pub placement: Placement,
}

/// The micro batches of one rank, in an order that does not depend on the mesh.
///
/// With `B = micro_batch × accumulation × dp_size`, a step consumes the next B samples. Within them, micro step
/// a of dp rank d takes samples `(a·dp_size + d)·micro_batch ..` — contiguous rows, so over the micro steps and
/// dp ranks, in this order, the step's samples come out in their global order on every mesh.
///
/// Epochs follow each other without a gap: a step may take the last rows of one and the first of the next.
#[derive(Debug, Clone)]
pub struct DataLoader {
    rows: Arc<PackedRows>,
    options: LoaderOptions,
    train_batch_size: u64,
    order: SampleOrder,
    samples_consumed: u64,
    /// Micro steps of the current step that were handed out.
    micro_step: usize,
}

impl DataLoader {
    /// A loader at the start of the data.
    ///
    /// # Errors
    /// When a count is 0 or overflows, the rank does not exist, or a row has fewer tokens than sp ranks.
    pub fn new(rows: Arc<PackedRows>, options: LoaderOptions) -> Result<Self, DataError> {
        let LoaderOptions { seed, micro_batch, accumulation, placement } = options;
        for (name, count) in [("micro_batch", micro_batch), ("accumulation", accumulation)] {
            if count == 0 {
                return Err(DataError::Zero { name });
            }
        }
        placement.check()?;
        let Placement { dp_size, sp_size, .. } = placement;
        if rows.seq_len() < sp_size {
            return Err(DataError::SeqLenBelowSp { seq_len: rows.seq_len(), sp_size });
        }
        let train_batch_size = micro_batch
            .checked_mul(accumulation)
            .and_then(|per_rank| per_rank.checked_mul(dp_size))
            .ok_or(DataError::BatchTooLarge { micro_batch, accumulation, dp_size })?;
        Ok(Self {
            order: SampleOrder::new(seed, rows.num_rows()),
            rows,
            options,
            train_batch_size: train_batch_size as u64,
            samples_consumed: 0,
            micro_step: 0,
        })
    }

    /// Samples of a step, over all ranks and micro steps.
    pub fn train_batch_size(&self) -> u64 {
        self.train_batch_size
    }

    /// Samples of all whole steps so far, over all ranks: the state that a checkpoint keeps.
    pub fn samples_consumed(&self) -> u64 {
        self.samples_consumed
    }

    /// The epoch that the next step's first sample is in, from 0.
    pub fn epoch(&self) -> u64 {
        self.order.epoch_of(self.samples_consumed)
    }

    /// Continues at the beginning of a step, whatever mesh consumed the samples before.
    pub fn set_samples_consumed(&mut self, samples_consumed: u64) {
        self.samples_consumed = samples_consumed;
        self.micro_step = 0;
    }

    /// This rank's part of the next micro step; every `accumulation` of them complete a step.
    ///
    /// # Errors
    /// When the cursor was set so far that samples can no longer be counted.
    pub fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
        let LoaderOptions { micro_batch, accumulation, placement, .. } = self.options;
        let step_end =
            self.samples_consumed.checked_add(self.train_batch_size).ok_or(DataError::CursorOverflow {
                samples_consumed: self.samples_consumed,
                train_batch_size: self.train_batch_size,
            })?;
        let block = self.micro_step * placement.dp_size + placement.dp_rank;
        let first = self.samples_consumed + (block * micro_batch) as u64;
        let rows = (first..first + micro_batch as u64)
            .map(|sample| self.rows.row(self.order.row(sample)))
            .collect::<Result<Vec<_>, _>>()?;
        let shard = GlobalBatch::from_rows(rows, self.rows.seq_len()).micro_batch(
            0..micro_batch,
            placement.sp_size,
            placement.sp_rank,
        )?;
        self.micro_step += 1;
        if self.micro_step == accumulation {
            self.set_samples_consumed(step_end);
        }
        Ok(shard)
    }
}
