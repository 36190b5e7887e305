//! [`UlyssesHeads`]: the exchange around modules that read whole sequences and are not attention.

use super::head_blocks::{HeadBlocks, HeadTensor, transposed};
use super::{ExchangeVolume, SequenceParallelError, SpShard};
use crate::comm::ProcessGroup;
use crate::mesh::SeqSharding;
use crate::nn::{
    ExchangedHeads, Gathered, HeadExchange, HeadKind, HeadRanges, Heads, LayerError, LinearAttentionConfig,
    NumHeads, ShortConvConfig,
};
use candle_core::Tensor;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::device::dry;
use ulysses_kernels::memory::{Category, with_category};

/// Exchanges tokens for heads over an sp group, in one all-to-all per call. Ranks beyond the value heads have none. The ranks of a
/// ring exchange with all others too: each then has whole sequences, in their order.
pub struct UlyssesHeads {
    group: Arc<dyn ProcessGroup>,
    sharding: SeqSharding,
}

impl UlyssesHeads {
    /// Exchanges over `group`, which shares each sequence as `sharding` says.
    pub fn new(group: Arc<dyn ProcessGroup>, sharding: SeqSharding) -> Self {
        Self { group, sharding }
    }

    fn send(
        &self,
        tensors: &[Tensor],
        exchanged: &ExchangedHeads<'_>,
        workspace: &Workspace,
    ) -> Result<Vec<Tensor>, SequenceParallelError> {
        let ExchangedHeads { heads, kinds, seq_len, transfer } = *exchanged;
        let (gathered, is_backward) = (transfer.gathered(), transfer.is_backward());
        let (rank, size) = (self.group.rank(), self.group.world_size());
        let seq: Vec<_> = (0..size).map(|rank| self.sharding.tokens(seq_len, rank)).collect();
        let division = heads.over_sp(size);
        let (mut described, mut received, mut batch) = (Vec::new(), Vec::new(), 0);
        for (index, (tensor, kind)) in tensors.iter().zip(kinds).enumerate() {
            let (heads_of_ranks, num_heads) = match kind {
                HeadKind::Key => (&division.kv, heads.kv),
                HeadKind::Value => (&division.q, heads.q),
            };
            let (tensor_batch, _, _, head_dim) = tensor.dims4()?;
            batch = tensor_batch;
            let of_tokens = vec![batch, seq[rank].len(), num_heads, head_dim];
            let of_heads = vec![batch, seq_len, heads_of_ranks[rank].len(), head_dim];
            let (expected, arrives) = match gathered {
                Gathered::Tokens => (of_tokens, of_heads),
                Gathered::Heads => (of_heads, of_tokens),
            };
            if tensor.dims() != expected {
                let (tensor, got) = (name(index, tensors.len()), tensor.dims().to_vec());
                return Err(SequenceParallelError::Shape { tensor, rank, expected, got });
            }
            described.push(HeadTensor { heads: heads_of_ranks, num_heads, head_dim });
            received.push(workspace.alloc(arrives)?);
        }
        let plan = HeadBlocks { batch, seq_len, seq: &seq, rank }.head_to_seq(&described);
        let plan = if gathered == Gathered::Tokens { transposed(plan) } else { plan };
        dry::report_exchange(is_backward);
        let span = tracing::trace_span!("heads", ?gathered, is_backward);
        span.in_scope(|| self.group.start_all_to_all_strided(tensors, &received, &Arc::new(plan))?.wait())?;
        Ok(received)
    }
}

/// The name of one of the tensors of an exchange, for errors. Mamba 2 has no b.
fn name(index: usize, num_tensors: usize) -> &'static str {
    match (index, num_tensors) {
        (0, _) => "q or output",
        (1, _) => "k",
        (2, _) => "v",
        (3, 5) => "b",
        _ => "a",
    }
}

impl HeadExchange for UlyssesHeads {
    fn share(&self, heads: NumHeads) -> HeadRanges {
        heads.on_sp_rank(self.group.world_size(), self.group.rank())
    }

    fn exchange(
        &self,
        tensors: Vec<Tensor>,
        exchanged: &ExchangedHeads<'_>,
        workspace: &Workspace,
    ) -> Result<Vec<Tensor>, LayerError> {
        if self.group.world_size() == 1 {
            return Ok(tensors);
        }
        let received = with_category(Category::Exchange, || self.send(&tensors, exchanged, workspace));
        let received = received.map_err(|error| LayerError::Exchange(error.into()))?;
        tensors.into_iter().for_each(|tensor| workspace.recycle(tensor));
        Ok(received)
    }
}

impl ExchangeVolume {
    /// The volume of the linear attention of rank i of an sp group, with S tokens, Hk key heads and Hv value heads per rank, batch b,
    /// head dimensions Dk and Dv, and n projections for rate and decay, 2, in Mamba 2 1, with decays per channel 1 + Dk:
    ///
    /// - forward `b·Σ_{j≠i} [S_i(2·Hk_j·Dk + Hv_j(Dv + n)) + S_j·Hv_i·Dv]`
    /// - backward `b·Σ_{j≠i} [S_i·Hv_j·Dv + S_j(2·Hk_i·Dk + Hv_i(Dv + n))]`
    pub(super) fn of_linear_attention(shape: &LinearAttentionConfig, shard: SpShard) -> Self {
        let Heads { q: values, kv: keys } = shape.heads().over_sp(shard.sharding.sp_size());
        let out = |rank: usize| values[rank].len() * shape.value_head_dim;
        let projections = shape.exchanged().len() - 4 + shape.decays_per_head();
        let mixed = |rank: usize| {
            let of_values = values[rank].len() * (shape.value_head_dim + projections);
            2 * keys[rank].len() * shape.key_head_dim + of_values
        };
        Self::of_heads(mixed, out, shard)
    }

    /// The volume of the short convolution of rank i of an sp group, with S tokens and C channels per rank and batch b: forward and
    /// backward `b·Σ_{j≠i} [S_i·C_j + S_j·C_i]` each.
    pub(super) fn of_short_conv(shape: &ShortConvConfig, shard: SpShard) -> Self {
        let channels = shape.heads().over_sp(shard.sharding.sp_size()).q;
        let own = |rank: usize| channels[rank].len();
        Self::of_heads(own, own, shard)
    }

    /// The volume of a module whose heads have `mixed` elements per token before it and `out` after it, by rank.
    fn of_heads(mixed: impl Fn(usize) -> usize, out: impl Fn(usize) -> usize, shard: SpShard) -> Self {
        let (rank, seq) = (shard.rank, |rank| shard.tokens(rank).len());
        let sum =
            |elems: &dyn Fn(usize) -> usize| (shard.batch * shard.peers().map(elems).sum::<usize>()) as u64;
        let qkv_elems = sum(&|peer| seq(rank) * mixed(peer));
        Self {
            forward_elems: qkv_elems + sum(&|peer| seq(peer) * out(rank)),
            qkv_elems,
            backward_elems: sum(&|peer| seq(rank) * out(peer) + seq(peer) * mixed(rank)),
            delta_elems: 0,
        }
    }
}
