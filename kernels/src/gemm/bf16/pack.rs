//! The layout of packed operands: tiles `[16, 32]` of an operand `[rows, k]`, with a pair of elements, adjacent along
//! k, in each word.
//!
//! In A's tiles the pairs of a row are adjacent, in the tiles of the transposed B the rows of a pair. Elements beyond
//! the matrix are zeros.

use crate::gemm::operand::MatmulOperand;
use crate::gemm::tile::{padded, pairs_of, transpose, word_of};
use crate::simd::simd_kernel;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

/// Rows per tile.
pub(super) const TILE_ROWS: usize = 16;
/// Pairs per row of a tile.
pub(super) const PAIRS: usize = 16;
/// Words per tile.
pub(super) const TILE_WORDS: usize = TILE_ROWS * PAIRS;
/// Columns per tile.
pub(super) const TILE_K: usize = 2 * PAIRS;

/// Order of a tile's words in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The pairs of a row: for A.
    PairsOfRow,
    /// The rows of a pair: for B.
    RowsOfPair,
}

impl MatmulOperand<'_, bf16> {
    /// Words of a panel: 16 rows, all of k.
    pub(super) fn panel_words(&self) -> usize {
        panel_words(self.k)
    }

    /// Packs the panels of 16 rows from `first_panel` on.
    pub(super) fn pack(&self, first_panel: usize, order: Order, panels: &mut [u32]) {
        for (panel, words) in (first_panel..).zip(panels.chunks_exact_mut(self.panel_words())) {
            self.pack_panel(panel * TILE_ROWS, order, words);
        }
    }

    /// As [`pack`](Self::pack) from the first panel, on the threads of the current pool.
    pub(super) fn pack_in_parallel(&self, order: Order, panels: &mut [u32]) {
        panels
            .par_chunks_exact_mut(self.panel_words())
            .enumerate()
            .for_each(|(panel, words)| self.pack_panel(panel * TILE_ROWS, order, words));
    }

    fn pack_panel(&self, first_row: usize, order: Order, words: &mut [u32]) {
        let tiles = words.as_chunks_mut().0;
        let rows = self.rows.saturating_sub(first_row).min(TILE_ROWS);
        if rows == 0 || self.k == 0 {
            return tiles.as_flattened_mut().fill(0);
        }
        let bits = &self.data.reinterpret_cast()[first_row * self.row_stride..];
        let is_contiguous = self.k_stride == 1;
        let stride = if is_contiguous { self.row_stride } else { self.k_stride };
        pack_tiles(bits, is_contiguous, stride, rows, self.k, order, tiles);
    }
}

/// Words of a panel of 16 rows; if `k` is 0, it is one tile of zeros.
pub(super) fn panel_words(k: usize) -> usize {
    k.div_ceil(TILE_K).max(1) * TILE_WORDS
}

simd_kernel! {
    /// Packs `rows` rows of length `k` from the start of `bits`. If `is_contiguous`, the elements of a row are adjacent, with rows
    /// `stride` apart; otherwise those of a column are, with columns `stride` apart.
    fn pack_tiles<S>(
        bits: &[u16],
        is_contiguous: bool,
        stride: usize,
        rows: usize,
        k: usize,
        order: Order,
        tiles: &mut [[u32; TILE_WORDS]],
    ) {
        for (first_k, words) in (0..k).step_by(TILE_K).zip(tiles) {
            let k = (k - first_k).min(TILE_K);
            let words = words.as_chunks_mut::<16>().0;
            let loaded = if is_contiguous { Order::PairsOfRow } else { Order::RowsOfPair };
            let mut tile = [[0; 16]; 16];
            let to = if loaded == order { &mut *words } else { &mut tile[..] };
            if is_contiguous {
                load_row_major(&bits[first_k..], stride, rows, k, to);
            } else {
                load_column_major(&bits[first_k * stride..], stride, rows, k, to);
            }
            if loaded != order {
                words.copy_from_slice(&transpose(tile));
            }
        }
    }
}

/// Loads a tile of a row-major operand.
#[inline(always)]
fn load_row_major(bits: &[u16], stride: usize, rows: usize, k: usize, tile: &mut [[u32; 16]]) {
    for (row, words) in tile.iter_mut().enumerate() {
        *words = pairs_of(if row < rows { &bits[row * stride..][..k] } else { &[] });
    }
}

/// Loads a tile of a column-major operand.
#[inline(always)]
fn load_column_major(bits: &[u16], stride: usize, rows: usize, k: usize, tile: &mut [[u32; 16]]) {
    for (pair, words) in tile.iter_mut().enumerate() {
        let first = 2 * pair;
        let low = if first < k { &bits[first * stride..][..rows] } else { &[] };
        let high = if first + 1 < k { &bits[(first + 1) * stride..][..rows] } else { &[] };
        let (low, high) = (padded::<TILE_ROWS>(low), padded::<TILE_ROWS>(high));
        for (row, word) in words.iter_mut().enumerate() {
            *word = word_of(low[row], high[row]);
        }
    }
}
