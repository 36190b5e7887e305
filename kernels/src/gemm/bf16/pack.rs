//! The layout of packed operands: tiles of 16 lines by 32 terms, with a pair of terms in each word.
//!
//! Lines are rows of A or columns of B; terms are the summed (k) dimension. In A's tiles the pairs of a line
//! are adjacent, in B's the lines of a pair. Lines and terms beyond the matrix are zeros.

use crate::gemm::operand::MatmulOperand;
use crate::gemm::tile::{padded, pairs_of, transpose, word_of};
use crate::simd::simd_kernel;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

/// Lines per tile.
pub(super) const LINES: usize = 16;
/// Pairs of terms per tile.
pub(super) const PAIRS: usize = 16;
/// Words per tile.
pub(super) const TILE_WORDS: usize = LINES * PAIRS;
/// Terms per tile.
pub(super) const TILE_TERMS: usize = 2 * PAIRS;

/// Order of a tile's words in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The pairs of a line: for A.
    PairsOfLine,
    /// The lines of a pair: for B.
    LinesOfPair,
}

impl MatmulOperand<'_, bf16> {
    /// Words of a panel of 16 lines with all terms.
    pub(super) fn panel_words(&self) -> usize {
        panel_words(self.terms)
    }

    /// Packs the panels of 16 lines from `first_panel` on.
    pub(super) fn pack(&self, first_panel: usize, order: Order, panels: &mut [u32]) {
        for (panel, words) in (first_panel..).zip(panels.chunks_exact_mut(self.panel_words())) {
            self.pack_panel(panel * LINES, order, words);
        }
    }

    /// As [`pack`](Self::pack) from the first panel, on the threads of the current pool.
    pub(super) fn pack_in_parallel(&self, order: Order, panels: &mut [u32]) {
        panels
            .par_chunks_exact_mut(self.panel_words())
            .enumerate()
            .for_each(|(panel, words)| self.pack_panel(panel * LINES, order, words));
    }

    fn pack_panel(&self, first_line: usize, order: Order, words: &mut [u32]) {
        let tiles = words.as_chunks_mut().0;
        let lines = self.lines.saturating_sub(first_line).min(LINES);
        if lines == 0 || self.terms == 0 {
            return tiles.as_flattened_mut().fill(0);
        }
        let bits = &self.data.reinterpret_cast()[first_line * self.line_stride..];
        let is_contiguous = self.term_stride == 1;
        let stride = if is_contiguous { self.line_stride } else { self.term_stride };
        pack_tiles(bits, (is_contiguous, stride), (lines, self.terms), order, tiles);
    }
}

/// Words of a panel of 16 lines; without terms it is one tile of zeros.
pub(super) fn panel_words(terms: usize) -> usize {
    terms.div_ceil(TILE_TERMS).max(1) * TILE_WORDS
}

simd_kernel! {
    /// Packs `lines` lines, beginning with the first of `bits`. Either a line's terms or a term's lines are
    /// adjacent; the others are `stride` apart.
    fn pack_tiles<S>(
        bits: &[u16],
        memory: (bool, usize),
        sizes: (usize, usize),
        order: Order,
        tiles: &mut [[u32; TILE_WORDS]],
    ) {
        let ((is_contiguous, stride), (lines, terms)) = (memory, sizes);
        for (first_term, words) in (0..terms).step_by(TILE_TERMS).zip(tiles) {
            let terms = (terms - first_term).min(TILE_TERMS);
            let words = words.as_chunks_mut::<16>().0;
            let loaded = if is_contiguous { Order::PairsOfLine } else { Order::LinesOfPair };
            let mut tile = [[0; 16]; 16];
            let to = if loaded == order { &mut *words } else { &mut tile[..] };
            if is_contiguous {
                lines_of_pairs(&bits[first_term..], stride, lines, terms, to);
            } else {
                pairs_of_lines(&bits[first_term * stride..], stride, lines, terms, to);
            }
            if loaded != order {
                words.copy_from_slice(&transpose(tile));
            }
        }
    }
}

/// Loads a tile in which each line's terms are adjacent in memory.
#[inline(always)]
fn lines_of_pairs(bits: &[u16], stride: usize, lines: usize, terms: usize, tile: &mut [[u32; 16]]) {
    for (line, words) in tile.iter_mut().enumerate() {
        *words = pairs_of(if line < lines { &bits[line * stride..][..terms] } else { &[] });
    }
}

/// Loads a tile in which each term's lines are adjacent in memory.
#[inline(always)]
fn pairs_of_lines(bits: &[u16], stride: usize, lines: usize, terms: usize, tile: &mut [[u32; 16]]) {
    for (pair, words) in tile.iter_mut().enumerate() {
        let first = 2 * pair;
        let low = if first < terms { &bits[first * stride..][..lines] } else { &[] };
        let high = if first + 1 < terms { &bits[(first + 1) * stride..][..lines] } else { &[] };
        let (low, high) = (padded::<LINES>(low), padded::<LINES>(high));
        for (line, word) in words.iter_mut().enumerate() {
            *word = word_of(low[line], high[line]);
        }
    }
}
