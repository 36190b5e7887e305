//! The convolution on slices, in tiles of tokens and channels that stay in the first-level cache.

use super::Sizes;
use crate::Documents;
use crate::cast::Float;
use crate::parallel::rows_per_block;
use crate::simd::{self, simd_kernel};
use rayon::prelude::*;
use std::ops::Range;

/// Channels of a tile.
const CHANNELS: usize = 128;

/// Tokens of a tile.
const TOKENS: usize = 64;

/// The tokens are divided into at most this many blocks, each with its own partial weight gradient.
const MAX_WEIGHT_BLOCKS: usize = 64;

/// The weights in f32, and the reach of each token within its document.
pub(super) struct Weights {
    /// For each tile of channels: the taps `[w, channels]`, that of the current token first, and the bias `[channels]`.
    tiles: Vec<f32>,
    channels: usize,
    width: usize,
    /// Number of tokens before each that its convolution reads.
    before: Vec<u8>,
    /// Number of tokens after each whose convolutions read it.
    after: Vec<u8>,
}

impl Weights {
    pub(super) fn new(weight: &[f32], bias: Option<&[f32]>, sizes: Sizes, documents: &Documents) -> Self {
        let Sizes { tokens, channels, width } = sizes;
        let mut tiles = Vec::with_capacity((width + 1) * channels);
        for tile in channel_tiles(channels) {
            for tap in (0..width).rev() {
                tiles.extend(tile.clone().map(|channel| weight[channel * width + tap]));
            }
            tiles.extend(tile.map(|channel| bias.map_or(0.0, |bias| bias[channel])));
        }
        let (mut before, mut after) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        for document in (0..documents.batch()).flat_map(|sequence| documents.of_sequence(sequence)) {
            let reach = |tokens: usize| tokens.min(width - 1) as u8;
            before.extend((0..document.len()).map(reach));
            after.extend((0..document.len()).rev().map(reach));
        }
        Self { tiles, channels, width, before, after }
    }

    /// The taps and the bias of a tile of channels.
    fn tile(&self, channels: &Range<usize>) -> &[f32] {
        &self.tiles[(self.width + 1) * channels.start..(self.width + 1) * channels.end]
    }

    fn reach(&self) -> usize {
        self.width - 1
    }
}

fn channel_tiles(channels: usize) -> impl Iterator<Item = Range<usize>> {
    tiles(0..channels, CHANNELS)
}

fn tiles(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |start| start..range.end.min(start + size))
}

/// Some tokens and channels of a tensor `[n, channels]`.
#[derive(Clone)]
struct Tile {
    tokens: Range<usize>,
    channels: Range<usize>,
}

impl Tile {
    /// Copies the tile in f32, and returns it.
    fn read<'a, T: Float>(&self, from: &[T], row: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        let sizes = [self.tokens.len(), self.channels.len()];
        buffer.resize(sizes[0] * sizes[1], 0.0);
        let start = self.tokens.start * row + self.channels.start;
        T::widen_rows(from.get(start..).unwrap_or_default(), row, buffer, sizes[1], sizes);
        buffer
    }

    /// Rounds the tile into rows of which the first is token `first`.
    fn write<T: Float>(&self, values: &[f32], into: &mut [T], first: usize, row: usize) {
        for (token, values) in self.tokens.clone().zip(values.chunks_exact(self.channels.len())) {
            let start = (token - first) * row + self.channels.start;
            T::round(values, &mut into[start..start + values.len()]);
        }
    }

    /// The tile with so many tokens more before it.
    fn with_tokens_before(&self, tokens: usize) -> Self {
        Self { tokens: self.tokens.start - tokens..self.tokens.end, ..self.clone() }
    }
}

pub(super) fn forward<T: Float>(x: &[T], weights: &Weights, silu: bool, y: &mut [T]) {
    let row = weights.channels;
    let rows = rows_per_block(y.len() / row, row);
    let blocks = y.par_chunks_mut(rows * row).enumerate();
    blocks.for_each_init(Default::default, |[a, b]: &mut [Vec<f32>; 2], (block, y)| {
        let first = block * rows;
        for tokens in tiles(first..first + y.len() / row, TOKENS) {
            for channels in channel_tiles(row) {
                let tile = Tile { tokens: tokens.clone(), channels };
                convolve_tile(x, weights, &tile, a, b);
                if silu {
                    apply_silu(b);
                }
                tile.write(b, y, first, row);
            }
        }
    });
}

/// Writes the sums of a tile. Returns the part of x that they read: the tile and [`reached`] tokens before it, copied to `x_tile`.
fn convolve_tile<'a, T: Float>(
    x: &[T],
    weights: &Weights,
    tile: &Tile,
    x_tile: &'a mut Vec<f32>,
    sums: &mut Vec<f32>,
) -> &'a [f32] {
    let halo = reached(weights, tile);
    let x = tile.with_tokens_before(halo).read(x, weights.channels, x_tile);
    sums.resize(tile.tokens.len() * tile.channels.len(), 0.0);
    let before = &weights.before[tile.tokens.clone()];
    convolve(x, tile.channels.len(), halo, before, weights.tile(&tile.channels), sums);
    x
}

/// Number of tokens before a tile that are copied with it.
fn reached(weights: &Weights, tile: &Tile) -> usize {
    weights.reach().min(tile.tokens.start)
}

simd_kernel! {
    /// `sums[t] = bias + Σ taps[d] · x[t − d]`, where token 0 is row `halo` of x.
    fn convolve<S>(x: &[f32], channels: usize, halo: usize, before: &[u8], weights: &[f32], sums: &mut [f32]) {
        let (taps, bias) = weights.split_at(weights.len() - channels);
        for (token, (sums, before)) in sums.chunks_exact_mut(channels).zip(before).enumerate() {
            sums.copy_from_slice(bias);
            for (distance, taps) in taps.chunks_exact(channels).take(usize::from(*before) + 1).enumerate() {
                let x = &x[(halo + token - distance) * channels..][..channels];
                for ((sum, x), tap) in sums.iter_mut().zip(x).zip(taps) {
                    *sum = S::mul_add(*x, *tap, *sum);
                }
            }
        }
    }
}

simd_kernel! {
    fn apply_silu<S>(sums: &mut [f32]) {
        for sum in sums.iter_mut() {
            *sum /= 1.0 + simd::exp::<S>(-*sum);
        }
    }
}

simd_kernel! {
    /// Replaces the sums by their gradients, for the gradients dy of SiLU's outputs.
    fn silu_backward<S>(sums: &mut [f32], dy: &[f32]) {
        for (sum, dy) in sums.iter_mut().zip(dy) {
            let sigmoid = 1.0 / (1.0 + simd::exp::<S>(-*sum));
            *sum = dy * sigmoid * S::mul_add(*sum, 1.0 - sigmoid, 1.0);
        }
    }
}

/// Tokens per block with partial weight gradients. Independent of the number of threads, since it determines the order of
/// the sum over tokens.
fn weight_block_tokens(tokens: usize) -> usize {
    tokens.div_ceil(MAX_WEIGHT_BLOCKS).next_multiple_of(TOKENS).max(TOKENS)
}

/// Bytes of the partial weight gradients, plus their sum.
pub(super) fn partials_bytes(sizes: Sizes) -> usize {
    let blocks = sizes.tokens.div_ceil(weight_block_tokens(sizes.tokens));
    (sizes.width + 1) * sizes.channels * (blocks * size_of::<f32>() + size_of::<f64>())
}

/// Writes dx and returns the partial gradients of the weights per block of tokens, in the order of [`Weights::tiles`].
pub(super) fn backward<T: Float>(dy: &[T], x: &[T], weights: &Weights, silu: bool, dx: &mut [T]) -> Vec<f32> {
    let (row, tokens) = (weights.channels, weights.before.len());
    let rows = weight_block_tokens(tokens);
    let mut partials = vec![0.0; tokens.div_ceil(rows) * weights.tiles.len()];
    let blocks = (dx.par_chunks_mut(rows * row), partials.par_chunks_mut(weights.tiles.len()));
    let blocks = blocks.into_par_iter().enumerate();
    blocks.for_each_init(Default::default, |buffers: &mut [Vec<f32>; 4], (block, (dx, partials))| {
        let first = block * rows;
        for channels in channel_tiles(row) {
            let range = (weights.width + 1) * channels.start..(weights.width + 1) * channels.end;
            for tokens in tiles(first..first + dx.len() / row, TOKENS) {
                let tile = Tile { tokens, channels: channels.clone() };
                let partial = &mut partials[range.clone()];
                let dx_tile = backward_tile(dy, x, weights, silu, &tile, partial, buffers);
                tile.write(dx_tile, dx, first, row);
            }
        }
    });
    partials
}

/// Adds the gradients of a tile to those of its weights, and returns that of its inputs.
fn backward_tile<'a, T: Float>(
    dy: &[T],
    x: &[T],
    weights: &Weights,
    silu: bool,
    tile: &Tile,
    partial: &mut [f32],
    [x_tile, dsums, dy_tile, dx]: &'a mut [Vec<f32>; 4],
) -> &'a [f32] {
    let (row, channels) = (weights.channels, tile.channels.len());
    // The gradient of an input is a sum over the tokens that read it, of which the last are behind the tile.
    let end = weights.before.len().min(tile.tokens.end + weights.reach());
    let longer = Tile { tokens: tile.tokens.start..end, ..tile.clone() };
    let x = convolve_tile(x, weights, &longer, x_tile, dsums);
    let dy = longer.read(dy, row, dy_tile);
    if silu {
        silu_backward(dsums, dy);
    } else {
        dsums.copy_from_slice(dy);
    }
    let before = &weights.before[tile.tokens.clone()];
    sum_weight_gradients(x, channels, reached(weights, tile), before, dsums, partial);
    dx.resize(tile.tokens.len() * channels, 0.0);
    correlate(dsums, channels, &weights.after[tile.tokens.clone()], weights.tile(&tile.channels), dx);
    dx
}

simd_kernel! {
    /// Adds `Σ dsums[t] · x[t − d]` to the gradient of tap d, and `Σ dsums[t]` to that of the bias.
    fn sum_weight_gradients<S>(
        x: &[f32],
        channels: usize,
        halo: usize,
        before: &[u8],
        dsums: &[f32],
        partial: &mut [f32],
    ) {
        let (dtaps, dbias) = partial.split_at_mut(partial.len() - channels);
        for (token, (dsums, before)) in dsums.chunks_exact(channels).zip(before).enumerate() {
            let reached = usize::from(*before) + 1;
            for (distance, dtaps) in dtaps.chunks_exact_mut(channels).take(reached).enumerate() {
                let x = &x[(halo + token - distance) * channels..][..channels];
                for ((dtap, x), dsum) in dtaps.iter_mut().zip(x).zip(dsums) {
                    *dtap = S::mul_add(*x, *dsum, *dtap);
                }
            }
            for (dbias, dsum) in dbias.iter_mut().zip(dsums) {
                *dbias += dsum;
            }
        }
    }
}

simd_kernel! {
    /// `dx[t] = Σ taps[d] · dsums[t + d]`
    fn correlate<S>(dsums: &[f32], channels: usize, after: &[u8], weights: &[f32], dx: &mut [f32]) {
        for (token, (dx, after)) in dx.chunks_exact_mut(channels).zip(after).enumerate() {
            dx.fill(0.0);
            for (distance, taps) in weights.chunks_exact(channels).take(usize::from(*after) + 1).enumerate() {
                let dsums = &dsums[(token + distance) * channels..][..channels];
                for ((dx, dsum), tap) in dx.iter_mut().zip(dsums).zip(taps) {
                    *dx = S::mul_add(*dsum, *tap, *dx);
                }
            }
        }
    }
}

/// The gradients of the weights, `[C, w]` and `[C]`.
pub(super) struct WeightGradients {
    pub(super) weight: Vec<f64>,
    pub(super) bias: Vec<f64>,
}

/// Σ partials, block by block in f64.
pub(super) fn sum_partials(partials: &[f32], Sizes { channels, width, .. }: Sizes) -> WeightGradients {
    let mut sums = WeightGradients { weight: vec![0.0; channels * width], bias: vec![0.0; channels] };
    for partial in partials.chunks_exact((width + 1) * channels) {
        for tile in channel_tiles(channels) {
            let partial = &partial[(width + 1) * tile.start..(width + 1) * tile.end];
            for (distance, partial) in partial.chunks_exact(tile.len()).enumerate() {
                for (channel, partial) in tile.clone().zip(partial) {
                    let sum = match distance < width {
                        true => &mut sums.weight[channel * width + width - 1 - distance],
                        false => &mut sums.bias[channel],
                    };
                    *sum += f64::from(*partial);
                }
            }
        }
    }
    sums
}
