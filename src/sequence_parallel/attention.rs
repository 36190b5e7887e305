//! [`UlyssesAttention`]: makes a local attention sequence-parallel.

use super::exchange::Qkv;
use super::{AttentionShape, Exchange, ExchangePlan, HeadSharded, SeqSharded, SequenceParallelError};
use crate::comm::ProcessGroup;
use candle_core::Tensor;
use parking_lot::Mutex;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::{Attention, AttentionError, AttentionLayout, SavedAttention, Upstream};
use ulysses_kernels::device::dry;
use ulysses_kernels::memory::{Category, with_category};

/// Runs a local attention over whole sequences that are sharded over an `sp` group.
///
/// Takes and returns sequence-sharded tensors and implements [`Attention`], so a layer does not know whether
/// its sequence is sharded. The state saved for the backward pass is head-sharded, so the exchange of q, k
/// and v is not repeated.
///
/// Communication per layer: one all-to-all of q, k, v and one of the output in the forward pass, and the same
/// in the backward pass. [`backward_recomputed`](Attention::backward_recomputed) exchanges q, k and v again,
/// and `delta`, which is as small as `lse`; the output stays sequence-sharded. With `sp_size` 1 there is no
/// communication. All calls are collective over the group.
pub struct UlyssesAttention {
    local: Arc<dyn Attention>,
    group: Arc<dyn ProcessGroup>,
    /// The plans for this micro batch, one per number of heads, shared by all layers.
    shardings: Mutex<Vec<Arc<Sharding>>>,
}

/// The exchange and the local layout that follow from a sequence-sharded layout on this rank.
struct Sharding {
    sharded: AttentionLayout,
    shape: AttentionShape,
    exchange: Exchange,
    /// Layout of the local attention: all tokens, this rank's heads.
    whole: AttentionLayout,
}

impl UlyssesAttention {
    /// Makes `local` sequence-parallel over `group`.
    pub fn new(local: Arc<dyn Attention>, group: Arc<dyn ProcessGroup>) -> Self {
        Self { local, group, shardings: Mutex::default() }
    }

    /// Finds the plan of an earlier call with the same layout, or creates it and drops those of other tokens.
    fn sharding(
        &self,
        layout: &AttentionLayout,
        shape: AttentionShape,
    ) -> Result<Arc<Sharding>, SequenceParallelError> {
        let mut known = self.shardings.lock();
        let is_this = |known: &&Arc<Sharding>| {
            known.shape == shape
                && shares_tokens(&known.sharded, layout)
                && Arc::ptr_eq(known.sharded.q_to_kv(), layout.q_to_kv())
        };
        if let Some(sharding) = known.iter().find(is_this) {
            return Ok(sharding.clone());
        }
        known.retain(|known| shares_tokens(&known.sharded, layout));
        let sharding = Arc::new(self.plan(layout, shape, known.first().map(|known| &known.whole))?);
        known.push(sharding.clone());
        Ok(sharding)
    }

    /// `same_tokens`: the local layout of the same tokens with other heads.
    fn plan(
        &self,
        layout: &AttentionLayout,
        shape: AttentionShape,
        same_tokens: Option<&AttentionLayout>,
    ) -> Result<Sharding, SequenceParallelError> {
        let (rank, sp_size) = (self.group.rank(), self.group.world_size());
        let plan = ExchangePlan::new(shape, layout.q_to_kv(), sp_size, rank)?;
        let expected = plan.seq_ranges()[rank].clone();
        // A dry run has no positions.
        let positions = [layout.q_positions(), layout.kv_positions()].into_iter();
        for positions in positions.filter(|_| !dry::is_dry()) {
            if !positions.iter().map(|&p| p as usize).eq(expected.clone()) {
                let got = positions.first().copied().zip(positions.last().copied());
                let seq_len = shape.seq_len;
                return Err(SequenceParallelError::Shard { rank, sp_size, seq_len, expected, got });
            }
        }
        let heads = plan.q_to_kv_local();
        let whole = match same_tokens {
            Some(same_tokens) => same_tokens.with_heads(heads),
            None => {
                let (tokens, documents) = (0..shape.seq_len as u32, layout.cu_seqlens().clone());
                AttentionLayout::of_ranges(tokens.clone(), tokens, documents, heads, layout.window())?
            }
        };
        let exchange = Exchange::new(plan, self.group.clone());
        Ok(Sharding { sharded: layout.clone(), shape, exchange, whole })
    }

    fn forward_sharded(
        &self,
        qkv: Qkv,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, SavedAttention), SequenceParallelError> {
        let (batch, _, num_heads, head_dim) = qkv[0].dims4()?;
        let num_kv_heads = qkv[1].dims4()?.2;
        let shape = AttentionShape { batch, seq_len: seq_len(layout), num_heads, num_kv_heads, head_dim };
        let sharding = self.sharding(layout, shape)?;
        let [q, k, v] = sharding.send_qkv(qkv, workspace)?;
        let attend = || self.local.forward(q, k, v, &sharding.whole, workspace);
        let (out, saved) =
            tracing::trace_span!("attention").in_scope(|| with_category(Category::Exchange, attend))?;
        let SeqSharded(out) = sharding.exchange.out_head_to_seq(&HeadSharded(out), workspace)?;
        Ok((out, saved))
    }

    fn backward_sharded(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<Qkv, SequenceParallelError> {
        let sharding = self.sharding_of_gradient(dout, layout)?;
        let dout = sharding.send_dout(dout, workspace)?;
        let attend = || self.local.backward(saved, &dout, &sharding.whole, workspace);
        let (dq, dk, dv) = tracing::trace_span!("attention backward")
            .in_scope(|| with_category(Category::Exchange, attend))?;
        workspace.recycle(dout);
        sharding.send_gradients([dq, dk, dv], workspace)
    }

    fn backward_recomputed_sharded(
        &self,
        qkv: Qkv,
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<Qkv, SequenceParallelError> {
        let sharding = self.sharding_of_gradient(upstream.dout, layout)?;
        let [q, k, v] = sharding.send_qkv(qkv, workspace)?;
        let delta = SeqSharded(upstream.delta.clone());
        let send_delta = || sharding.exchange.delta_seq_to_head(&delta, workspace);
        let HeadSharded(delta) = with_category(Category::Exchange, send_delta)?;
        let dout = sharding.send_dout(upstream.dout, workspace)?;
        let upstream = Upstream { dout: &dout, lse: upstream.lse, delta: &delta };
        let attend = || self.local.backward_recomputed(q, k, v, &upstream, &sharding.whole, workspace);
        let (dq, dk, dv) = tracing::trace_span!("attention backward")
            .in_scope(|| with_category(Category::Exchange, attend))?;
        [dout, delta].into_iter().for_each(|tensor| workspace.recycle(tensor));
        sharding.send_gradients([dq, dk, dv], workspace)
    }

    /// The plan of the forward pass whose output has the gradient `dout`.
    fn sharding_of_gradient(
        &self,
        dout: &Tensor,
        layout: &AttentionLayout,
    ) -> Result<Arc<Sharding>, SequenceParallelError> {
        let (batch, _, num_heads, head_dim) = dout.dims4()?;
        let num_kv_heads = layout.q_to_kv().last().map_or(0, |kv| kv + 1);
        let shape = AttentionShape { batch, seq_len: seq_len(layout), num_heads, num_kv_heads, head_dim };
        self.sharding(layout, shape)
    }
}

impl Sharding {
    /// Sends q, k and v to the ranks with their heads, and recycles them.
    fn send_qkv(&self, qkv: Qkv, workspace: &Workspace) -> Result<Qkv, SequenceParallelError> {
        let qkv = SeqSharded(qkv);
        let HeadSharded(received) =
            with_category(Category::Exchange, || self.exchange.qkv_seq_to_head(&qkv, workspace))?;
        qkv.0.into_iter().for_each(|tensor| workspace.recycle(tensor));
        Ok(received)
    }

    /// Sends the output's gradient to the ranks with its heads.
    fn send_dout(&self, dout: &Tensor, workspace: &Workspace) -> Result<Tensor, SequenceParallelError> {
        let dout = SeqSharded(dout.clone());
        let send = || self.exchange.out_seq_to_head(&dout, workspace);
        Ok(with_category(Category::Exchange, send)?.0)
    }

    /// Sends the gradients of q, k and v to the ranks with their tokens, and recycles them.
    fn send_gradients(&self, grads: Qkv, workspace: &Workspace) -> Result<Qkv, SequenceParallelError> {
        let grads = HeadSharded(grads);
        let SeqSharded(received) = self.exchange.qkv_head_to_seq(&grads, workspace)?;
        grads.0.into_iter().for_each(|tensor| workspace.recycle(tensor));
        Ok(received)
    }
}

impl Attention for UlyssesAttention {
    /// The storage of `q`, `k` and `v` is recycled once they are sent.
    ///
    /// # Shapes
    /// `q`, `o`: `[batch, seq_local, num_heads, head_dim]`; `k`, `v`:
    /// `[batch, seq_local, num_kv_heads, head_dim]`. The saved state is head-sharded: `[batch, seq,
    /// heads_local, head_dim]`.
    ///
    /// # Errors
    /// Fewer heads or tokens than ranks, a layout whose positions are not this rank's shard of the sequence,
    /// tensors of another shape, or a failed collective.
    fn forward(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, SavedAttention), AttentionError> {
        if self.group.world_size() == 1 {
            return self.local.forward(q, k, v, layout, workspace);
        }
        self.forward_sharded([q, k, v], layout, workspace).map_err(into_attention_error)
    }

    fn backward(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError> {
        if self.group.world_size() == 1 {
            return self.local.backward(saved, dout, layout, workspace);
        }
        let [dq, dk, dv] =
            self.backward_sharded(saved, dout, layout, workspace).map_err(into_attention_error)?;
        Ok((dq, dk, dv))
    }

    /// `upstream.lse` is head-sharded, as the forward pass saved it; `upstream.delta` is sequence-sharded:
    /// `[batch, num_heads, seq_local]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn backward_recomputed(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError> {
        if self.group.world_size() == 1 {
            return self.local.backward_recomputed(q, k, v, upstream, layout, workspace);
        }
        let [dq, dk, dv] = self
            .backward_recomputed_sharded([q, k, v], upstream, layout, workspace)
            .map_err(into_attention_error)?;
        Ok((dq, dk, dv))
    }
}

fn into_attention_error(error: SequenceParallelError) -> AttentionError {
    match error {
        SequenceParallelError::Attention(error) => error,
        other => AttentionError::other(other),
    }
}

/// Number of tokens in a whole sequence.
fn seq_len(layout: &AttentionLayout) -> usize {
    layout.cu_seqlens().first().and_then(|row| row.last()).map_or(0, |&end| end as usize)
}

/// Returns whether two layouts share their tokens, judged by shared pointers.
fn shares_tokens(a: &AttentionLayout, b: &AttentionLayout) -> bool {
    Arc::ptr_eq(a.q_positions(), b.q_positions())
        && Arc::ptr_eq(a.kv_positions(), b.kv_positions())
        && Arc::ptr_eq(a.cu_seqlens(), b.cu_seqlens())
        && a.window() == b.window()
}
