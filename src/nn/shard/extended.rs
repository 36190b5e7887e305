//! This rank's tokens, with rows for what is before and after them.

use super::rows::{Rows, copy_rows};
use super::{ShardBlocks, ShardChain};
use crate::nn::LayerError;
use candle_core::{DType, Shape, Tensor};
use std::cmp::Ordering;
use std::ops::Range;
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

/// The rows of `[batch, rows, …]` tensors: those before a rank's tokens, its tokens, and those after them.
///
/// Rows before the tokens first hold the last tokens of earlier ranks, for the convolution, then a state, for the recurrence.
pub(in crate::nn) struct ExtendedTokens {
    chain: Arc<dyn ShardChain>,
    reach: Reach,
    shards: Vec<Range<usize>>,
    batch: usize,
    before: usize,
    /// A rank's first document begins among the tokens before it. The rows after the tokens are a document of their own.
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
        let shards = chain.shards(seq_len as usize);
        let own = shards[chain.rank()].clone();
        let (before, state_rows) = (reach.state_rows.max(reach.tokens_before), reach.state_rows);
        let rows = before + own.len() + state_rows;
        let documents = |of_sequence: &dyn Fn(&[u32]) -> Range<usize>| {
            let boundaries = |documents: &Vec<u32>| {
                let Range { start, end } = of_sequence(documents);
                let inner = documents.iter().map(|boundary| *boundary as usize);
                let inner = inner.filter(|boundary| own.start < *boundary && *boundary < own.end);
                let inner = inner.map(|boundary| before + boundary - own.start);
                let all = [0, start].into_iter().chain(inner).chain([end, rows]);
                all.map(|row| row as u32).collect::<Vec<u32>>()
            };
            Documents::new(cu_seqlens.iter().map(boundaries).collect::<Vec<_>>())
        };
        let end = before + own.len();
        let convolved = documents(&|boundaries| {
            let known = tokens_before(boundaries, own.start).min(reach.tokens_before);
            before - known..end
        })?;
        let recurrence = documents(&|boundaries| {
            let continues_at = |token| if tokens_before(boundaries, token) > 0 { state_rows } else { 0 };
            before - continues_at(own.start)..end + continues_at(own.end)
        })?;
        let recurrence = LinearAttentionLayout::new(recurrence, &*reach.v_to_k);
        let batch = cu_seqlens.len();
        Ok(Self { chain, reach, shards, batch, before, convolved, recurrence })
    }

    /// Whether these are the extended tokens of a module with this reach.
    pub(in crate::nn) fn is_for(&self, reach: &Reach) -> bool {
        self.reach == *reach
    }

    /// Documents for the convolution.
    pub(in crate::nn) fn convolved(&self) -> &Documents {
        &self.convolved
    }

    /// Documents for the recurrence.
    pub(in crate::nn) fn recurrence(&self) -> &LinearAttentionLayout {
        &self.recurrence
    }

    /// Whether no rank has earlier tokens.
    pub(in crate::nn) fn is_first(&self) -> bool {
        self.chain.rank() == 0
    }

    /// Whether no rank has later tokens.
    pub(in crate::nn) fn is_last(&self) -> bool {
        self.chain.rank() + 1 == self.shards.len()
    }

    /// The dimensions of a tensor with these rows, of one with this rank's tokens.
    fn dims(&self, own: &Tensor) -> Vec<usize> {
        let rows = self.before + self.own().len() + self.reach.state_rows;
        [&[self.batch, rows], &own.dims()[2..]].concat()
    }

    /// The rows of the state before the tokens.
    pub(super) fn state_before(&self, tensor: &Tensor) -> Rows {
        Rows::new(tensor, self.before - self.reach.state_rows, self.reach.state_rows)
    }

    /// The rows of the state after the tokens.
    pub(super) fn state_after(&self, tensor: &Tensor) -> Rows {
        Rows::new(tensor, self.before + self.own().len(), self.reach.state_rows)
    }

    fn tokens(&self, tensor: &Tensor) -> Rows {
        Rows::new(tensor, self.before, self.own().len())
    }

    /// Adds rows of zeros around this rank's tokens, and recycles these.
    ///
    /// # Shapes
    /// `[batch, seq_local, …]` → `[batch, rows, …]`.
    pub(in crate::nn) fn around(&self, own: Tensor, ws: &Workspace) -> Result<Tensor, LayerError> {
        let all = alloc(self.dims(&own), own.dtype(), ws)?;
        elementwise::fill(&all, 0.0)?;
        copy_rows((&own, Rows::of_all(&own)), (&all, self.tokens(&all)))?;
        ws.recycle(own);
        Ok(all)
    }

    /// The inverse of [`around`](Self::around), which drops the other rows.
    pub(in crate::nn) fn within(&self, all: Tensor, ws: &Workspace) -> Result<Tensor, LayerError> {
        let mut dims = all.dims().to_vec();
        dims[1] = self.own().len();
        let own = alloc(dims, all.dtype(), ws)?;
        copy_rows((&all, self.tokens(&all)), (&own, Rows::of_all(&own)))?;
        ws.recycle(all);
        Ok(own)
    }

    /// Sets all rows but those of the tokens to zero.
    pub(in crate::nn) fn clear_around(&self, all: &Tensor, ws: &Workspace) -> Result<(), LayerError> {
        let mut dims = all.dims().to_vec();
        dims[1] = self.before.max(self.reach.state_rows);
        let zeros = alloc(dims, all.dtype(), ws)?;
        elementwise::fill(&zeros, 0.0)?;
        for rows in [Rows::new(all, 0, self.before), self.state_after(all)] {
            copy_rows((&zeros, Rows::new(&zeros, 0, rows.len())), (all, rows))?;
        }
        ws.recycle(zeros);
        Ok(())
    }

    /// Extends tensors by the tokens before them, and by zeros. Collective.
    ///
    /// # Shapes
    /// `[batch, seq_local, heads, dim]` → `[batch, rows, heads, dim]`.
    pub(in crate::nn) fn extend(
        &self,
        tensors: &[Tensor],
        ws: &Workspace,
    ) -> Result<Vec<Tensor>, LayerError> {
        let extended = |tensor: &Tensor| -> Result<Tensor, LayerError> {
            let extended = ws.alloc(self.dims(tensor))?;
            elementwise::fill(&extended, 0.0)?;
            Ok(extended)
        };
        let extended = tensors.iter().map(extended).collect::<Result<Vec<_>, _>>()?;
        let [send, receive] = self.blocks(tensors, &extended);
        self.chain.exchange(tensors, &extended, ShardBlocks { send, receive, adds: false }, false)?;
        Ok(extended)
    }

    /// The backward of [`extend`](Self::extend): adds the gradients that other ranks have of this rank's tokens. Collective.
    ///
    /// # Shapes
    /// `[batch, rows, heads, dim]` → `[batch, seq_local, heads, dim]`.
    pub(in crate::nn) fn reduce(
        &self,
        extended: &[Tensor],
        ws: &Workspace,
    ) -> Result<Vec<Tensor>, LayerError> {
        let own = |tensor: &Tensor| -> Result<Tensor, LayerError> {
            let (_, _, heads, dim) = tensor.dims4()?;
            Ok(ws.alloc((self.batch, self.own().len(), heads, dim))?)
        };
        let own = extended.iter().map(own).collect::<Result<Vec<_>, _>>()?;
        let [receive, send] = self.blocks(&own, extended);
        self.chain.exchange(extended, &own, ShardBlocks { send, receive, adds: true }, true)?;
        Ok(own)
    }

    /// The blocks that this rank sends of its tokens, and that it receives of extended tokens.
    fn blocks(&self, tensors: &[Tensor], extended: &[Tensor]) -> [Vec<Vec<StridedBlock>>; 2] {
        let (rank, own) = (self.chain.rank(), self.own());
        let reached = |rank: usize| {
            let first = self.shards[rank].start;
            first.saturating_sub(self.reach.tokens_before)..first
        };
        let common = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
        let sent = |receiver: usize| match receiver.cmp(&rank) {
            Ordering::Less => 0..0,
            Ordering::Equal => own.clone(),
            Ordering::Greater => common(own, &reached(receiver)),
        };
        let received = |sender: usize| match sender.cmp(&rank) {
            Ordering::Less => common(&self.shards[sender], &reached(rank)),
            Ordering::Equal => own.clone(),
            Ordering::Greater => 0..0,
        };
        let blocks = |tokens: Range<usize>, of: &[Tensor], row_of_first: usize| {
            // Received tokens may be before this rank's own.
            let row = (row_of_first + tokens.start).saturating_sub(own.start);
            let block = |(index, tensor)| Rows::new(tensor, row, tokens.len()).block(index);
            if tokens.is_empty() { Vec::new() } else { of.iter().enumerate().map(block).collect() }
        };
        let ranks = 0..self.shards.len();
        [
            ranks.clone().map(|receiver| blocks(sent(receiver), tensors, 0)).collect(),
            ranks.map(|sender| blocks(received(sender), extended, self.before)).collect(),
        ]
    }

    /// This rank's tokens.
    fn own(&self) -> &Range<usize> {
        &self.shards[self.chain.rank()]
    }

    /// Number of ranks.
    pub(super) fn num_ranks(&self) -> usize {
        self.shards.len()
    }

    pub(super) fn chain(&self) -> &dyn ShardChain {
        &*self.chain
    }
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
