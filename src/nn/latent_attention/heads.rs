//! Queries, keys and values of all heads from their projections, and back. Shape legend: H heads, D their size, R its rotary part.

use super::LatentAttention;
use crate::nn::columns::{all_columns, columns, copy};
use crate::nn::{ForwardPass, LayerError};
use candle_core::Tensor;
use ulysses_kernels::rank_reduce::{ReduceOp, reduce};
use ulysses_kernels::rope::{self, Direction};
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};

impl LatentAttention {
    /// Rotates the last elements of every query, in place, if there is a rotary embedding.
    ///
    /// # Shapes
    /// `queries`: `[batch, seq_local, H, D]`.
    pub(super) fn rotate_queries(
        &self,
        queries: &Tensor,
        direction: Direction,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        if self.shape.rope.is_none() {
            return Ok(());
        }
        let (batch, tokens, heads, _) = queries.dims4()?;
        let rotary = pass.workspace().alloc((batch, tokens, heads, self.latent.rope_head_dim))?;
        let from = columns(0, queries, self.k_nope_dim()..self.shape.head_dim);
        let to = all_columns(0, &rotary);
        copy_blocks(&[queries], &[&rotary], &[copy(from.clone(), to.clone())])?;
        self.rotate(&rotary, direction, pass)?;
        copy_blocks(&[&rotary], &[queries], &[copy(to, from)])?;
        pass.recycle([rotary]);
        Ok(())
    }

    /// Rotates whole heads in place, if there is a rotary embedding.
    ///
    /// # Shapes
    /// `rotary`: `[batch, seq_local, heads, R]`.
    pub(super) fn rotate(
        &self,
        rotary: &Tensor,
        direction: Direction,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        let Some(rope) = self.shape.rope else { return Ok(()) };
        rope::apply(rotary, &*pass.ctx.rope(self.latent.rope_head_dim, rope)?, direction)?;
        Ok(())
    }

    /// Keys and values of all heads, from their joint projection and the rotary key, which are recycled.
    ///
    /// # Shapes
    /// `joint`: `[batch, seq_local, H, D − R + value_head_dim]`, `k_rope`: `[batch, seq_local, 1, R]`; keys: `[batch, seq_local, H, D]`,
    /// values: `[batch, seq_local, H, value_head_dim]`.
    pub(super) fn split(
        &self,
        joint: Tensor,
        k_rope: Tensor,
        pass: &ForwardPass<'_>,
    ) -> Result<[Tensor; 2], LayerError> {
        let (batch, tokens, heads, _) = joint.dims4()?;
        let alloc = |size: usize| pass.workspace().alloc((batch, tokens, heads, size));
        let parts = [alloc(self.shape.head_dim)?, alloc(self.latent.value_head_dim)?];
        let [k_nope, values] = self.joint_copies(&joint, &parts);
        let to = self.rotary(&parts[0]);
        // The same for each head.
        let from = StridedBlock { tensor: 1, offset: 0, batch_stride: 0, row_stride: to.run, ..to.clone() };
        let k_rotary = copy(from, to);
        copy_blocks(&[&joint, &k_rope], &[&parts[0], &parts[1]], &[k_nope, values, k_rotary])?;
        pass.recycle([joint, k_rope]);
        Ok(parts)
    }

    /// Backward of [`split`](Self::split): the gradients of the joint projection and of the rotary key, which is the sum over the
    /// heads. Recycles those of keys and values.
    pub(super) fn join(&self, parts: [Tensor; 2], pass: &ForwardPass<'_>) -> Result<[Tensor; 2], LayerError> {
        let ws = pass.workspace();
        let (batch, tokens, heads, _) = parts[0].dims4()?;
        let (nope, rope) = (self.k_nope_dim(), self.latent.rope_head_dim);
        let joint = ws.alloc((batch, tokens, heads, nope + self.latent.value_head_dim))?;
        let copies = self.joint_copies(&joint, &parts).map(|BlockCopy { from, to, .. }| copy(to, from));
        copy_blocks(&[&parts[0], &parts[1]], &[&joint], &copies)?;
        let by_head = ws.alloc((heads, batch, tokens, 1, rope))?;
        let from = self.rotary(&parts[0]);
        copy_blocks(&[&parts[0]], &[&by_head], &[copy(from.clone(), from.packed_at(0))])?;
        let summed = ws.alloc((batch, tokens, 1, rope))?;
        let each = (0..heads).map(|head| by_head.get(head)).collect::<Result<Vec<_>, _>>()?;
        reduce(ReduceOp::Sum, &each.iter().collect::<Vec<_>>(), 0, &summed)?;
        drop(each);
        pass.recycle(parts.into_iter().chain([by_head]));
        Ok([joint, summed])
    }

    /// From the joint projection to the keys' part without a position, and to the values.
    fn joint_copies(&self, joint: &Tensor, [keys, values]: &[Tensor; 2]) -> [BlockCopy; 2] {
        let (nope, width) = (self.k_nope_dim(), self.k_nope_dim() + self.latent.value_head_dim);
        [
            copy(columns(0, joint, 0..nope), columns(0, keys, 0..nope)),
            copy(columns(0, joint, nope..width), all_columns(1, values)),
        ]
    }

    /// The rotary part of one head after the other.
    fn rotary(&self, heads: &Tensor) -> StridedBlock {
        let [batch, tokens, num_heads, head_dim] = [0, 1, 2, 3].map(|dim| heads.dims()[dim]);
        StridedBlock {
            tensor: 0,
            offset: self.k_nope_dim(),
            batch: num_heads,
            batch_stride: head_dim,
            rows: batch * tokens,
            row_stride: num_heads * head_dim,
            run: self.latent.rope_head_dim,
        }
    }
}
