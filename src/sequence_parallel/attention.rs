//! [`UlyssesAttention`]: makes a local attention sequence-parallel.

use super::exchange::Qkv;
use super::shard::{Member, check_shard, is_same, seq_len, shares_mask, shares_tokens};
use super::{
    AttentionShape, Exchange, ExchangePlan, HeadSharded, PendingExchange, SeqSharded, SequenceParallelError,
};
use crate::comm::ProcessGroup;
use crate::mesh::SeqSharding;
use candle_core::Tensor;
use parking_lot::Mutex;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::{
    Attention, AttentionError, AttentionLayout, QkvGradients, Returning, SavedAttention, StartedBackward,
    StartedForward, StartedRecomputed, Upstream,
};
use ulysses_kernels::memory::{Category, with_category};

/// Runs a local attention over whole sequences that are sharded over an `sp` group.
/// Within a ring, the group shares the tokens of one ring rank instead of whole sequences.
///
/// Takes and returns sequence-sharded tensors and implements [`Attention`], so a layer does not know whether
/// its sequence is sharded. The state saved for the backward pass is head-sharded, so the exchange of q, k
/// and v is not repeated.
///
/// Communication per layer: one all-to-all of q, k, v and one of the output in the forward pass, and the same
/// in the backward pass. [`backward_recomputed`](Attention::backward_recomputed) exchanges q, k and v again,
/// and `delta`, which is as small as `lse`; the output stays sequence-sharded. A group of one rank does not
/// communicate. All calls are collective over the group.
///
/// The steps of a call send the operands, attend, and return the results. Between them the caller may run steps
/// of other calls, on which the same exchanges then overlap.
pub struct UlyssesAttention {
    local: Arc<dyn Attention>,
    group: Arc<dyn ProcessGroup>,
    sharding: SeqSharding,
    /// The ring rank of the group.
    ring_rank: usize,
    /// The plans for this micro batch, one per kind of attention and number of heads, shared by all layers.
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
        let sharding = SeqSharding::from(group.world_size());
        Self { local, group, sharding, ring_rank: 0, shardings: Mutex::default() }
    }

    /// Makes `local`, which is a [`RingAttention`](super::RingAttention) whose rank is `ring_rank`, sequence-parallel over
    /// `group`: the ranks that share the tokens of that ring rank.
    pub fn within_ring(
        local: Arc<dyn Attention>,
        group: Arc<dyn ProcessGroup>,
        sharding: SeqSharding,
        ring_rank: usize,
    ) -> Self {
        Self { sharding, ring_rank, ..Self::new(local, group) }
    }

    /// Finds the plan of an earlier call with the same layout, or creates it and drops those of other tokens.
    fn sharding(
        &self,
        layout: &AttentionLayout,
        shape: AttentionShape,
    ) -> Result<Arc<Sharding>, SequenceParallelError> {
        let mut known = self.shardings.lock();
        let is_this = |known: &&Arc<Sharding>| known.shape == shape && is_same(&known.sharded, layout);
        if let Some(sharding) = known.iter().find(is_this) {
            return Ok(sharding.clone());
        }
        known.retain(|known| shares_tokens(&known.sharded, layout));
        let same_mask = known.iter().find(|known| shares_mask(&known.sharded, layout));
        let sharding = Arc::new(self.plan(layout, shape, same_mask.map(|known| &known.whole))?);
        known.push(sharding.clone());
        Ok(sharding)
    }

    /// `same_mask`: the local layout of the same tokens and window with other heads.
    fn plan(
        &self,
        layout: &AttentionLayout,
        shape: AttentionShape,
        same_mask: Option<&AttentionLayout>,
    ) -> Result<Sharding, SequenceParallelError> {
        let (rank, group_size) = (self.group.rank(), self.group.world_size());
        let plan = ExchangePlan::new(shape, layout.q_to_kv(), group_size, rank);
        let plan = plan.map_err(|error| error.within(self.sharding, seq_len(layout)))?;
        let tokens = self.sharding.ring_tokens(seq_len(layout), self.ring_rank);
        check_shard(layout, &tokens.slice(&plan.seq_ranges()[rank]), Member { rank, group_size })?;
        let heads = plan.q_to_kv_local();
        let whole = match same_mask {
            Some(same_mask) => same_mask.with_heads(heads),
            None => {
                let (tokens, documents) = (tokens.ranges(), layout.cu_seqlens().clone());
                AttentionLayout::of_ranges(tokens, tokens, documents, heads, layout.window())?
            }
        };
        let exchange = Exchange::new(plan, self.group.clone());
        let whole = whole.with_logits(layout.logits());
        Ok(Sharding { sharded: layout.without_sinks(), shape, exchange, whole })
    }

    fn start_forward_sharded<'a>(
        &'a self,
        qkv: Qkv,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedForward<'a>, SequenceParallelError> {
        let sharding = self.sharding(layout, self.shape_of(&qkv, layout)?)?;
        let (sent, whole) = (sharding.send_qkv(qkv, workspace)?, sharding.whole_with_sinks(layout)?);
        Ok(Box::new(move |()| {
            let HeadSharded([q, k, v]) = sent.wait(workspace)?;
            let attend = || self.local.forward(q, k, v, &whole, workspace);
            let (out, saved) =
                tracing::trace_span!("attention").in_scope(|| with_category(Category::Exchange, attend))?;
            let returning = sharding.exchange.out_head_to_seq(&HeadSharded(out), workspace)?;
            Ok((saved, Returning::UnderWay(Box::new(move || Ok(returning.wait()?.0)))))
        }))
    }

    fn start_backward_sharded<'a>(
        &'a self,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedBackward<'a>, SequenceParallelError> {
        let of_output = self.sharding_of_output(dout, layout)?;
        let (sent, layout) = (of_output.send_dout(dout, workspace)?, layout.clone());
        Ok(Box::new(move |saved| {
            let HeadSharded(dout) = sent.wait()?;
            let head_dim = saved.q.dim(3).map_err(SequenceParallelError::from)?;
            let sharding = self.sharding(&layout, AttentionShape { head_dim, ..of_output.shape })?;
            let whole = sharding.whole_with_sinks(&layout)?;
            let attend = || self.local.backward(saved, &dout, &whole, workspace);
            let gradients = tracing::trace_span!("attention backward")
                .in_scope(|| with_category(Category::Exchange, attend))?;
            workspace.recycle(dout);
            Ok(sharding.return_gradients(gradients, workspace)?)
        }))
    }

    fn start_recomputed_sharded<'a>(
        &'a self,
        qkv: Qkv,
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedRecomputed<'a>, SequenceParallelError> {
        let sharding = self.sharding(layout, self.shape_of(&qkv, layout)?)?;
        let sent_qkv = sharding.send_qkv(qkv, workspace)?;
        let delta = SeqSharded(upstream.delta.clone());
        let send_delta = || sharding.exchange.delta_seq_to_head(&delta, workspace);
        let sent_delta = with_category(Category::Exchange, send_delta)?;
        let sent_dout = sharding.send_dout(upstream.dout, workspace)?;
        let (lse, whole) = (upstream.lse.clone(), sharding.whole_with_sinks(layout)?);
        Ok(Box::new(move |()| {
            let HeadSharded([q, k, v]) = sent_qkv.wait(workspace)?;
            let (HeadSharded(delta), HeadSharded(dout)) = (sent_delta.wait()?, sent_dout.wait()?);
            let upstream = Upstream { dout: &dout, lse: &lse, delta: &delta };
            let attend = || self.local.backward_recomputed(q, k, v, &upstream, &whole, workspace);
            let gradients = tracing::trace_span!("attention backward")
                .in_scope(|| with_category(Category::Exchange, attend))?;
            [dout, delta].into_iter().for_each(|tensor| workspace.recycle(tensor));
            Ok(sharding.return_gradients(gradients, workspace)?)
        }))
    }

    fn shape_of(
        &self,
        [q, k, v]: &Qkv,
        layout: &AttentionLayout,
    ) -> Result<AttentionShape, SequenceParallelError> {
        let (batch, _, num_heads, head_dim) = q.dims4()?;
        let (num_kv_heads, value_head_dim) = (k.dims4()?.2, v.dims4()?.3);
        let seq_len = self.num_tokens(layout);
        Ok(AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, value_head_dim })
    }

    /// A plan for the gradient `dout` of the output of a forward pass, which does not say how wide its queries were.
    fn sharding_of_output(
        &self,
        dout: &Tensor,
        layout: &AttentionLayout,
    ) -> Result<Arc<Sharding>, SequenceParallelError> {
        let (batch, _, num_heads, value_head_dim) = dout.dims4()?;
        let num_kv_heads = layout.q_to_kv().last().map_or(0, |kv| kv + 1);
        let (seq_len, head_dim) = (self.num_tokens(layout), value_head_dim);
        let shape = AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, value_head_dim };
        let is_of_output = |known: &&Arc<Sharding>| {
            AttentionShape { head_dim, ..known.shape } == shape && is_same(&known.sharded, layout)
        };
        let known = self.shardings.lock().iter().find(is_of_output).cloned();
        known.map_or_else(|| self.sharding(layout, shape), Ok)
    }

    /// Tokens per sequence that the group shares: all of them without a ring.
    fn num_tokens(&self, layout: &AttentionLayout) -> usize {
        self.sharding.ring_tokens(seq_len(layout), self.ring_rank).len()
    }
}

/// q, k and v on their way, or their gradients. They are recycled once they are sent.
struct SentQkv<T> {
    pending: PendingExchange<T>,
    sent: Qkv,
}

impl<T> SentQkv<T> {
    fn wait(self, workspace: &Workspace) -> Result<T, SequenceParallelError> {
        let received = self.pending.wait()?;
        self.sent.into_iter().for_each(|tensor| workspace.recycle(tensor));
        Ok(received)
    }
}

impl Sharding {
    /// The layout of the local attention, with the sinks of this rank's heads if the sharded `layout` has sinks.
    fn whole_with_sinks(&self, layout: &AttentionLayout) -> Result<AttentionLayout, SequenceParallelError> {
        let plan = self.exchange.plan();
        let own = &plan.q_head_ranges()[plan.rank()];
        let sinks = layout.sinks().map(|sinks| sinks.heads(own)).transpose()?;
        Ok(self.whole.clone().with_sinks(sinks))
    }

    /// Sends q, k and v to the ranks with their heads.
    fn send_qkv(
        &self,
        qkv: Qkv,
        workspace: &Workspace,
    ) -> Result<SentQkv<HeadSharded<Qkv>>, SequenceParallelError> {
        let qkv = SeqSharded(qkv);
        let send = || self.exchange.qkv_seq_to_head(&qkv, workspace);
        let pending = with_category(Category::Exchange, send)?;
        Ok(SentQkv { pending, sent: qkv.0 })
    }

    /// Sends the output's gradient to the ranks with its heads.
    fn send_dout(
        &self,
        dout: &Tensor,
        workspace: &Workspace,
    ) -> Result<PendingExchange<HeadSharded<Tensor>>, SequenceParallelError> {
        let dout = SeqSharded(dout.clone());
        with_category(Category::Exchange, || self.exchange.out_seq_to_head(&dout, workspace))
    }

    /// Sends the gradients of q, k and v to the ranks with their tokens.
    fn return_gradients<'a>(
        &self,
        QkvGradients { dq, dk, dv }: QkvGradients,
        workspace: &'a Workspace,
    ) -> Result<Returning<'a, QkvGradients>, SequenceParallelError> {
        let gradients = HeadSharded([dq, dk, dv]);
        let pending = self.exchange.qkv_head_to_seq(&gradients, workspace)?;
        let returning = SentQkv { pending, sent: gradients.0 };
        Ok(Returning::UnderWay(Box::new(move || {
            let SeqSharded([dq, dk, dv]) = returning.wait(workspace)?;
            Ok(QkvGradients { dq, dk, dv })
        })))
    }
}

impl Attention for UlyssesAttention {
    /// The storage of `q`, `k` and `v` is recycled once they are sent.
    ///
    /// # Shapes
    /// `q`: `[batch, seq_local, num_heads, head_dim]`; `k`:
    /// `[batch, seq_local, num_kv_heads, head_dim]`; `v` and `o` alike, with the size of value heads. The saved state is head-sharded: `[batch, seq,
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
        let (saved, out) = self.start_forward(q, k, v, layout, workspace)?(())?;
        Ok((out.wait()?, saved))
    }

    fn backward(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError> {
        self.start_backward(dout, layout, workspace)?(saved)?.wait()
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
    ) -> Result<QkvGradients, AttentionError> {
        self.start_backward_recomputed(q, k, v, upstream, layout, workspace)?(())?.wait()
    }

    fn start_forward<'a>(
        &'a self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedForward<'a>, AttentionError> {
        if self.group.world_size() == 1 {
            return self.local.start_forward(q, k, v, layout, workspace);
        }
        Ok(self.start_forward_sharded([q, k, v], layout, workspace)?)
    }

    fn start_backward<'a>(
        &'a self,
        dout: &Tensor,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedBackward<'a>, AttentionError> {
        if self.group.world_size() == 1 {
            return self.local.start_backward(dout, layout, workspace);
        }
        Ok(self.start_backward_sharded(dout, layout, workspace)?)
    }

    fn start_backward_recomputed<'a>(
        &'a self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &'a Workspace,
    ) -> Result<StartedRecomputed<'a>, AttentionError> {
        if self.group.world_size() == 1 {
            return self.local.start_backward_recomputed(q, k, v, upstream, layout, workspace);
        }
        Ok(self.start_recomputed_sharded([q, k, v], upstream, layout, workspace)?)
    }
}
