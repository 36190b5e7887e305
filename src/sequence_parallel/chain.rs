//! [`SequenceChain`]: sends states and tokens between the ranks of a sequence, for recurrences and convolutions.

use super::{ExchangeVolume, SequenceParallelError};
use crate::comm::{ProcessGroup, RecvBlock, StridedPlan};
use crate::mesh::shard_range;
use crate::nn::{LayerError, LinearAttentionConfig, ShardBlocks, ShardChain, ShortConvConfig};
use candle_core::Tensor;
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::device::dry;

/// An sp group without a ring, whose ranks pass states and tokens on, in one all-to-all per call.
pub struct SequenceChain {
    group: Arc<dyn ProcessGroup>,
}

impl SequenceChain {
    /// Passes over `group`, which shares each sequence evenly, in the order of the ranks.
    pub fn new(group: Arc<dyn ProcessGroup>) -> Self {
        Self { group }
    }
}

impl ShardChain for SequenceChain {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn shards(&self, seq_len: usize) -> Vec<Range<usize>> {
        let size = self.group.world_size();
        (0..size).map(|rank| shard_range(seq_len, size, rank)).collect()
    }

    fn exchange(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        ShardBlocks { send, receive, adds }: ShardBlocks,
        is_backward: bool,
    ) -> Result<(), LayerError> {
        let own = self.rank();
        let blocks = |(sender, blocks): (usize, Vec<_>)| {
            let accumulate = adds && sender != own;
            blocks.into_iter().map(|block| RecvBlock { block, accumulate }).collect()
        };
        let recv = receive.into_iter().enumerate().map(blocks).collect();
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
    /// The volume of the linear attention of rank r of sp ranks that pass states on, in elements of `elem_bytes`. A rank has S tokens;
    /// there are H value heads, with states of Dk·Dv elements, b sequences, and a convolution of C channels that reads t tokens
    /// before each. States are in f32.
    ///
    /// - forward `b·C·h + b·H·(sp − 1 − r)·(Dk·Dv + Dk²)`, on the first rank without Dk²; h ≤ t·(sp − 1 − r) are those of
    ///   the rank's tokens that are among the t before a later rank's first
    /// - backward the same with r in the place of sp − 1 − r, earlier in that of later, and the last rank in that of the first
    pub fn of_passed_states(
        shape: &LinearAttentionConfig,
        sizes: [usize; 2],
        (size, rank): (usize, usize),
        elem_bytes: u64,
    ) -> Self {
        let LinearAttentionConfig { num_value_heads, key_head_dim, value_head_dim, conv_width, .. } = *shape;
        let passed = Passed {
            channels: 2 * shape.key_dim() + shape.value_dim(),
            tokens_before: conv_width - 1,
            state_elems: num_value_heads * key_head_dim * value_head_dim,
            matrix_elems: num_value_heads * key_head_dim * key_head_dim,
        };
        Self::of_passed(&passed, sizes, (size, rank), elem_bytes)
    }

    /// As [`of_passed_states`](Self::of_passed_states), of a short convolution, which has no state.
    pub fn of_passed_tokens(shape: &ShortConvConfig, sizes: [usize; 2], place: (usize, usize)) -> Self {
        let (channels, tokens_before) = (shape.channels, shape.taps - 1);
        Self::of_passed(&Passed { channels, tokens_before, state_elems: 0, matrix_elems: 0 }, sizes, place, 1)
    }

    fn of_passed(
        passed: &Passed,
        [batch, seq_len]: [usize; 2],
        (size, rank): (usize, usize),
        elem_bytes: u64,
    ) -> Self {
        let shard = |rank| shard_range(seq_len, size, rank);
        // Those of a rank's tokens that another one reads.
        let read = |owner: usize, reader: usize| {
            let first = shard(reader).start;
            let start = first.saturating_sub(passed.tokens_before).max(shard(owner).start);
            first.min(shard(owner).end).saturating_sub(start) * passed.channels
        };
        let elems = |tokens: usize, receivers: usize, is_outermost: bool| {
            let matrix = if is_outermost { 0 } else { passed.matrix_elems };
            let states = (batch * receivers * (passed.state_elems + matrix)) as u64;
            (batch * tokens) as u64 + states * size_of::<f32>() as u64 / elem_bytes
        };
        let to_later = (rank + 1..size).map(|later| read(rank, later)).sum();
        let to_earlier = (0..rank).map(|earlier| read(earlier, rank)).sum();
        let forward_elems = elems(to_later, size - 1 - rank, rank == 0);
        let backward_elems = elems(to_earlier, rank, rank + 1 == size);
        Self { forward_elems, qkv_elems: forward_elems, backward_elems, delta_elems: 0 }
    }
}
