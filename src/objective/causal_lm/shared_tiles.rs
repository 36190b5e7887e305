//! The labeled tokens of the ranks that divide a vocabulary, in tiles.

use crate::nn::{LayerContext, LayerError, LocalBatch, TensorRank};
use crate::objective::LabeledTokens;
use crate::objective::labeled_tokens::Chunk;
use std::ops::Range;
use ulysses_kernels::device::dry;
use ulysses_kernels::lm_head_loss::{IGNORED, Labels, slice, validate_labels};

/// The slice of a vocabulary that one rank has.
#[derive(Debug, Clone)]
pub(super) struct VocabSlice {
    /// Number of classes of the whole vocabulary.
    pub(super) vocab_size: usize,
    /// The classes of this rank.
    pub(super) classes: Range<usize>,
    pub(super) tp: TensorRank,
}

/// The labeled tokens of all ranks of tp, in tiles. Every rank has some tokens of each tile, the same number as the others as long as
/// it has labeled ones.
pub(super) struct SharedTiles {
    /// This rank's tokens: one chunk for each tile.
    pub(super) own: LabeledTokens,
    tiles: Vec<Tile>,
    /// Largest number of tokens that a rank has in a tile. It does not depend on the masks, so that all micro batches recycle the same
    /// memory.
    pub(super) rank_tokens: usize,
    /// Number of tokens of all ranks, with or without a label.
    pub(super) num_tokens: usize,
}

/// The labeled tokens of all ranks whose logits exist at the same time, in rank order.
pub(super) struct Tile {
    /// Number of tokens of each rank.
    pub(super) counts: Vec<usize>,
    /// Labels, as the slice of this rank has them.
    pub(super) labels: Labels,
    /// The tokens, among those of all tiles.
    pub(super) tokens: Range<usize>,
    /// The tokens of this rank, among those of the tile.
    pub(super) own: Range<usize>,
}

impl SharedTiles {
    /// Divides a micro batch into tiles of at most `tile_tokens` tokens, or one of each rank. All ranks know the labels of all.
    ///
    /// # Errors
    /// A label outside the vocabulary.
    pub(super) fn new(
        slice: &VocabSlice,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
        tile_tokens: usize,
    ) -> Result<Self, LayerError> {
        let (tp, seq_len) = (slice.tp, ctx.seq_len_of_tp_ranks());
        let num_tokens: Vec<usize> = tp.ranges(seq_len).map(|own| batch.batch_size * own.len()).collect();
        let most = num_tokens.iter().copied().max().unwrap_or(0);
        let rank_tokens = (tile_tokens / tp.size).min(most).max(1);
        // A dry batch has no labels: all of its tokens are labeled.
        let labels = match dry::is_dry() {
            true => Vec::new(),
            false => {
                validate_labels(batch.all_labels, slice.vocab_size)?;
                tp.ranges(seq_len).map(|own| labels_of(batch.all_labels, seq_len, &own)).collect()
            }
        };
        let labeled: Vec<usize> = match dry::is_dry() {
            true => num_tokens.clone(),
            false => labels.iter().map(Vec::len).collect(),
        };
        let num_tiles = labeled.iter().copied().max().unwrap_or(0).div_ceil(rank_tokens);
        let own = match dry::is_dry() {
            true => LabeledTokens::dry_in_chunks(num_tokens[tp.rank], rank_tokens, num_tiles),
            false => LabeledTokens::in_chunks(batch.labels, rank_tokens, num_tiles),
        };
        let mut end = 0;
        let tile = |index: usize| {
            let start = |labeled: &usize| (index * rank_tokens).min(*labeled);
            let of_rank = |labeled: &usize| start(labeled)..(start(labeled) + rank_tokens).min(*labeled);
            let counts: Vec<usize> = labeled.iter().map(|labeled| of_rank(labeled).len()).collect();
            let tokens = end..end + counts.iter().sum::<usize>();
            end = tokens.end;
            let first = counts[..tp.rank].iter().sum();
            let labels = match dry::is_dry() {
                true => Labels::dry(tokens.len()),
                false => {
                    let of_tile = labels.iter().zip(&labeled).flat_map(|(of, n)| &of[of_rank(n)]);
                    slice::labels(&of_tile.copied().collect::<Vec<_>>(), &slice.classes)
                }
            };
            Tile { own: first..first + counts[tp.rank], counts, labels, tokens }
        };
        let tiles = (0..num_tiles).map(tile).collect();
        Ok(Self { own, tiles, rank_tokens, num_tokens: num_tokens.iter().sum() })
    }

    /// The tiles, each with this rank's part of it.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Chunk, &Tile)> {
        self.own.chunks.iter().zip(&self.tiles)
    }
}

/// The labels of the labeled tokens among the tokens `own` of each sequence.
fn labels_of(all: &[i64], seq_len: usize, own: &Range<usize>) -> Vec<i64> {
    let rows = all.chunks_exact(seq_len.max(1));
    rows.flat_map(|row| &row[own.clone()]).copied().filter(|label| *label != IGNORED).collect()
}
