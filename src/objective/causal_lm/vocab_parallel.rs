//! Head and loss of a rank that has a slice of the vocabulary (Megatron's vocabulary-parallel cross-entropy, arXiv 1909.08053,
//! section 3). The ranks of tp divide the rows of the projection; no rank ever has all logits of a token.

use super::shared_tiles::{SharedTiles, Tile, VocabSlice};
use super::{CausalLm, Head};
use crate::nn::{
    LayerContext, LayerError, LocalBatch, ParallelStyle, ParameterSpec, Saved, TensorRank, TokenExchange,
};
use crate::objective::labeled_tokens::Chunk;
use crate::objective::{Losses, Objective};
use candle_core::Tensor;
use std::sync::Arc;
use ulysses_kernels::lm_head_loss::{self, LogitTiles, slice};
use ulysses_kernels::{Workspace, elementwise};

/// A [`CausalLm`] with the classes of one rank of tp, for the tokens of all of them.
///
/// Tile by tile, the normalized hidden states of labeled tokens are gathered and their statistics exchanged (two numbers per token and
/// rank), and in the backward pass the gradients of the hidden states are summed and scattered.
pub(super) struct VocabParallelLm {
    /// The head, of which the projection and its bias have this rank's rows.
    head: CausalLm,
    slice: VocabSlice,
}

/// State saved for the backward pass.
struct SavedTiles {
    x: Tensor,
    /// Logsumexp of the labeled tokens, by tile.
    lse: Tensor,
    tiles: SharedTiles,
}

/// Memory for the tokens of a tile, in the precision of the model.
struct TileBuffers {
    /// Hidden states of this rank's tokens, if they are not adjacent.
    compact: Tensor,
    /// Normalized ones, then their gradient.
    normed: Tensor,
    rstd: Tensor,
    /// Normalized hidden states of all ranks.
    all: Tensor,
}

impl VocabParallelLm {
    /// Keeps the part of one rank; `None` if there are more ranks than classes.
    pub(super) fn new(mut head: CausalLm, tp: TensorRank) -> Option<Self> {
        let vocab_size = head.vocab_size();
        let classes = head.parameters[1].divide_vocabulary(ParallelStyle::Colwise, tp)?;
        if let Some(bias) = head.parameters.get_mut(2 + usize::from(head.norm.bias)) {
            bias.divide_vocabulary(ParallelStyle::Colwise, tp)?;
        }
        Some(Self { head, slice: VocabSlice { vocab_size, classes, tp } })
    }

    fn tiles(&self, batch: &LocalBatch<'_>, ctx: &LayerContext) -> Result<SharedTiles, LayerError> {
        SharedTiles::new(&self.slice, batch, ctx, self.head.tile_tokens(ctx)?)
    }

    fn logit_tiles(&self, tiles: &SharedTiles) -> LogitTiles {
        let tokens = tiles.rank_tokens * self.slice.tp.size;
        LogitTiles { tokens, softcap: self.head.softcap, is_slice: true }
    }

    fn exchange<'a>(&self, ctx: &'a LayerContext) -> Result<&'a Arc<dyn TokenExchange>, LayerError> {
        ctx.token_exchange(self.name())
    }

    fn buffers(&self, tiles: &SharedTiles, hidden: usize, ws: &Workspace) -> Result<TileBuffers, LayerError> {
        let own = tiles.rank_tokens;
        Ok(TileBuffers {
            compact: ws.alloc((own + 1, hidden))?,
            normed: ws.alloc((own, hidden))?,
            rstd: ws.alloc_f32(own)?,
            all: ws.alloc((own * self.slice.tp.size, hidden))?,
        })
    }

    /// Gathers the normalized hidden states of a tile. Returns them, and the own hidden states and reciprocal root mean squares.
    fn gather(
        &self,
        (chunk, tile): (&Chunk, &Tile),
        rows: &Tensor,
        head: &Head<&Tensor>,
        buffers: &TileBuffers,
        ctx: &LayerContext,
    ) -> Result<(Tensor, [Tensor; 2]), LayerError> {
        let region = chunk.region_of(rows)?;
        let x = match &chunk.compaction {
            Some(compaction) => compaction.compact(&region, &buffers.compact)?,
            None => region,
        };
        let own = tile.own.len();
        let [normed, rstd] = [buffers.normed.narrow(0, 0, own)?, buffers.rstd.narrow(0, 0, own)?];
        if own > 0 {
            self.head.normalize(&x, head, [&normed, &rstd], ctx.workspace())?;
        }
        let all = buffers.all.narrow(0, 0, tile.tokens.len())?;
        self.exchange(ctx)?.all_gather_rows(&normed, &tile.counts, &all)?;
        Ok((all, [x, rstd]))
    }

    /// The losses of this rank's tokens, and the state for their backward pass.
    fn losses(
        &self,
        params: &[Tensor],
        x: &Tensor,
        tiles: SharedTiles,
        ctx: &LayerContext,
    ) -> Result<(Losses, SavedTiles), LayerError> {
        let (ws, head) = (ctx.workspace(), self.head.head(params)?);
        let (rows, ranks) = (tiles.own.rows_of(x)?, self.slice.tp.size);
        tiles.own.upload(x.device())?;
        let logit_tiles = self.logit_tiles(&tiles);
        let buffers = self.buffers(&tiles, x.dims3()?.2, ws)?;
        let lse = ws.alloc_f32(tiles.num_tokens)?;
        let [own, all] = [1, ranks].map(|ranks| ws.alloc_f32(ranks * 2 * logit_tiles.tokens));
        let (of_slice, of_all) = (own?, all?);
        let mut losses = Losses::default();
        for (chunk, tile) in tiles.iter() {
            let (gathered, _) = self.gather((chunk, tile), &rows, &head, &buffers, ctx)?;
            let tokens = tile.tokens.len();
            let statistics = of_slice.narrow(0, 0, 2 * tokens)?.reshape((2, tokens))?;
            let operands = lm_head_loss::Operands::new(&gathered, head.projection(), &tile.labels);
            slice::forward(&operands, logit_tiles, &statistics, ws)?;
            let all = of_all.narrow(0, 0, ranks * 2 * tokens)?.reshape((ranks, 2 * tokens))?;
            self.exchange(ctx)?.all_gather_rows(
                &statistics.reshape((1, 2 * tokens))?,
                &vec![1; ranks],
                &all,
            )?;
            let lse = lse.narrow(0, tile.tokens.start, tokens)?;
            losses.append(slice::combine(&all.reshape((ranks, 2, tokens))?, &lse, tile.own.clone())?);
        }
        buffers.recycle(ws);
        [of_slice, of_all].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok((losses, SavedTiles { x: x.clone(), lse, tiles }))
    }
}

impl TileBuffers {
    fn recycle(self, ws: &Workspace) {
        let Self { compact, normed, rstd, all } = self;
        [compact, normed, rstd, all].into_iter().for_each(|tensor| ws.recycle(tensor));
    }
}

impl Objective for VocabParallelLm {
    fn name(&self) -> &str {
        self.head.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.head.parameters
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Losses, Saved), LayerError> {
        let (losses, saved) = self.losses(params, x, self.tiles(batch, ctx)?, ctx)?;
        let bytes = [&saved.x, &saved.lse].into_iter().map(ulysses_kernels::tensor::bytes).sum();
        Ok((losses, Saved::new(saved, bytes)))
    }

    /// The gradient of `x` is 0 for tokens without a label.
    fn backward(
        &self,
        params: &[Tensor],
        saved: Saved,
        scale: f32,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let (ws, head, gradients) = (ctx.workspace(), self.head.head(params)?, self.head.head(grads)?);
        let SavedTiles { x, lse, tiles } = saved.downcast(self.name())?;
        let (rows, dx) = (tiles.own.rows_of(&x)?, ws.alloc(x.dims())?);
        let dx_rows = tiles.own.rows_of(&dx)?;
        if tiles.own.chunks.is_empty() {
            elementwise::fill(&dx, 0.0)?;
        }
        let buffers = self.buffers(&tiles, x.dims3()?.2, ws)?;
        let [dall, dcompact] = [&buffers.all, &buffers.compact].map(|like| ws.alloc(like.dims()));
        let (dall, dcompact) = (dall?, dcompact?);
        for (chunk, tile) in tiles.iter() {
            let (gathered, [x, rstd]) = self.gather((chunk, tile), &rows, &head, &buffers, ctx)?;
            let lse = lse.narrow(0, tile.tokens.start, tile.tokens.len())?;
            let dgathered = dall.narrow(0, 0, tile.tokens.len())?;
            let operands = lm_head_loss::Operands::new(&gathered, head.projection(), &tile.labels);
            let of_head = lm_head_loss::Gradients::new(&dgathered, gradients.projection());
            lm_head_loss::backward(&operands, &lse, scale, &of_head, self.logit_tiles(&tiles), ws)?;
            let dnormed = buffers.normed.narrow(0, 0, tile.own.len())?;
            self.exchange(ctx)?.reduce_scatter_rows(&dgathered, &tile.counts, &dnormed)?;
            let region = chunk.region_of(&dx_rows)?;
            let dx = match &chunk.compaction {
                Some(_) => dcompact.narrow(0, 0, tile.own.len())?,
                None => region.clone(),
            };
            if !tile.own.is_empty() {
                self.head.backward_norm(&dnormed, [&x, &rstd], &dx, &head, &gradients, ws)?;
            }
            chunk.compaction.iter().try_for_each(|compaction| compaction.expand_from(&dcompact, &region))?;
        }
        buffers.recycle(ws);
        [lse, dall, dcompact].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(dx)
    }

    fn evaluate(
        &self,
        params: &[Tensor],
        x: Tensor,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<Losses, LayerError> {
        let (losses, SavedTiles { lse, .. }) = self.losses(params, &x, self.tiles(batch, ctx)?, ctx)?;
        [x, lse].into_iter().for_each(|tensor| ctx.workspace().recycle(tensor));
        Ok(losses)
    }

    /// The logits of this rank's tokens, from the slices of all ranks.
    fn output(&self, params: &[Tensor], x: &Tensor, ctx: &LayerContext) -> Result<Tensor, LayerError> {
        let (ws, head) = (ctx.workspace(), self.head.head(params)?);
        let (batch, tokens, _) = x.dims3()?;
        let (normed, rstd) = (ws.alloc(x.dims())?, ws.alloc_f32((batch, tokens))?);
        self.head.normalize(x, &head, [&normed, &rstd], ws)?;
        let exchange = self.exchange(ctx)?;
        let all = exchange.all_gather(&normed, ctx.seq_len_of_tp_ranks())?;
        let shape = (batch, ctx.seq_len_of_tp_ranks(), self.slice.classes.len());
        let of_slice = Tensor::zeros(shape, x.dtype(), x.device())?;
        self.head.project(&all, &head, &of_slice, ws)?;
        [normed, rstd, all].into_iter().for_each(|tensor| ws.recycle(tensor));
        exchange.features_to_tokens(&of_slice, self.slice.vocab_size)
    }
}
