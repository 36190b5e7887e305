//! The order in which the kernels read: tiles of 16 lines by 32 terms, a pair of terms in each word.
//!
//! Lines are rows of A or columns of B, terms are what a product sums over. In A's tiles the pairs of a line are
//! neighbours, in B's the lines of a pair. Lines and terms beyond the matrix are zeros.

use crate::ops::OpError;
use crate::ops::gemm::tile::transpose;
use crate::ops::simd::simd_kernel;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

/// Lines of a tile.
pub(super) const LINES: usize = 16;
/// Pairs of terms of a tile.
pub(super) const PAIRS: usize = 16;
/// Words of a tile.
pub(super) const TILE_WORDS: usize = LINES * PAIRS;
/// Terms of a tile.
pub(super) const TILE_TERMS: usize = 2 * PAIRS;

/// A matrix of lines by terms.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Lines<'a> {
    data: &'a [bf16],
    pub(super) lines: usize,
    pub(super) terms: usize,
    line_stride: usize,
    term_stride: usize,
}

/// Which of a tile's words are neighbours.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The pairs of a line: for A.
    PairsOfLine,
    /// The lines of a pair: for B.
    LinesOfPair,
}

impl<'a> Lines<'a> {
    /// Lines one behind the other in `data`.
    ///
    /// # Errors
    /// When `data` has another length.
    pub(in crate::ops) fn contiguous(data: &'a [bf16], lines: usize, terms: usize) -> Result<Self, OpError> {
        Self { data, lines, terms, line_stride: terms, term_stride: 1 }.checked()
    }

    /// The first term of all lines, then the second, and so on.
    ///
    /// # Errors
    /// As [`contiguous`](Self::contiguous).
    pub(in crate::ops) fn interleaved(data: &'a [bf16], lines: usize, terms: usize) -> Result<Self, OpError> {
        Self { data, lines, terms, line_stride: 1, term_stride: lines }.checked()
    }

    /// Lines whose terms are neighbours, or terms whose lines are: one of the strides is 1.
    ///
    /// # Errors
    /// When neither stride is 1 or an element would lie outside `data`.
    pub(in crate::ops) fn strided(
        data: &'a [bf16],
        [lines, terms]: [usize; 2],
        [line_stride, term_stride]: [usize; 2],
    ) -> Result<Self, OpError> {
        let matrix = Self { data, lines, terms, line_stride, term_stride };
        let last = || {
            let line = (lines - 1).checked_mul(line_stride)?;
            line.checked_add((terms - 1).checked_mul(term_stride)?)
        };
        let fits = lines == 0 || terms == 0 || last().is_some_and(|last| last < data.len());
        if fits && (line_stride == 1 || term_stride == 1) { Ok(matrix) } else { Err(matrix.layout_error()) }
    }

    fn checked(self) -> Result<Self, OpError> {
        let fits = Some(self.data.len()) == self.lines.checked_mul(self.terms);
        if fits { Ok(self) } else { Err(self.layout_error()) }
    }

    fn layout_error(&self) -> OpError {
        let Self { data, lines: rows, terms: cols, line_stride: row_stride, term_stride: col_stride } = *self;
        OpError::MatrixLayout { rows, cols, row_stride, col_stride, len: data.len() }
    }

    /// Some of the terms.
    pub(super) fn terms(self, first: usize, count: usize) -> Self {
        let data = self.data.get(first * self.term_stride..).unwrap_or_default();
        Self { data, terms: count.min(self.terms - first), ..self }
    }

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

    /// As [`pack`](Self::pack) from the first, by the threads of the current pool.
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

/// Words of a panel of 16 lines; one without terms is a tile of zeros.
pub(super) fn panel_words(terms: usize) -> usize {
    terms.div_ceil(TILE_TERMS).max(1) * TILE_WORDS
}

simd_kernel! {
    /// Packs `lines` lines, of which `bits` starts with the first. Either their terms or, for each term, the lines
    /// are neighbours; the others are `stride` apart.
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

/// Loads a tile of which each line's terms are neighbours in memory.
#[inline(always)]
fn lines_of_pairs(bits: &[u16], stride: usize, lines: usize, terms: usize, tile: &mut [[u32; 16]]) {
    for (line, words) in tile.iter_mut().enumerate() {
        let source = if line < lines { &bits[line * stride..][..terms] } else { &[] };
        let terms = padded::<TILE_TERMS>(source);
        for (word, pair) in words.iter_mut().zip(terms.as_chunks::<2>().0) {
            *word = word_of(pair[0], pair[1]);
        }
    }
}

/// Loads a tile of which each term's lines are neighbours in memory.
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

/// As many elements as a tile has, zeros where there are fewer. A whole tile's copy has a length that the compiler
/// knows.
#[inline(always)]
fn padded<const N: usize>(source: &[u16]) -> [u16; N] {
    match source.first_chunk::<N>() {
        Some(whole) => *whole,
        None => {
            let mut padded = [0; N];
            padded[..source.len()].copy_from_slice(source);
            padded
        }
    }
}

#[inline(always)]
fn word_of(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}
