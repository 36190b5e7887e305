//! Metrics and summaries of an engine.

use super::{Engine, EngineError, StepReport};
use crate::comm::{GroupStats, ProcessGroup, ProcessGroupExt};
use crate::model::ModelConfig;
use crate::monitor::{Metrics, RankSummary};
use crate::sequence_parallel::{AttentionShape, ExchangePlan};
use crate::zero::{RingGroups, StateBytes};
use std::sync::Arc;
use ulysses_kernels::attention::grouped_heads;
use ulysses_kernels::device::gpu_memory;
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

impl Engine {
    /// Returns the bytes that this rank sent and holds, next to the formulas for a Llama-style model and all `passes` of
    /// the run. Collective.
    ///
    /// # Errors
    /// Failed communication.
    pub fn summary(&self, model: &ModelConfig, passes: &[Passes]) -> Result<RankSummary, EngineError> {
        // The count of sent bytes is complete once all other ranks have received them.
        let groups = self.groups.by_axis();
        groups.iter().try_for_each(|(_, group)| group.barrier())?;
        let (measured, expected) = (self.zero.state_bytes(), self.zero.expected_state_bytes());
        Ok(RankSummary {
            rank: self.global_rank,
            // By axis: a group that spans the world is the world group and has its name.
            groups: by_axis(&groups),
            expected_exchange_bytes: passes
                .iter()
                .map(|passes| self.exchange_bytes(model, *passes))
                .sum::<Result<u64, EngineError>>()?,
            held_bytes: pairs(measured, expected),
            peak_by_category: match gpu_memory(&self.workspace.options().device) {
                Some(gpu) => self.state_by_category().with_rest_of(gpu.peak),
                None => memory::peak_by_category(),
            },
        })
    }

    /// Returns the bytes of the state that this rank stores on its device: parameters, gradients and optimizer state. The
    /// driver of a GPU knows no categories, so all else there is other memory.
    pub fn state_by_category(&self) -> memory::ByCategory {
        let StateBytes { parameters, gradients, optimizer, .. } = self.zero.state_bytes();
        memory::ByCategory { parameters, gradients, optimizer, ..memory::ByCategory::default() }
    }

    /// Bytes that this rank sends in the Ulysses exchanges of some passes, by formula.
    fn exchange_bytes(&self, model: &ModelConfig, passes: Passes) -> Result<u64, EngineError> {
        let Passes { seq_len, block_size, trained, evaluated } = passes;
        let sp = &self.groups.sp;
        let (ring_rank, group) = match (&self.groups.ring, block_size.filter(|size| *size < sp.world_size()))
        {
            (None, None) => (0, sp),
            (Some(RingGroups { ring, ulysses }), _) => (ring.rank(), ulysses),
            (None, Some(size)) => match self.groups.sp_blocks.iter().find(|group| group.world_size() == size)
            {
                Some(group) => (0, group),
                // A block of one rank exchanges nothing.
                None => return Ok(0),
            },
        };
        let seq_len = self.config.seq_sharding().ring_tokens(seq_len, ring_rank).len();
        let batch = block_size.map_or(self.config.micro_batch_size, |_| 1);
        let elem_bytes = self.workspace.options().dtype.size_in_bytes() as u64;
        let mut bytes = 0;
        for (index, layer) in model.layers.iter().enumerate() {
            for chunk in layer.head_chunks(self.config.ulysses.head_chunks) {
                let (num_heads, num_kv_heads, head_dim) = (chunk.q.len(), chunk.kv.len(), layer.head_dim);
                let shape = AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim };
                let q_to_kv = grouped_heads(num_heads, num_kv_heads);
                let volume = ExchangePlan::new(shape, &q_to_kv, group.world_size(), group.rank())?.volume();
                let again = match self.is_recomputed(index) {
                    true => volume.recompute_bytes(self.config.saves_attention_output(), elem_bytes),
                    false => 0,
                };
                bytes += trained * (volume.total_elems() * elem_bytes + again);
                bytes += evaluated * volume.forward_elems * elem_bytes;
            }
        }
        Ok(bytes)
    }
}

/// The counters of the groups along each axis; those of the blocks of sp are added to sp's.
fn by_axis(groups: &[(&'static str, &Arc<dyn ProcessGroup>)]) -> Vec<(String, GroupStats)> {
    let mut sums: Vec<(String, GroupStats)> = Vec::new();
    for (axis, group) in groups {
        match sums.iter_mut().find(|(known, _)| known == axis) {
            Some((_, sum)) => *sum += &group.stats(),
            None => sums.push(((*axis).to_owned(), group.stats())),
        }
    }
    sums
}

fn pairs(measured: StateBytes, expected: StateBytes) -> [(u64, u64); 3] {
    [
        (measured.parameters, expected.parameters),
        (measured.gradients, expected.gradients),
        (measured.optimizer, expected.optimizer),
    ]
}
