//! This rank's tokens, with rows for what is before and after them.

use super::rows::Rows;
use super::segments::{Segment, Segments};
use super::{ShardBlocks, ShardChain};
use crate::nn::LayerError;
use candle_core::{DType, Shape, Tensor};
use std::sync::Arc;
use ulysses_kernels::linear_attention::LinearAttentionLayout;
use ulysses_kernels::strided_copy::StridedBlock;
use ulysses_kernels::{Documents, Workspace, elementwise};

/// The tokens and states of other ranks that a module reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::nn) struct Reach {
    /// Tokens before a token that its convolution reads.
    pub(in crate::nn) tokens_before: usize,
    /// Rows that hold a state, before and after the tokens; 0 without a recurrence.
    pub(in crate::nn) state_rows: usize,
    /// The key head of each value head of the recurrence.
    pub(in crate::nn) v_to_k: Vec<usize>,
}

/// The rows of `[batch, rows, …]` tensors: for each range of a rank's tokens those before it, its tokens, and those after it.
///
/// Rows before the tokens first hold the last tokens before the range, for the convolution, then a state, for the recurrence.
pub(in crate::nn) struct ExtendedTokens {
    chain: Arc<dyn ShardChain>,
    reach: Reach,
    pub(super) segments: Segments,
    batch: usize,
    /// A range's first document begins among the rows before it. The rows after the tokens are a document of their own.
    convolved: Documents,
    /// The rows of a state belong to the document that continues there, or else are a document of their own.
    recurrence: LinearAttentionLayout,
}

impl ExtendedTokens {
    /// `cu_seqlens`: the boundaries of documents in every whole sequence.
    ///
    /// # Errors
    /// Boundaries that do not cover the sequences.
    pub(in crate::nn) fn new(
        chain: Arc<dyn ShardChain>,
        reach: Reach,
        cu_seqlens: &[Vec<u32>],
    ) -> Result<Self, LayerError> {
        let seq_len = cu_seqlens.first().and_then(|boundaries| boundaries.last()).copied().unwrap_or(0);
        let around = [reach.state_rows.max(reach.tokens_before), reach.state_rows];
        let segments = Segments::new(&*chain, seq_len as usize, around);
        let convolved = segments.documents(cu_seqlens, |boundaries, tokens| {
            [tokens_before(boundaries, tokens.start).min(reach.tokens_before), 0]
        })?;
        let recurrence = segments.documents(cu_seqlens, |boundaries, tokens| {
            [tokens.start, tokens.end]
                .map(|token| if tokens_before(boundaries, token) > 0 { reach.state_rows } else { 0 })
        })?;
        let recurrence = LinearAttentionLayout::new(recurrence, &*reach.v_to_k);
        Ok(Self { chain, reach, segments, batch: cu_seqlens.len(), convolved, recurrence })
    }

    /// Whether these are the extended tokens of a module with this reach, over these ranks.
    pub(in crate::nn) fn is_for(&self, chain: &Arc<dyn ShardChain>, reach: &Reach) -> bool {
        Arc::ptr_eq(&self.chain, chain) && self.reach == *reach
    }

    /// Documents for the convolution.
    pub(in crate::nn) fn convolved(&self) -> &Documents {
        &self.convolved
    }

    /// Documents for the recurrence.
    pub(in crate::nn) fn recurrence(&self) -> &LinearAttentionLayout {
        &self.recurrence
    }

    /// Whether no tokens are before any of this rank's ranges.
    pub(in crate::nn) fn is_first(&self) -> bool {
        self.segments.own().iter().all(|segment| self.segments.is_first(segment))
    }

    /// Whether one of this rank's ranges has tokens before and after it, and so a matrix.
    pub(in crate::nn) fn has_matrices(&self) -> bool {
        let segments = &self.segments;
        segments.own().iter().any(|segment| !segments.is_first(segment) && !segments.is_last(segment))
    }

    /// Whether no tokens are after any of this rank's ranges.
    pub(in crate::nn) fn is_last(&self) -> bool {
        self.segments.own().iter().all(|segment| self.segments.is_last(segment))
    }

    /// The dimensions of a tensor with these rows, of one with this rank's tokens.
    fn dims(&self, own: &Tensor) -> Vec<usize> {
        [&[self.batch, self.segments.num_rows()], &own.dims()[2..]].concat()
    }

    /// The rows of the state before a range.
    pub(super) fn state_before<'a>(&self, tensor: &'a Tensor, segment: &Segment) -> Rows<'a> {
        Rows::new(tensor, segment.first_row - self.reach.state_rows, self.reach.state_rows)
    }

    /// The rows of the state after a range.
    pub(super) fn state_after<'a>(&self, tensor: &'a Tensor, segment: &Segment) -> Rows<'a> {
        Rows::new(tensor, segment.rows().end, self.reach.state_rows)
    }

    /// Adds rows of zeros around this rank's tokens, and recycles these.
    ///
    /// # Shapes
    /// `[batch, seq_local, …]` → `[batch, rows, …]`.
    pub(in crate::nn) fn around(&self, own: Tensor, ws: &Workspace) -> Result<Tensor, LayerError> {
        let all = alloc(self.dims(&own), own.dtype(), ws)?;
        elementwise::fill(&all, 0.0)?;
        for [own_rows, rows] in self.rows_of_tokens(&own, &all) {
            own_rows.copy_to(rows)?;
        }
        ws.recycle(own);
        Ok(all)
    }

    /// The inverse of [`around`](Self::around), which drops the other rows.
    pub(in crate::nn) fn within(&self, all: Tensor, ws: &Workspace) -> Result<Tensor, LayerError> {
        let mut dims = all.dims().to_vec();
        dims[1] = self.segments.num_tokens();
        let own = alloc(dims, all.dtype(), ws)?;
        for [own_rows, rows] in self.rows_of_tokens(&own, &all) {
            rows.copy_to(own_rows)?;
        }
        ws.recycle(all);
        Ok(own)
    }

    /// The rows of each range in a tensor of this rank's tokens, and in an extended one.
    fn rows_of_tokens<'a>(&self, own: &'a Tensor, all: &'a Tensor) -> impl Iterator<Item = [Rows<'a>; 2]> {
        self.segments.own().iter().map(move |segment| {
            let len = segment.tokens.len();
            [Rows::new(own, segment.first_token, len), Rows::new(all, segment.first_row, len)]
        })
    }

    /// Sets all rows but those of the tokens to zero.
    pub(in crate::nn) fn clear_around(&self, all: &Tensor, ws: &Workspace) -> Result<(), LayerError> {
        let [before, after] = self.segments.around;
        let mut dims = all.dims().to_vec();
        dims[1] = before.max(after);
        let zeros = alloc(dims, all.dtype(), ws)?;
        elementwise::fill(&zeros, 0.0)?;
        for segment in self.segments.own() {
            let before = Rows::new(all, segment.first_row - before, before);
            for rows in [before, self.state_after(all, segment)] {
                Rows::new(&zeros, 0, rows.len()).copy_to(rows)?;
            }
        }
        ws.recycle(zeros);
        Ok(())
    }

    /// Extends tensors by the tokens before each range, and by zeros. Collective.
    ///
    /// # Shapes
    /// `[batch, seq_local, heads, dim]` → `[batch, rows, heads, dim]`.
    pub(in crate::nn) fn extend(
        &self,
        tensors: &[Tensor],
        ws: &Workspace,
    ) -> Result<Vec<Tensor>, LayerError> {
        let extended = zeros(tensors.iter().map(|tensor| self.dims(tensor)), ws)?;
        let [send, receive] = self.blocks(tensors, &extended);
        self.chain.exchange(tensors, &extended, ShardBlocks { send, receive, adds: false }, false)?;
        Ok(extended)
    }

    /// The backward of [`extend`](Self::extend): adds the gradients that all ranks have of this rank's tokens. Collective.
    ///
    /// # Shapes
    /// `[batch, rows, heads, dim]` → `[batch, seq_local, heads, dim]`.
    pub(in crate::nn) fn reduce(
        &self,
        extended: &[Tensor],
        ws: &Workspace,
    ) -> Result<Vec<Tensor>, LayerError> {
        let dims =
            |tensor: &Tensor| [&[self.batch, self.segments.num_tokens()], &tensor.dims()[2..]].concat();
        let own = zeros(extended.iter().map(dims), ws)?;
        let [receive, send] = self.blocks(&own, extended);
        self.chain.exchange(extended, &own, ShardBlocks { send, receive, adds: true }, true)?;
        Ok(own)
    }

    /// The blocks that this rank sends of its tokens, and that it receives of extended tokens.
    fn blocks(&self, tensors: &[Tensor], extended: &[Tensor]) -> [Vec<Vec<StridedBlock>>; 2] {
        let blocks = |of: &[Tensor], rows: &dyn Fn(&Tensor) -> Rows<'_>| -> Vec<StridedBlock> {
            of.iter().enumerate().map(|(index, tensor)| rows(tensor).block(index)).collect()
        };
        let (own, ranks) = (self.chain.rank(), 0..self.segments.num_ranks());
        let sent = |receiver| {
            let moved = self.moved(own, receiver);
            moved.flat_map(|moved| blocks(tensors, &|tensor| Rows::new(tensor, moved.token, moved.len)))
        };
        let received = |sender| {
            let moved = self.moved(sender, own);
            moved.flat_map(|moved| blocks(extended, &|tensor| Rows::new(tensor, moved.row, moved.len)))
        };
        [
            ranks.clone().map(|receiver| sent(receiver).collect()).collect(),
            ranks.map(|sender| received(sender).collect()).collect(),
        ]
    }

    /// The tokens of one rank that another one has in its extended tensors.
    fn moved(&self, sender: usize, receiver: usize) -> impl Iterator<Item = Moved> {
        let pairs = self
            .segments
            .on(receiver)
            .iter()
            .flat_map(move |to| self.segments.on(sender).iter().map(move |from| (from, to)));
        pairs.filter_map(|(from, to)| {
            let read = match from.place == to.place {
                true => to.tokens.clone(),
                false => to.tokens.start.saturating_sub(self.reach.tokens_before)..to.tokens.start,
            };
            let (start, end) = (read.start.max(from.tokens.start), read.end.min(from.tokens.end));
            (start < end).then(|| Moved {
                token: from.first_token + start - from.tokens.start,
                row: to.first_row + start - to.tokens.start,
                len: end - start,
            })
        })
    }

    pub(super) fn chain(&self) -> &dyn ShardChain {
        &*self.chain
    }
}

/// Tokens of one rank in the extended tensors of another one.
struct Moved {
    /// The first one, among the tokens of its rank.
    token: usize,
    /// Its row in extended tensors.
    row: usize,
    len: usize,
}

/// Tensors of zeros in the type of the activations.
fn zeros(dims: impl Iterator<Item = Vec<usize>>, ws: &Workspace) -> Result<Vec<Tensor>, LayerError> {
    let zeros = |dims| -> Result<Tensor, LayerError> {
        let zeros = ws.alloc(dims)?;
        elementwise::fill(&zeros, 0.0)?;
        Ok(zeros)
    };
    dims.map(zeros).collect()
}

/// A tensor of the workspace, in f32 or the type of the activations.
pub(in crate::nn) fn alloc(
    dims: impl Into<Shape>,
    dtype: DType,
    ws: &Workspace,
) -> Result<Tensor, LayerError> {
    Ok(if dtype == DType::F32 { ws.alloc_f32(dims)? } else { ws.alloc(dims)? })
}

/// Tokens of a token's document before it; 0 after the last token.
fn tokens_before(boundaries: &[u32], token: usize) -> usize {
    let is_before = |boundary: &u32| (*boundary as usize) <= token;
    let next = boundaries.partition_point(is_before);
    let start = boundaries[..next].last().copied().unwrap_or(0) as usize;
    if next == boundaries.len() { 0 } else { token - start }
}
