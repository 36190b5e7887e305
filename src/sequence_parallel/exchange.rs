//! The all-to-all exchanges: one collective per direction. Each is started and then waited for.

use super::{ExchangePlan, ExchangedDims, SequenceParallelError};
use crate::comm::{Pending, ProcessGroup, StridedPlan};
use candle_core::Tensor;
use std::array::from_ref;
use std::sync::Arc;
use tracing::Span;
use ulysses_kernels::Workspace;
use ulysses_kernels::device::dry;

/// Tensors with this rank's tokens and all heads: `[batch, seq_local, heads, head_dim]`.
#[derive(Debug, Clone)]
pub struct SeqSharded<T>(pub T);

/// Tensors with all tokens and this rank's heads: `[batch, seq, heads_local, head_dim]`.
#[derive(Debug, Clone)]
pub struct HeadSharded<T>(pub T);

/// Query, key and value, or their gradients.
pub type Qkv = [Tensor; 3];

/// A started exchange. Its inputs must not be written or recycled before [`wait`](Self::wait) has returned.
#[derive(Debug)]
#[must_use = "the data is valid only after `wait`"]
pub struct PendingExchange<T> {
    pub(super) pending: Pending,
    pub(super) received: T,
    /// The exchange in a trace, which shows its start and its wait.
    pub(super) span: Span,
}

impl<T> PendingExchange<T> {
    /// Blocks until the data has arrived.
    ///
    /// # Errors
    /// A failed collective.
    pub fn wait(self) -> Result<T, SequenceParallelError> {
        let Self { pending, received, span } = self;
        span.in_scope(|| pending.wait())?;
        Ok(received)
    }

    fn map<U>(self, map: impl FnOnce(T) -> U) -> PendingExchange<U> {
        let Self { pending, received, span } = self;
        PendingExchange { pending, received: map(received), span }
    }
}

/// Executes an [`ExchangePlan`] over a process group. Results are allocated from the caller's workspace.
///
/// The strided plans are created once and shared by all layers of a micro batch.
#[derive(Debug)]
pub struct Exchange {
    plan: ExchangePlan,
    group: Arc<dyn ProcessGroup>,
    qkv_seq_to_head: Arc<StridedPlan>,
    qkv_head_to_seq: Arc<StridedPlan>,
    out_seq_to_head: Arc<StridedPlan>,
    out_head_to_seq: Arc<StridedPlan>,
    delta_seq_to_head: Arc<StridedPlan>,
}

impl Exchange {
    /// Binds `plan` to `group`.
    pub fn new(plan: ExchangePlan, group: Arc<dyn ProcessGroup>) -> Self {
        Self {
            qkv_seq_to_head: Arc::new(plan.qkv_seq_to_head()),
            qkv_head_to_seq: Arc::new(plan.qkv_head_to_seq()),
            out_seq_to_head: Arc::new(plan.out_seq_to_head()),
            out_head_to_seq: Arc::new(plan.out_head_to_seq()),
            delta_seq_to_head: Arc::new(plan.delta_seq_to_head()),
            plan,
            group,
        }
    }

    /// The plan.
    pub fn plan(&self) -> &ExchangePlan {
        &self.plan
    }

    /// Starts to send q, k and v to the ranks with their heads, in one all-to-all.
    ///
    /// # Shapes
    /// `[B, S_local, H, D]`, `[B, S_local, H_kv, D]`, `[B, S_local, H_kv, D_v]` →
    /// `[B, S, H_local, D]`, `[B, S, H_kv_local, D]`, `[B, S, H_kv_local, D_v]`.
    ///
    /// # Errors
    /// A shape that differs from the plan's, or a failed collective.
    pub fn qkv_seq_to_head(
        &self,
        qkv: &SeqSharded<Qkv>,
        workspace: &Workspace,
    ) -> Result<PendingExchange<HeadSharded<Qkv>>, SequenceParallelError> {
        let call = Call {
            is_backward: false,
            span: tracing::trace_span!("qkv_seq_to_head"),
            plan: &self.qkv_seq_to_head,
        };
        let plan = &self.plan;
        let moved = [plan.q_dims().to_heads("q"), plan.k_dims().to_heads("k"), plan.v_dims().to_heads("v")];
        Ok(self.start(&qkv.0, moved, call, workspace)?.map(HeadSharded))
    }

    /// Starts to send the gradients of q, k and v back to the ranks with their tokens, in one all-to-all. Gradients of
    /// a shared KV head are summed there in rank order.
    ///
    /// # Shapes
    /// The inverse of [`qkv_seq_to_head`](Self::qkv_seq_to_head).
    ///
    /// # Errors
    /// A shape that differs from the plan's, or a failed collective.
    pub fn qkv_head_to_seq(
        &self,
        grads: &HeadSharded<Qkv>,
        workspace: &Workspace,
    ) -> Result<PendingExchange<SeqSharded<Qkv>>, SequenceParallelError> {
        let call = Call {
            is_backward: true,
            span: tracing::trace_span!("qkv_head_to_seq"),
            plan: &self.qkv_head_to_seq,
        };
        let plan = &self.plan;
        let moved =
            [plan.q_dims().to_tokens("dq"), plan.k_dims().to_tokens("dk"), plan.v_dims().to_tokens("dv")];
        Ok(self.start(&grads.0, moved, call, workspace)?.map(SeqSharded))
    }

    /// Starts to send the attention output back to the ranks with its tokens.
    ///
    /// # Shapes
    /// `[B, S, H_local, D_v]` → `[B, S_local, H, D_v]`.
    ///
    /// # Errors
    /// A shape that differs from the plan's, or a failed collective.
    pub fn out_head_to_seq(
        &self,
        out: &HeadSharded<Tensor>,
        workspace: &Workspace,
    ) -> Result<PendingExchange<SeqSharded<Tensor>>, SequenceParallelError> {
        let call = Call {
            is_backward: false,
            span: tracing::trace_span!("out_head_to_seq"),
            plan: &self.out_head_to_seq,
        };
        let moved = [self.plan.out_dims().to_tokens("o")];
        Ok(self.start(from_ref(&out.0), moved, call, workspace)?.map(|[received]| SeqSharded(received)))
    }

    /// Starts to send the gradient of the attention output to the ranks with its heads.
    ///
    /// # Shapes
    /// `[B, S_local, H, D_v]` → `[B, S, H_local, D_v]`.
    ///
    /// # Errors
    /// A shape that differs from the plan's, or a failed collective.
    pub fn out_seq_to_head(
        &self,
        dout: &SeqSharded<Tensor>,
        workspace: &Workspace,
    ) -> Result<PendingExchange<HeadSharded<Tensor>>, SequenceParallelError> {
        let call = Call {
            is_backward: true,
            span: tracing::trace_span!("out_seq_to_head"),
            plan: &self.out_seq_to_head,
        };
        let moved = [self.plan.out_dims().to_heads("do")];
        Ok(self.start(from_ref(&dout.0), moved, call, workspace)?.map(|[received]| HeadSharded(received)))
    }

    /// Starts to send `delta`, the row sums of the attention output times its gradient, to the ranks with its heads.
    ///
    /// # Shapes
    /// `[B, H, S_local]` → `[B, H_local, S]`, in f32.
    ///
    /// # Errors
    /// A shape that differs from the plan's, or a failed collective.
    pub fn delta_seq_to_head(
        &self,
        delta: &SeqSharded<Tensor>,
        workspace: &Workspace,
    ) -> Result<PendingExchange<HeadSharded<Tensor>>, SequenceParallelError> {
        let call = Call {
            is_backward: true,
            span: tracing::trace_span!("delta_seq_to_head"),
            plan: &self.delta_seq_to_head,
        };
        let ExchangedDims { seq_sharded, head_sharded } = self.plan.delta_dims();
        self.check_shape("delta", &delta.0, &seq_sharded)?;
        let received = workspace.alloc_f32(&head_sharded)?;
        Ok(self.issue(from_ref(&delta.0), [received], call)?.map(|[received]| HeadSharded(received)))
    }

    /// Starts one all-to-all of `N` tensors.
    fn start<const N: usize>(
        &self,
        tensors: &[Tensor; N],
        moved: [Moved; N],
        call: Call<'_>,
        workspace: &Workspace,
    ) -> Result<PendingExchange<[Tensor; N]>, SequenceParallelError> {
        let mut received = Vec::with_capacity(N);
        for (tensor, Moved { name, from, to }) in tensors.iter().zip(moved) {
            self.check_shape(name, tensor, &from)?;
            received.push(workspace.alloc(&to)?);
        }
        let received = received.try_into().unwrap_or_else(|_| unreachable!("one tensor per name"));
        self.issue(tensors, received, call)
    }

    fn issue<const N: usize>(
        &self,
        tensors: &[Tensor],
        received: [Tensor; N],
        Call { is_backward, span, plan }: Call<'_>,
    ) -> Result<PendingExchange<[Tensor; N]>, SequenceParallelError> {
        dry::report_exchange(is_backward);
        let pending = span.in_scope(|| self.group.start_all_to_all_strided(tensors, &received, plan))?;
        Ok(PendingExchange { pending, received, span })
    }

    fn check_shape(
        &self,
        name: &'static str,
        tensor: &Tensor,
        expected: &[usize],
    ) -> Result<(), SequenceParallelError> {
        if tensor.dims() == expected {
            return Ok(());
        }
        let (rank, expected, got) = (self.group.rank(), expected.to_vec(), tensor.dims().to_vec());
        Err(SequenceParallelError::Shape { tensor: name, rank, expected, got })
    }
}

/// One of the exchanges.
struct Call<'a> {
    is_backward: bool,
    span: Span,
    plan: &'a Arc<StridedPlan>,
}

/// One of the tensors of an exchange.
struct Moved {
    /// For errors.
    name: &'static str,
    from: [usize; 4],
    to: [usize; 4],
}

impl ExchangedDims<4> {
    fn to_heads(self, name: &'static str) -> Moved {
        Moved { name, from: self.seq_sharded, to: self.head_sharded }
    }

    fn to_tokens(self, name: &'static str) -> Moved {
        Moved { name, from: self.head_sharded, to: self.seq_sharded }
    }
}
