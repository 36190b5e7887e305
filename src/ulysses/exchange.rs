//! The all-to-all itself: one collective per direction.

use super::{ExchangePlan, UlyssesError};
use crate::comm::{ProcessGroup, ProcessGroupExt, StridedPlan};
use crate::ops::Workspace;
use candle_core::Tensor;
use std::sync::Arc;

/// Tensors that hold this rank's tokens with all heads: `[batch, seq_local, heads, head_dim]`.
#[derive(Debug, Clone)]
pub struct SeqSharded<T>(pub T);

/// Tensors that hold all tokens with this rank's heads: `[batch, seq, heads_local, head_dim]`.
#[derive(Debug, Clone)]
pub struct HeadSharded<T>(pub T);

/// Query, key and value, or their gradients.
pub type Qkv = [Tensor; 3];

/// An [`ExchangePlan`] bound to the process group that carries it out. Results come from the caller's workspace.
///
/// The strided plans are made once here and shared by all layers of a micro batch.
#[derive(Debug)]
pub struct Exchange {
    plan: ExchangePlan,
    group: Arc<dyn ProcessGroup>,
    qkv_seq_to_head: Arc<StridedPlan>,
    qkv_head_to_seq: Arc<StridedPlan>,
    out_seq_to_head: Arc<StridedPlan>,
    out_head_to_seq: Arc<StridedPlan>,
}

impl Exchange {
    /// Binds `plan` to `group`.
    pub fn new(plan: ExchangePlan, group: Arc<dyn ProcessGroup>) -> Self {
        Self {
            qkv_seq_to_head: Arc::new(plan.qkv_seq_to_head()),
            qkv_head_to_seq: Arc::new(plan.qkv_head_to_seq()),
            out_seq_to_head: Arc::new(plan.out_seq_to_head()),
            out_head_to_seq: Arc::new(plan.out_head_to_seq()),
            plan,
            group,
        }
    }

    /// The plan that is carried out.
    pub fn plan(&self) -> &ExchangePlan {
        &self.plan
    }

    /// Sends q, k and v to the ranks that own their heads, in one all-to-all.
    ///
    /// # Shapes
    /// `[B, S_local, H, D]`, `[B, S_local, H_kv, D]` twice →
    /// `[B, S, H_local, D]`, `[B, S, H_kv_local, D]` twice.
    ///
    /// # Errors
    /// A shape that is not the plan's, or a failed collective.
    pub fn qkv_seq_to_head(
        &self,
        qkv: &SeqSharded<Qkv>,
        workspace: &Workspace,
    ) -> Result<HeadSharded<Qkv>, UlyssesError> {
        let _exchange = tracing::trace_span!("qkv_seq_to_head").entered();
        let (q, kv) = (self.plan.seq_sharded_q_dims(), self.plan.seq_sharded_kv_dims());
        self.check(&qkv.0, &[("q", q), ("k", kv), ("v", kv)])?;
        let kv = self.plan.head_sharded_kv_dims();
        let out = outputs([self.plan.head_sharded_q_dims(), kv, kv], workspace)?;
        self.group.all_to_all_strided(&qkv.0, &out, &self.qkv_seq_to_head)?;
        Ok(HeadSharded(out))
    }

    /// Sends the gradients of q, k and v back to the ranks that own their tokens, in
    /// one all-to-all; gradients of a shared KV head are summed there in rank order.
    ///
    /// # Shapes
    /// The inverse of [`qkv_seq_to_head`](Self::qkv_seq_to_head).
    ///
    /// # Errors
    /// A shape that is not the plan's, or a failed collective.
    pub fn qkv_head_to_seq(
        &self,
        grads: &HeadSharded<Qkv>,
        workspace: &Workspace,
    ) -> Result<SeqSharded<Qkv>, UlyssesError> {
        let _exchange = tracing::trace_span!("qkv_head_to_seq").entered();
        let (q, kv) = (self.plan.head_sharded_q_dims(), self.plan.head_sharded_kv_dims());
        self.check(&grads.0, &[("dq", q), ("dk", kv), ("dv", kv)])?;
        let kv = self.plan.seq_sharded_kv_dims();
        let out = outputs([self.plan.seq_sharded_q_dims(), kv, kv], workspace)?;
        self.group.all_to_all_strided(&grads.0, &out, &self.qkv_head_to_seq)?;
        Ok(SeqSharded(out))
    }

    /// Sends the attention output back to the ranks that own its tokens.
    ///
    /// # Shapes
    /// `[B, S, H_local, D]` → `[B, S_local, H, D]`.
    ///
    /// # Errors
    /// A shape that is not the plan's, or a failed collective.
    pub fn out_head_to_seq(
        &self,
        out: &HeadSharded<Tensor>,
        workspace: &Workspace,
    ) -> Result<SeqSharded<Tensor>, UlyssesError> {
        let _exchange = tracing::trace_span!("out_head_to_seq").entered();
        let input = std::slice::from_ref(&out.0);
        self.check(input, &[("o", self.plan.head_sharded_q_dims())])?;
        let [received] = outputs([self.plan.seq_sharded_q_dims()], workspace)?;
        self.group.all_to_all_strided(input, std::slice::from_ref(&received), &self.out_head_to_seq)?;
        Ok(SeqSharded(received))
    }

    /// Sends the gradient of the attention output to the ranks that own its heads.
    ///
    /// # Shapes
    /// `[B, S_local, H, D]` → `[B, S, H_local, D]`.
    ///
    /// # Errors
    /// A shape that is not the plan's, or a failed collective.
    pub fn out_seq_to_head(
        &self,
        dout: &SeqSharded<Tensor>,
        workspace: &Workspace,
    ) -> Result<HeadSharded<Tensor>, UlyssesError> {
        let _exchange = tracing::trace_span!("out_seq_to_head").entered();
        let input = std::slice::from_ref(&dout.0);
        self.check(input, &[("do", self.plan.seq_sharded_q_dims())])?;
        let [received] = outputs([self.plan.head_sharded_q_dims()], workspace)?;
        self.group.all_to_all_strided(input, std::slice::from_ref(&received), &self.out_seq_to_head)?;
        Ok(HeadSharded(received))
    }

    fn check(&self, tensors: &[Tensor], expected: &[(&'static str, Dims)]) -> Result<(), UlyssesError> {
        for (tensor, &(name, (b, s, h, d))) in tensors.iter().zip(expected) {
            if tensor.dims() != [b, s, h, d] {
                return Err(UlyssesError::Shape {
                    tensor: name,
                    rank: self.group.rank(),
                    expected: vec![b, s, h, d],
                    got: tensor.dims().to_vec(),
                });
            }
        }
        Ok(())
    }
}

fn outputs<const N: usize>(dims: [Dims; N], workspace: &Workspace) -> Result<[Tensor; N], UlyssesError> {
    let tensors = dims.iter().map(|dims| workspace.take(*dims)).collect::<Result<Vec<_>, _>>()?;
    tensors.try_into().map_err(|_| unreachable!("one tensor per shape"))
}

/// `[batch, seq, heads, head_dim]`, either of them local.
type Dims = (usize, usize, usize, usize);
