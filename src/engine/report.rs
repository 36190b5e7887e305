//! Metrics and summaries of an engine.

use crate::comm::{GroupStats, ProcessGroup};
use crate::monitor::Metrics;
use crate::zero::StateBytes;
use std::sync::Arc;
use ulysses_kernels::memory;

/// Number of passes that a rank has run over micro batches of one length and one number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passes {
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Number of sp ranks that share a single row, with flexible sequence parallelism; `None` for micro batches that all sp
    /// ranks share.
    pub block_size: Option<usize>,
    /// Micro batches that ran forward and backward.
    pub trained: u64,
    /// Micro batches that ran forward only.
    pub evaluated: u64,
}

/// The result of a step. Equal on all ranks, except for `comm_bytes`.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1, counting skipped steps.
    pub step: u64,
    /// Loss of the global batch before the update; 0 if no token had a label.
    pub loss: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Norm of the global gradient before clipping.
    pub grad_norm: f64,
    /// Tokens of the global batch (sequences × length), including masked tokens and padding.
    pub tokens: u64,
    /// Tokens of the global batch with a label.
    pub label_tokens: u64,
    /// Whether nothing was updated and the schedule did not advance: no token had a label, or the
    /// gradient overflowed.
    pub skipped: bool,
    /// Whether loss or gradient was not finite, which skips a step of 16-bit training.
    pub overflow: bool,
    /// The loss scale: 1 unless in fp16. Loss and norm are unscaled.
    pub loss_scale: f64,
    /// Bytes that this rank sent since the last report.
    pub comm_bytes: u64,
}

impl StepReport {
    /// The metrics of a step that took `step_seconds`, without those that the report does not know: data,
    /// shares of the time, and the peak FLOP/s of the machine.
    pub fn metrics(&self, step_seconds: f64) -> Metrics {
        Metrics {
            step: self.step,
            loss: self.loss,
            lr: self.lr,
            grad_norm: self.grad_norm,
            tokens: self.tokens,
            tokens_per_second: self.tokens as f64 / step_seconds,
            label_tokens: self.label_tokens,
            label_tokens_per_second: self.label_tokens as f64 / step_seconds,
            step_seconds,
            loss_scale: self.loss_scale,
            skipped: self.skipped,
            overflow: self.overflow,
            comm_bytes: self.comm_bytes,
            slowest_rank_ratio: 1.0,
            memory_bytes: u64::try_from(memory::live_bytes()).unwrap_or(0),
            memory_by_category: memory::live_by_category(),
            peak_memory_bytes: u64::try_from(memory::peak_bytes()).unwrap_or(0),
            peak_memory_by_category: memory::peak_by_category(),
            ..Metrics::default()
        }
    }
}

/// The counters of the groups along each axis; those of the blocks of sp are added to sp's.
pub(super) fn by_axis(groups: &[(&'static str, &Arc<dyn ProcessGroup>)]) -> Vec<(String, GroupStats)> {
    let mut sums: Vec<(String, GroupStats)> = Vec::new();
    for (axis, group) in groups {
        match sums.iter_mut().find(|(known, _)| known == axis) {
            Some((_, sum)) => *sum += &group.stats(),
            None => sums.push(((*axis).to_owned(), group.stats())),
        }
    }
    sums
}

pub(super) fn pairs(measured: StateBytes, expected: StateBytes) -> [(u64, u64); 3] {
    [
        (measured.parameters, expected.parameters),
        (measured.gradients, expected.gradients),
        (measured.optimizer, expected.optimizer),
    ]
}
