//! Context shared by the layers of one micro batch.

use super::head_exchange::WholeHeads;
use super::shard::{ExtendedTokens, Reach};
use super::{
    DeferredGradients, ExchangedHeads, HeadExchange, HeadKind, HeadTransfer, LayerError, NumHeads,
    ShardChain, TokenExchange,
};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::attention::{Attention, AttentionLayout, Logits};
use ulysses_kernels::device::dry::Tiles;
use ulysses_kernels::device::dry::{self, Allocation};
use ulysses_kernels::linear_attention::LinearAttentionLayout;
use ulysses_kernels::rope::{self, Rope};
use ulysses_kernels::{Documents, Workspace};

/// The limits of causal attention within a document; without any, a token attends to itself and all earlier tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttentionMask {
    /// Number of tokens, including its own; `None` for all.
    pub window: Option<usize>,
    /// The size of the chunks into which each document is cut, if only the same chunk is seen.
    pub chunk: Option<u32>,
}

/// The layout for some numbers of heads.
struct HeadLayout {
    heads: NumHeads,
    mask: AttentionMask,
    logits: Logits,
    layout: AttentionLayout,
}

/// Limits how much of a layer's intermediate values is in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Tokens per tile of norms, projections and the MLP; all tokens if `None`. It need not divide the number
    /// of tokens.
    pub tile_tokens: Option<NonZero<usize>>,
    /// Number of chunks in which the heads run through attention; at most the number of KV heads.
    pub head_chunks: usize,
    /// Tokens whose logits exist at a time; `None` for a number that suits the device.
    pub loss_tile_tokens: Option<NonZero<usize>>,
}

impl Default for Tiling {
    /// No tiling: all tokens, all heads.
    fn default() -> Self {
        Self { tile_tokens: None, head_chunks: 1, loss_tile_tokens: None }
    }
}

/// Positions of a micro batch's tokens, with everything derived from them: rotary tables and attention
/// layouts. These are created on first use and shared by all layers, and by micro batches with equal
/// positions.
pub struct TokenLayout {
    /// This rank's tokens of every sequence, as ranges of positions.
    shard: Vec<Range<usize>>,
    position_ids: Vec<u32>,
    layout: AttentionLayout,
    documents: Documents,
    head_layouts: Mutex<Vec<HeadLayout>>,
    linear_attention_layouts: Mutex<Vec<LinearAttentionLayout>>,
    extended_tokens: Mutex<Vec<Arc<ExtendedTokens>>>,
    rope_tables: Mutex<Vec<(usize, Rope, Arc<rope::Table>)>>,
    /// Memory of the position ids in a dry run.
    _dry: Option<Allocation>,
}

impl TokenLayout {
    /// Creates the layout of a micro batch of which this rank holds the tokens `shard`, ascending ranges of positions, of
    /// every sequence.
    ///
    /// # Shapes
    /// `position_ids`: `[batch, shard.len()]`, row-major; `cu_seqlens`: the document boundaries of every
    /// whole sequence.
    ///
    /// # Errors
    /// Boundaries that do not cover the sequences.
    pub fn new(
        shard: &[Range<usize>],
        position_ids: Vec<u32>,
        cu_seqlens: Arc<Vec<Vec<u32>>>,
    ) -> Result<Self, LayerError> {
        let layout = AttentionLayout::of_ranges(shard, shard, cu_seqlens.clone(), Vec::new(), None)?;
        let documents = Documents::new(cu_seqlens)?;
        let _dry = Allocation::on_host(layout.batch() * layout.num_queries() * size_of::<u32>());
        let (head_layouts, linear_attention_layouts, extended_tokens, rope_tables) = Default::default();
        let shard = shard.to_vec();
        Ok(Self {
            shard,
            position_ids,
            layout,
            documents,
            head_layouts,
            linear_attention_layouts,
            extended_tokens,
            rope_tables,
            _dry,
        })
    }

    /// Returns whether this layout equals the one that [`new`](Self::new) would create.
    pub fn is_of(&self, shard: &[Range<usize>], position_ids: &[u32], cu_seqlens: &[Vec<u32>]) -> bool {
        self.shard == shard && self.position_ids == position_ids && **self.layout.cu_seqlens() == cu_seqlens
    }
}

/// The micro batch that a layer works on, and the services that it may use.
#[derive(Clone)]
pub struct LayerContext {
    /// The tokens that the layer gets.
    tokens: Arc<TokenLayout>,
    /// Those that attention sees on this rank.
    attended: Arc<TokenLayout>,
    /// With tensor parallelism, those of this rank between modules.
    own_tokens: Option<Arc<TokenLayout>>,
    attention: Arc<dyn Attention>,
    workspace: Arc<Workspace>,
    tiling: Tiling,
    saves_attention_output: bool,
    overlaps_exchange: bool,
    token_exchange: Option<Arc<dyn TokenExchange>>,
    head_exchange: Arc<dyn HeadExchange>,
    shard_chain: Option<Arc<dyn ShardChain>>,
    deferred_gradients: Option<Arc<DeferredGradients>>,
}

impl LayerContext {
    /// Creates the context of a micro batch with the given token layout.
    pub fn new(tokens: Arc<TokenLayout>, attention: Arc<dyn Attention>, workspace: Arc<Workspace>) -> Self {
        let tiling = Tiling::default();
        Self {
            attended: tokens.clone(),
            own_tokens: None,
            tokens,
            attention,
            workspace,
            tiling,
            saves_attention_output: false,
            overlaps_exchange: false,
            token_exchange: None,
            head_exchange: Arc::new(WholeHeads),
            shard_chain: None,
            deferred_gradients: None,
        }
    }

    /// Sets the exchange of tokens for heads; by default this rank has both.
    #[must_use]
    pub fn with_head_exchange(self, head_exchange: Arc<dyn HeadExchange>) -> Self {
        Self { head_exchange, ..self }
    }

    /// Lets recurrences and convolutions compute this rank's tokens, and pass states and tokens on; by default they exchange tokens
    /// for heads.
    #[must_use]
    pub fn with_shard_chain(self, shard_chain: Arc<dyn ShardChain>) -> Self {
        Self { shard_chain: Some(shard_chain), ..self }
    }

    /// This rank's tokens with what a module reads of other ranks' tokens; `None` if modules exchange tokens for heads.
    pub(super) fn extended_tokens(&self, reach: &Reach) -> Result<Option<Arc<ExtendedTokens>>, LayerError> {
        let Some(chain) = &self.shard_chain else { return Ok(None) };
        let mut known = self.attended.extended_tokens.lock();
        if let Some(extended) = known.iter().find(|extended| extended.is_for(chain, reach)) {
            return Ok(Some(extended.clone()));
        }
        let cu_seqlens = self.attended.layout.cu_seqlens();
        let extended = Arc::new(ExtendedTokens::new(chain.clone(), reach.clone(), cu_seqlens)?);
        known.push(extended.clone());
        Ok(Some(extended))
    }

    /// The exchange of tokens for heads, for modules that read whole sequences and are not attention.
    pub fn head_exchange(&self) -> &dyn HeadExchange {
        &*self.head_exchange
    }

    /// Exchanges tensors, of which each has heads of a kind, in one collective.
    pub(super) fn exchange_heads(
        &self,
        tensors: Vec<Tensor>,
        kinds: &[HeadKind],
        heads: NumHeads,
        transfer: HeadTransfer,
    ) -> Result<Vec<Tensor>, LayerError> {
        let seq_len = self.documents().seq_len();
        let exchanged = ExchangedHeads { heads, kinds, seq_len, transfer };
        self.head_exchange.exchange(tensors, &exchanged, &self.workspace)
    }

    /// As [`exchange_heads`](Self::exchange_heads), of one tensor with value heads.
    pub(super) fn exchange_values(
        &self,
        values: Tensor,
        heads: NumHeads,
        transfer: HeadTransfer,
    ) -> Result<Tensor, LayerError> {
        let mut received = self.exchange_heads(vec![values], &[HeadKind::Value], heads, transfer)?;
        Ok(received.pop().unwrap_or_else(|| unreachable!("one result per tensor")))
    }

    /// The documents of the whole sequences.
    pub fn documents(&self) -> &Documents {
        &self.attended.documents
    }

    /// The layout of linear attention over the whole sequences. `v_to_k`: the key head of each of this rank's value heads.
    pub fn linear_attention_layout(&self, v_to_k: &[usize]) -> LinearAttentionLayout {
        let mut layouts = self.attended.linear_attention_layouts.lock();
        let known = layouts.iter().find(|layout| **layout.v_to_k() == *v_to_k).cloned();
        known.unwrap_or_else(|| {
            let layout = LinearAttentionLayout::new(self.documents().clone(), v_to_k);
            layouts.push(layout.clone());
            layout
        })
    }

    /// Sets the exchange of tokens of tensor-parallel layers, and this rank's tokens between their modules.
    #[must_use]
    pub fn with_token_exchange(self, exchange: Arc<dyn TokenExchange>, own_tokens: Arc<TokenLayout>) -> Self {
        Self { token_exchange: Some(exchange), own_tokens: Some(own_tokens), ..self }
    }

    /// The context of input, objective and layers that get only this rank's tokens with tensor parallelism: it has their
    /// number, positions and rotary tables, and attention refuses them. Without, the same context.
    #[must_use]
    pub fn of_own_tokens(&self) -> Self {
        let tokens = self.own_tokens.as_ref().unwrap_or(&self.tokens).clone();
        Self { tokens, ..self.clone() }
    }

    /// The exchange of tokens around the modules of the tensor-parallel layer called `layer`.
    ///
    /// # Errors
    /// A context without one.
    pub fn token_exchange(&self, layer: &str) -> Result<&Arc<dyn TokenExchange>, LayerError> {
        let missing = || LayerError::NoTensorParallelism { layer: layer.to_owned() };
        self.token_exchange.as_ref().ok_or_else(missing)
    }

    /// Sets the tiling.
    #[must_use]
    pub fn with_tiling(self, tiling: Tiling) -> Self {
        Self { tiling, ..self }
    }

    /// The tiling.
    pub fn tiling(&self) -> Tiling {
        self.tiling
    }

    /// Sets whether a checkpoint also contains the attention output; by default it does not.
    #[must_use]
    pub fn with_saved_attention_output(self, saves_attention_output: bool) -> Self {
        Self { saves_attention_output, ..self }
    }

    /// Whether a checkpoint also contains the attention output, so that attention is not recomputed.
    pub fn saves_attention_output(&self) -> bool {
        self.saves_attention_output
    }

    /// Sets whether the exchange of head chunks overlaps with their attention; by default it does not.
    #[must_use]
    pub fn with_overlapped_exchange(self, overlaps_exchange: bool) -> Self {
        Self { overlaps_exchange, ..self }
    }

    /// Whether the operands of the next and the results of the previous head chunk travel while one is attended.
    pub fn overlaps_exchange(&self) -> bool {
        self.overlaps_exchange && self.tiling.head_chunks > 1
    }

    /// Leaves the gradients of the weights of linear layers to a later pass; by default the backward pass computes them. For a
    /// layer that [`defers_gradients`](super::Layer::defers_gradients).
    #[must_use]
    pub fn with_deferred_gradients(self, deferred_gradients: Arc<DeferredGradients>) -> Self {
        Self { deferred_gradients: Some(deferred_gradients), ..self }
    }

    /// Where a module leaves the gradients of the weights of its linear layers, if a later pass computes them.
    pub(super) fn deferred_gradients(&self) -> Option<&DeferredGradients> {
        self.deferred_gradients.as_deref()
    }

    /// Iterates over the tokens of all sequences, `0..batch · seq_local`, in tiles of
    /// [`Tiling::tile_tokens`].
    pub fn token_tiles(&self) -> Tiles {
        let tokens = self.batch() * self.seq_len_local();
        Tiles::new(tokens, self.tiling.tile_tokens.map_or(tokens, NonZero::get))
    }

    /// Number of sequences in the micro batch.
    pub fn batch(&self) -> usize {
        self.tokens.layout.batch()
    }

    /// Number of this sp rank's tokens per sequence, over all its tensor-parallel ranks; of this rank's only
    /// [`of_own_tokens`](Self::of_own_tokens).
    pub fn seq_len_local(&self) -> usize {
        self.tokens.layout.num_queries()
    }

    /// Number of this sp rank's tokens per sequence, over all its tensor-parallel ranks.
    pub fn seq_len_of_tp_ranks(&self) -> usize {
        self.attended.layout.num_queries()
    }

    /// Positions of this rank's tokens within their documents, `[batch, seq_local]`.
    pub fn position_ids(&self) -> &[u32] {
        &self.tokens.position_ids
    }

    /// The attention implementation; sequence-parallel if the mesh is.
    pub fn attention(&self) -> &Arc<dyn Attention> {
        &self.attention
    }

    /// Recycled storage, shared by the layers of this rank.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// The attention layout for these heads.
    pub fn attention_layout(&self, heads: NumHeads) -> AttentionLayout {
        let (mask, logits) = Default::default();
        let layout = self.attention_layout_with(heads, mask, logits);
        layout.unwrap_or_else(|_| unreachable!("there is no window"))
    }

    /// As [`attention_layout`](Self::attention_layout), with a mask and a form of the logits.
    ///
    /// # Errors
    /// A window or chunks of 0.
    pub fn attention_layout_with(
        &self,
        heads: NumHeads,
        mask: AttentionMask,
        logits: Logits,
    ) -> Result<AttentionLayout, LayerError> {
        let mut layouts = self.attended.head_layouts.lock();
        let is_known = |known: &&HeadLayout| (known.heads, known.mask, known.logits) == (heads, mask, logits);
        if let Some(known) = layouts.iter().find(is_known) {
            return Ok(known.layout.clone());
        }
        let q_to_kv = heads.q_to_kv();
        // The visible keys do not depend on the heads.
        let masked = match layouts.iter().find(|known| known.mask == mask) {
            Some(known) => known.layout.with_heads(q_to_kv),
            None if mask == AttentionMask::default() => self.attended.layout.with_heads(q_to_kv),
            None => self.attended.layout.masked(q_to_kv, mask.window, mask.chunk)?,
        };
        let layout = masked.with_logits(logits);
        layouts.push(HeadLayout { heads, mask, logits, layout: layout.clone() });
        Ok(layout)
    }

    /// Rotary tables for this rank's tokens, from θ alone or from a whole [`Rope`].
    ///
    /// # Errors
    /// An odd head dimension, or a scaling without frequencies.
    pub fn rope(&self, head_dim: usize, rope: impl Into<Rope>) -> Result<Arc<rope::Table>, LayerError> {
        let rope = rope.into();
        let mut tables = self.tokens.rope_tables.lock();
        let known = tables.iter().find(|(dim, known, _)| (*dim, *known) == (head_dim, rope));
        if let Some((.., table)) = known {
            return Ok(table.clone());
        }
        let table = match dry::is_dry() {
            true => rope::Table::dry(self.batch() * self.seq_len_local(), head_dim, &rope)?,
            false => rope::Table::scaled(self.position_ids(), &self.document_lens(), head_dim, &rope)?,
        };
        let table = Arc::new(table);
        tables.push((head_dim, rope, table.clone()));
        Ok(table)
    }

    /// For each of this rank's tokens, the length of its whole document.
    fn document_lens(&self) -> Vec<u32> {
        let layout = &self.tokens.layout;
        let of_row = |boundaries: &Vec<u32>| {
            let mut documents = boundaries.windows(2).peekable();
            let mut len_at = |position: u32| {
                while documents.next_if(|document| document[1] <= position).is_some() {}
                documents.peek().map_or(0, |document| document[1] - document[0])
            };
            layout.q_positions().iter().map(|position| len_at(*position)).collect::<Vec<u32>>()
        };
        layout.cu_seqlens().iter().flat_map(of_row).collect()
    }
}
