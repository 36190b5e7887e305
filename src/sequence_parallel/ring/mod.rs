//! Ring attention: every rank keeps its queries, and keys and values circulate.

mod backward;
mod forward;
mod schedule;
mod sums;
mod transfer;

use super::SequenceParallelError;
use super::shard::{is_same, shares_mask, shares_tokens};
use crate::comm::ProcessGroup;
use crate::mesh::SeqSharding;
use candle_core::Tensor;
use parking_lot::Mutex;
use schedule::RingSchedule;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::{AttentionCompute, AttentionError, AttentionLayout, QkvGradients, Upstream};
use ulysses_kernels::memory::{Category, with_category};

/// Runs a local attention over sequences whose tokens are divided over a ring (Ring Attention, Liu et al., arXiv
/// 2310.01889). It needs no heads to divide.
///
/// The block of keys and values of each rank travels to the ranks that see one of its keys. While a rank attends one
/// block, it receives that of the next step. Outputs are merged by their log-denominators
/// ([`merge`](ulysses_kernels::attention::merge)), in f32. In the backward pass blocks travel again, and the gradients
/// of each block return to its rank.
///
/// In a causal sequence every rank passes each block to the next one, and gradients follow one step behind. Where a rank
/// sees nothing of a block, in packed documents and with a sliding window, the block's rank sends it directly to those
/// that see it, and they return their gradients directly. The order of summation does not depend on timing. Sums of 16-bit
/// gradients are f32, and travel as f32.
///
/// With `C = batch · tokens · num_kv_heads · head_dim` keys on each rank, a causal sequence on R ranks takes
/// `2 · (R − 1) · C` sent elements per layer forward. Backward takes as many again, and `2 · (R − 1) · C` f32
/// elements of gradients.
///
/// All calls are collective over the group.
pub struct RingAttention {
    local: Arc<dyn AttentionCompute>,
    group: Arc<dyn ProcessGroup>,
    sharding: SeqSharding,
    /// The schedules of this micro batch, one per kind of attention and number of heads, shared by all layers.
    schedules: Mutex<Vec<Arc<RingSchedule>>>,
}

impl RingAttention {
    /// Makes `local` a ring over `group`, whose rank `r` has the tokens [`SeqSharding::ring_tokens`] of ring rank `r`.
    pub fn new(
        local: Arc<dyn AttentionCompute>,
        group: Arc<dyn ProcessGroup>,
        sharding: SeqSharding,
    ) -> Self {
        Self { local, group, sharding, schedules: Mutex::default() }
    }

    /// Finds the schedule of an earlier call with the same layout, or creates it and drops those of other tokens.
    fn schedule(&self, layout: &AttentionLayout) -> Result<Arc<RingSchedule>, SequenceParallelError> {
        let mut known = self.schedules.lock();
        if let Some(schedule) = known.iter().find(|known| is_same(&known.own, layout)) {
            return Ok(schedule.clone());
        }
        known.retain(|known| shares_tokens(&known.own, layout));
        let schedule = Arc::new(match known.iter().find(|known| shares_mask(&known.own, layout)) {
            Some(same_mask) => same_mask.with_heads(layout),
            None => RingSchedule::new(layout, self.sharding, &*self.group)?,
        });
        known.push(schedule.clone());
        Ok(schedule)
    }
}

impl AttentionCompute for RingAttention {
    /// # Shapes
    /// `q`, `o`: `[batch, tokens, num_heads, head_dim]` with this ring rank's tokens; `k`, `v`:
    /// `[batch, tokens, num_kv_heads, head_dim]`; `lse`: `[batch, num_heads, tokens]`, over the whole sequence.
    ///
    /// # Errors
    /// A layout that is not of this ring rank's tokens, tensors of another shape, or a failed collective.
    fn attend(
        &self,
        [q, k, v]: [&Tensor; 3],
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor), AttentionError> {
        let schedule = self.schedule(layout)?;
        with_category(Category::Exchange, || {
            let pass = forward::Forward { ring: self, schedule: &schedule, q, workspace };
            pass.run([k.clone(), v.clone()])
        })
    }

    fn attend_backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError> {
        let schedule = self.schedule(layout)?;
        with_category(Category::Exchange, || {
            let pass = backward::Backward { ring: self, schedule: &schedule, q, upstream, workspace };
            pass.run([k.clone(), v.clone()])
        })
    }
}
