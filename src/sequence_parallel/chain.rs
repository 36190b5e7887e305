//! [`SequenceChain`]: sends states and tokens between the ranks of a sequence, for recurrences and convolutions.

use super::{ExchangeVolume, SequenceParallelError, SpShard};
use crate::comm::{ProcessGroup, RecvBlock, StridedPlan};
use crate::mesh::{SeqSharding, TokenRanges};
use crate::nn::{LayerError, LinearAttentionConfig, ShardBlocks, ShardChain, ShortConvConfig};
use candle_core::Tensor;
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::device::dry;

/// An sp group whose ranks pass states and tokens on, in one all-to-all per call.
pub struct SequenceChain {
    group: Arc<dyn ProcessGroup>,
    sharding: SeqSharding,
}

impl SequenceChain {
    /// Passes over `group`, which shares each sequence by `sharding`.
    pub fn new(group: Arc<dyn ProcessGroup>, sharding: SeqSharding) -> Self {
        Self { group, sharding }
    }
}

impl ShardChain for SequenceChain {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn shards(&self, seq_len: usize) -> Vec<TokenRanges> {
        (0..self.group.world_size()).map(|rank| self.sharding.tokens(seq_len, rank)).collect()
    }

    fn exchange(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        ShardBlocks { send, receive, adds }: ShardBlocks,
        is_backward: bool,
    ) -> Result<(), LayerError> {
        let blocks =
            |blocks: Vec<_>| blocks.into_iter().map(|block| RecvBlock { block, accumulate: adds }).collect();
        let recv = receive.into_iter().map(blocks).collect();
        dry::report_exchange(is_backward);
        let span = tracing::trace_span!("states", is_backward);
        let plan = Arc::new(StridedPlan { send, recv });
        let sent = span.in_scope(|| self.group.start_all_to_all_strided(inputs, outputs, &plan)?.wait());
        sent.map_err(|error| LayerError::Exchange(SequenceParallelError::from(error).into()))
    }
}

/// The sizes of a module whose ranks pass on states and tokens.
struct Passed {
    /// Channels of the convolution, and the tokens before a token that it reads.
    channels: usize,
    tokens_before: usize,
    /// Elements of the states of a token's heads, and of their matrices.
    state_elems: usize,
    matrix_elems: usize,
}

impl ExchangeVolume {
    /// The volume of the linear attention of a rank of sp that passes states on, in elements of `elem_bytes`. There are H value heads,
    /// with states of Dk·Dv elements, b sequences, and a convolution of C channels that reads t tokens before each. States are in f32.
    /// Forward, for each of the rank's ranges of tokens (up to two in a ring, else one):
    ///
    /// - `b·H·(Dk·Dv + Dk²)` to every other rank with a later range; without Dk² if the range is the first of the sequence
    /// - `b·C` for each of its tokens that is among the t before another rank's range
    ///
    /// Backward the same to ranks with earlier ranges, without Dk² if the range is the last, and for the tokens that it received.
    /// Without a ring rank r of sp has sp − 1 − r later ones, and r earlier ones.
    pub(super) fn of_passed_states(shape: &LinearAttentionConfig, shard: SpShard, elem_bytes: u64) -> Self {
        let LinearAttentionConfig { num_value_heads, key_head_dim, value_head_dim, conv_width, .. } = *shape;
        let passed = Passed {
            channels: 2 * shape.key_dim() + shape.value_dim(),
            tokens_before: conv_width - 1,
            state_elems: num_value_heads * key_head_dim * value_head_dim,
            matrix_elems: num_value_heads * key_head_dim * key_head_dim,
        };
        Self::of_passed(&passed, shard, elem_bytes)
    }

    /// As [`of_passed_states`](Self::of_passed_states), of a short convolution, which has no state.
    pub(super) fn of_passed_tokens(shape: &ShortConvConfig, shard: SpShard) -> Self {
        let (channels, tokens_before) = (shape.channels, shape.taps - 1);
        Self::of_passed(&Passed { channels, tokens_before, state_elems: 0, matrix_elems: 0 }, shard, 1)
    }

    fn of_passed(passed: &Passed, shard: SpShard, elem_bytes: u64) -> Self {
        let SpShard { batch, seq_len, rank, .. } = shard;
        let own = shard.tokens(rank);
        let peers: Vec<_> = shard.peers().map(|peer| shard.tokens(peer)).collect();
        // Those of the owner's tokens that the reader reads before its ranges.
        let read = |owner: &TokenRanges, reader: &TokenRanges| {
            let common = |owned: &Range<usize>, first: usize| {
                let start = owned.start.max(first.saturating_sub(passed.tokens_before));
                owned.end.min(first).saturating_sub(start)
            };
            let of_range = |range: &Range<usize>| {
                owner.ranges().iter().map(|owned| common(owned, range.start)).sum::<usize>()
            };
            reader.ranges().iter().map(of_range).sum::<usize>()
        };
        let elems = |tokens: usize, states: usize| {
            (batch * tokens * passed.channels) as u64
                + (batch * states * size_of::<f32>()) as u64 / elem_bytes
        };
        let states = |receives: &dyn Fn(&Range<usize>) -> bool, is_outermost: bool| {
            let receivers = peers.iter().filter(|peer| peer.ranges().iter().any(receives)).count();
            receivers * (passed.state_elems + if is_outermost { 0 } else { passed.matrix_elems })
        };
        let later = own.ranges().iter().map(|own| states(&|peer| peer.start > own.start, own.start == 0));
        let earlier =
            own.ranges().iter().map(|own| states(&|peer| peer.start < own.start, own.end == seq_len));
        let forward_elems = elems(peers.iter().map(|peer| read(&own, peer)).sum(), later.sum());
        let backward_elems = elems(peers.iter().map(|peer| read(peer, &own)).sum(), earlier.sum());
        Self { forward_elems, qkv_elems: forward_elems, backward_elems, delta_elems: 0 }
    }
}
