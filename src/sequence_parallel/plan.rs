//! The tokens and heads that each rank sends to each rank. Pure integers, no communication.
//!
//! The CPU backends and the CUDA kernels both execute the blocks of these plans.

use super::SequenceParallelError;
use super::head_blocks::{HeadBlocks, HeadTensor, transposed};
use crate::comm::{RecvBlock, StridedBlock, StridedPlan};
use crate::mesh::{TokenRanges, shard_range};
use crate::nn::{AttentionConfig, NumHeads};
use std::ops::Range;

/// Shape of the attention tensors that are exchanged. All sizes are global.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences in the micro batch.
    pub batch: usize,
    /// Tokens per sequence, over all ranks of the exchange.
    pub seq_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements per head of queries and keys.
    pub head_dim: usize,
    /// Elements per head of values and output: as many, or fewer with latent attention.
    pub value_head_dim: usize,
}

impl AttentionShape {
    /// The shape of some heads of a layer's attention, for sequences of which the ranks of the exchange have `seq_len` tokens.
    pub fn new(attention: &AttentionConfig, heads: NumHeads, batch: usize, seq_len: usize) -> Self {
        let (head_dim, value_head_dim) = (attention.head_dim, attention.value_head_dim());
        Self { batch, seq_len, num_heads: heads.q, num_kv_heads: heads.kv, head_dim, value_head_dim }
    }
}

/// The dimensions on this rank of a tensor that is exchanged: `[batch, seq, heads, head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangedDims<const N: usize> {
    /// With this rank's tokens and all heads.
    pub seq_sharded: [usize; N],
    /// With all tokens and this rank's heads.
    pub head_sharded: [usize; N],
}

/// Division of an [`AttentionShape`] over an `sp` group, for one of its ranks.
///
/// Every rank gets a contiguous range of query heads, and only the KV heads that these use. A KV head used on
/// two ranks is sent to both. Both return a gradient for it, and the rank with the tokens sums these in rank
/// order. (DeepSpeed replicates KV heads before it communicates.)
///
/// # Examples
///
/// ```
/// use ulysses::sequence_parallel::{AttentionShape, ExchangePlan};
///
/// let shape = AttentionShape { batch: 1, seq_len: 10, num_heads: 5, num_kv_heads: 1, head_dim: 64, value_head_dim: 64 };
/// let plan = ExchangePlan::new(shape, &[0; 5], 2, 1)?;
/// assert_eq!(plan.seq_ranges(), [0..5, 5..10]);
/// assert_eq!(plan.q_head_ranges(), [0..3, 3..5]); // uneven
/// assert_eq!(plan.kv_head_ranges(), [0..1, 0..1]); // used by both ranks
/// assert_eq!(plan.q_dims().head_sharded, [1, 10, 2, 64]);
/// # Ok::<(), ulysses::sequence_parallel::SequenceParallelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangePlan {
    shape: AttentionShape,
    rank: usize,
    seq: Vec<Range<usize>>,
    q_heads: Vec<Range<usize>>,
    kv_heads: Vec<Range<usize>>,
    q_to_kv: Vec<usize>,
}

impl ExchangePlan {
    /// Plans the exchange of rank `rank` in an sp group of `sp_size` ranks. `q_to_kv[h]` is the KV head of query
    /// head `h`, ascending.
    ///
    /// # Errors
    /// Fewer heads or tokens than ranks (the error names the largest valid `sp_size`), a `q_to_kv` that is not
    /// ascending over all KV heads, or a `rank` outside the group.
    pub fn new(
        shape: AttentionShape,
        q_to_kv: &[usize],
        sp_size: usize,
        rank: usize,
    ) -> Result<Self, SequenceParallelError> {
        let AttentionShape { seq_len, num_heads, num_kv_heads, .. } = shape;
        if num_heads < sp_size {
            return Err(SequenceParallelError::TooFewHeads { num_heads, sp_size });
        }
        if rank >= sp_size {
            return Err(SequenceParallelError::NoSuchRank { rank, sp_size });
        }
        if seq_len < sp_size {
            return Err(SequenceParallelError::SequenceTooShort { seq_len, sp_size });
        }
        let ascending = q_to_kv.windows(2).all(|pair| pair[1] == pair[0] || pair[1] == pair[0] + 1);
        let covers_all =
            q_to_kv.first() == Some(&0) && q_to_kv.last() == Some(&(num_kv_heads.wrapping_sub(1)));
        if q_to_kv.len() != num_heads || !ascending || !covers_all {
            return Err(SequenceParallelError::HeadMap {
                num_heads,
                num_kv_heads,
                q_to_kv: q_to_kv.to_vec(),
            });
        }
        let split = |len| (0..sp_size).map(|rank| shard_range(len, sp_size, rank)).collect::<Vec<_>>();
        let (q_heads, seq) = (split(num_heads), split(seq_len));
        let kv_heads = q_heads.iter().map(|heads| q_to_kv[heads.start]..q_to_kv[heads.end - 1] + 1).collect();
        Ok(Self { shape, rank, seq, q_heads, kv_heads, q_to_kv: q_to_kv.to_vec() })
    }

    /// As [`new`](Self::new), of KV heads that equally many query heads share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn grouped(
        shape: AttentionShape,
        sp_size: usize,
        rank: usize,
    ) -> Result<Self, SequenceParallelError> {
        let heads = NumHeads { q: shape.num_heads, kv: shape.num_kv_heads };
        Self::new(shape, &heads.q_to_kv(), sp_size, rank)
    }

    /// The shape that is divided.
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// The rank of this plan within the sp group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Each rank's tokens, as positions within the sequence.
    pub fn seq_ranges(&self) -> &[Range<usize>] {
        &self.seq
    }

    /// Each rank's query heads.
    pub fn q_head_ranges(&self) -> &[Range<usize>] {
        &self.q_heads
    }

    /// Each rank's KV heads; neighbors may share one.
    pub fn kv_head_ranges(&self) -> &[Range<usize>] {
        &self.kv_heads
    }

    /// For each query head of this rank, its KV head's index among this rank's KV heads. Not `h / group`:
    /// with uneven heads a rank may own part of a group.
    pub fn q_to_kv_local(&self) -> Vec<usize> {
        let first = self.kv_heads[self.rank].start;
        self.q_to_kv[self.q_heads[self.rank].clone()].iter().map(|kv| kv - first).collect()
    }

    /// The dimensions of queries.
    pub fn q_dims(&self) -> ExchangedDims<4> {
        self.dims(self.q())
    }

    /// The dimensions of keys.
    pub fn k_dims(&self) -> ExchangedDims<4> {
        self.dims(self.k())
    }

    /// The dimensions of values.
    pub fn v_dims(&self) -> ExchangedDims<4> {
        self.dims(self.v())
    }

    /// The dimensions of the output.
    pub fn out_dims(&self) -> ExchangedDims<4> {
        self.dims(self.out())
    }

    /// The dimensions of `delta`: `[batch, heads, seq]`.
    pub fn delta_dims(&self) -> ExchangedDims<3> {
        let without_elements = |[batch, tokens, heads, _]: [usize; 4]| [batch, heads, tokens];
        let ExchangedDims { seq_sharded, head_sharded } = self.out_dims();
        let [seq_sharded, head_sharded] = [seq_sharded, head_sharded].map(without_elements);
        ExchangedDims { seq_sharded, head_sharded }
    }

    fn dims(&self, HeadTensor { heads, num_heads, head_dim }: HeadTensor<'_>) -> ExchangedDims<4> {
        let AttentionShape { batch, seq_len, .. } = self.shape;
        ExchangedDims {
            seq_sharded: [batch, self.seq[self.rank].len(), num_heads, head_dim],
            head_sharded: [batch, seq_len, heads[self.rank].len(), head_dim],
        }
    }

    /// seq→head for q, k and v together (tensors 0, 1, 2), as in the forward pass.
    pub fn qkv_seq_to_head(&self) -> StridedPlan {
        transposed(self.qkv_head_to_seq())
    }

    /// head→seq for the attention output (tensor 0), as in the forward pass.
    pub fn out_head_to_seq(&self) -> StridedPlan {
        self.head_to_seq(&[self.out()])
    }

    /// seq→head for the output's gradient (tensor 0), as in the backward pass.
    pub fn out_seq_to_head(&self) -> StridedPlan {
        transposed(self.out_head_to_seq())
    }

    /// seq→head for `delta` (tensor 0), `[batch, num_heads, seq_local]` to `[batch, heads_local, seq]`, as in
    /// the backward pass of a saved attention output.
    pub fn delta_seq_to_head(&self) -> StridedPlan {
        let AttentionShape { batch, seq_len, num_heads, .. } = self.shape;
        let (tokens_local, heads_local) = (self.seq[self.rank].len(), self.q_heads[self.rank].len());
        let of_heads = |heads: &Range<usize>| StridedBlock {
            tensor: 0,
            offset: heads.start * tokens_local,
            batch,
            batch_stride: num_heads * tokens_local,
            rows: heads.len(),
            row_stride: tokens_local,
            run: tokens_local,
        };
        let of_tokens = |tokens: &Range<usize>| StridedBlock {
            tensor: 0,
            offset: tokens.start,
            batch,
            batch_stride: heads_local * seq_len,
            rows: heads_local,
            row_stride: seq_len,
            run: tokens.len(),
        };
        let received = |tokens| vec![RecvBlock { block: of_tokens(tokens), accumulate: false }];
        StridedPlan {
            send: self.q_heads.iter().map(|heads| vec![of_heads(heads)]).collect(),
            recv: self.seq.iter().map(received).collect(),
        }
    }

    /// head→seq for the gradients of q, k and v together (tensors 0, 1, 2), as in the backward pass.
    /// Gradients of one KV head from several ranks are summed.
    pub fn qkv_head_to_seq(&self) -> StridedPlan {
        self.head_to_seq(&[self.q(), self.k(), self.v()])
    }

    fn q(&self) -> HeadTensor<'_> {
        let AttentionShape { num_heads, head_dim, .. } = self.shape;
        HeadTensor { heads: &self.q_heads, num_heads, head_dim }
    }

    fn k(&self) -> HeadTensor<'_> {
        let AttentionShape { num_kv_heads: num_heads, head_dim, .. } = self.shape;
        HeadTensor { heads: &self.kv_heads, num_heads, head_dim }
    }

    fn v(&self) -> HeadTensor<'_> {
        HeadTensor { head_dim: self.shape.value_head_dim, ..self.k() }
    }

    fn out(&self) -> HeadTensor<'_> {
        HeadTensor { head_dim: self.shape.value_head_dim, ..self.q() }
    }

    /// Blocks of a head→seq exchange of several tensors.
    fn head_to_seq(&self, tensors: &[HeadTensor<'_>]) -> StridedPlan {
        let AttentionShape { batch, seq_len, .. } = self.shape;
        let seq: Vec<TokenRanges> = self.seq.iter().cloned().map(TokenRanges::from).collect();
        HeadBlocks { batch, seq_len, seq: &seq, rank: self.rank }.head_to_seq(tensors)
    }
}
