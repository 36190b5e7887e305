//! The blocks of an exchange between tokens and heads, for tensors with heads of any size.

use crate::comm::{RecvBlock, StridedBlock, StridedPlan};
use crate::mesh::TokenRanges;
use std::ops::Range;

/// One of the tensors of an exchange.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadTensor<'a> {
    /// The heads of each rank.
    pub(super) heads: &'a [Range<usize>],
    /// All heads.
    pub(super) num_heads: usize,
    /// Elements per head.
    pub(super) head_dim: usize,
}

/// Tokens that ranks divide, seen by one of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadBlocks<'a> {
    pub(super) batch: usize,
    pub(super) seq_len: usize,
    /// The tokens of each rank. Their positions are their places in tensors with all tokens.
    pub(super) seq: &'a [TokenRanges],
    pub(super) rank: usize,
}

impl HeadBlocks<'_> {
    /// `[batch, seq, heads_local, head_dim]` → `[batch, seq_local, num_heads, head_dim]`. Heads that several ranks have are
    /// summed, in rank order.
    pub(super) fn head_to_seq(&self, tensors: &[HeadTensor<'_>]) -> StridedPlan {
        let mut plan = StridedPlan::default();
        for peer in 0..self.seq.len() {
            let (mut send, mut recv) = (Vec::new(), Vec::new());
            for (index, tensor) in tensors.iter().enumerate() {
                for (part, _) in parts_by_owner(tensor.heads, self.rank) {
                    let tokens = self.seq[peer].ranges().iter();
                    send.extend(tokens.map(|tokens| self.head_sharded(index, tensor, &part, tokens)));
                }
                for (part, accumulate) in parts_by_owner(tensor.heads, peer) {
                    let mut first = 0;
                    recv.extend(self.seq[self.rank].ranges().iter().map(|tokens| {
                        let rows = first..first + tokens.len();
                        first = rows.end;
                        RecvBlock { block: self.seq_sharded(index, tensor, &part, &rows), accumulate }
                    }));
                }
            }
            plan.send.push(send);
            plan.recv.push(recv);
        }
        plan
    }

    /// Heads `part` of some of this rank's tokens within the tensor with this index, `[batch, seq_local, num_heads, head_dim]`.
    fn seq_sharded(
        &self,
        index: usize,
        &HeadTensor { num_heads, head_dim, .. }: &HeadTensor<'_>,
        part: &Range<usize>,
        rows: &Range<usize>,
    ) -> StridedBlock {
        let row_stride = num_heads * head_dim;
        StridedBlock {
            tensor: index,
            offset: rows.start * row_stride + part.start * head_dim,
            batch: self.batch,
            batch_stride: self.seq[self.rank].len() * row_stride,
            rows: rows.len(),
            row_stride,
            run: part.len() * head_dim,
        }
    }

    /// Heads `part` of these tokens within the tensor with this index, this rank's `[batch, seq, heads_local, head_dim]`.
    fn head_sharded(
        &self,
        index: usize,
        &HeadTensor { heads, head_dim, .. }: &HeadTensor<'_>,
        part: &Range<usize>,
        tokens: &Range<usize>,
    ) -> StridedBlock {
        let local = &heads[self.rank];
        let row_stride = local.len() * head_dim;
        StridedBlock {
            tensor: index,
            offset: tokens.start * row_stride + (part.start - local.start) * head_dim,
            batch: self.batch,
            batch_stride: self.seq_len * row_stride,
            rows: tokens.len(),
            row_stride,
            run: part.len() * head_dim,
        }
    }
}

/// Splits the heads of `rank` into those that a lower rank also holds, which are added to that rank's values
/// (`true`), and those that it holds first (`false`).
fn parts_by_owner(heads: &[Range<usize>], rank: usize) -> impl Iterator<Item = (Range<usize>, bool)> {
    let Range { start, end } = heads[rank];
    let seen = if rank == 0 { start } else { heads[rank - 1].end.clamp(start, end) };
    [(start..seen, true), (seen..end, false)].into_iter().filter(|(part, _)| !part.is_empty())
}

/// The exchange in the other direction. From seq to head nothing is summed: every element has one source.
pub(super) fn transposed(plan: StridedPlan) -> StridedPlan {
    StridedPlan {
        send: plan
            .recv
            .into_iter()
            .map(|blocks| blocks.into_iter().map(|recv| recv.block).collect())
            .collect(),
        recv: plan
            .send
            .into_iter()
            .map(|blocks| blocks.into_iter().map(|block| RecvBlock { block, accumulate: false }).collect())
            .collect(),
    }
}
