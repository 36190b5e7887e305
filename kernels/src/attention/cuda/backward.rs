//! Backward: recomputes the probabilities from the log-denominators, tile by tile.
//!
//! `p = exp(scale q k^T - lse)`, `ds = p * (dout v^T - delta)`, then `dv += p^T dout`, `dk += scale ds^T q`
//! and `dq += scale ds k`. `dk` and `dv` are summed in f32 over all queries; the same matmuls sum them over
//! the query heads that share a KV head. `dq` is summed in f32 over the keys that fit the buffer of sums, and
//! beyond that in the tensor itself.

use super::pass::{Pass, QueryBlock, align, scratch, sizes};
use super::tiling::{HeadChunk, Tiling};
use crate::attention::{
    blocks::{Rectangle, blocks},
    dims::Dims,
    operands::{Gradients, Operands, Problem, Upstream},
};
use crate::device::{Address, DeviceError, Grid, Kernel, Launcher, MatrixAt, sources::ATTENTION};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// Writes the gradients.
pub(in crate::attention) fn backward(
    launcher: &Launcher,
    problem: &Problem<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
    tiling: &Tiling,
) -> Result<(), DeviceError> {
    let Problem { operands: Operands { q, k, v, scale, layout, .. }, dims } = *problem;
    let Upstream { dout, lse, delta } = *upstream;
    let Gradients { dq, dk, dv } = *gradients;
    let dtype = problem.dtype();
    let (ranges, heads) = (layout.ranges_on(q.device())?, layout.heads_by_kv_head_on(q.device())?);
    let chunks = tiling.head_chunks(layout.q_to_kv(), &dims, tiling.max_kv_heads(&dims));
    let stride = tiling.score_stride(&dims);
    let scratch = Scratch::new(&dims, dtype, &chunks, tiling, q.device())?;
    if launcher.is_dry() {
        return Ok(());
    }
    let Scratch { packed_q, packed_dout, scores, dscores, p, ds, dq_sums, kv_sums } = &scratch;
    let outputs = [dq, dk, dv, packed_q, packed_dout, scores, dscores, p, ds, dq_sums, kv_sums];
    let inputs = [q, k, v, dout, lse, delta, &ranges, &heads];
    launcher.open(outputs, inputs, |[dq, dk, dv, scratch @ ..], inputs| {
        let [q, k, v, dout, lse, delta, ranges, heads] = inputs;
        let [packed_q, packed_dout, scores, dscores, p, ds, dq_sums, kv_sums] = scratch.map(align);
        let (p, ds) = if dtype == DType::F32 { (scores, dscores) } else { (p, ds) };
        let pass = Backward {
            pass: Pass::new(launcher, problem, stride, ranges, heads)?,
            tiling,
            scale,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            dk,
            dv,
            scratch: Scratch { packed_q, packed_dout, scores, dscores, p, ds, dq_sums, kv_sums },
            zero: Kernel::new(&ATTENTION, "attention_zero"),
            softmax: Kernel::of_dtype(&ATTENTION, "attention_softmax_backward", dtype)?,
        };
        for row in 0..dims.batch {
            for chunk in &chunks {
                for keys in tiling.sum_blocks(&dims, chunk) {
                    pass.sum_block(row, chunk, &keys)?;
                }
            }
        }
        Ok(())
    })
}

/// Scratch for the largest of the chunks.
struct Scratch<T> {
    packed_q: T,
    packed_dout: T,
    scores: T,
    /// Gradients of the probabilities.
    dscores: T,
    p: T,
    ds: T,
    /// A query block's `dq`.
    dq_sums: T,
    /// `dk` of a block of keys, followed by their `dv`.
    kv_sums: T,
}

impl Scratch<Tensor> {
    fn new(
        dims: &Dims,
        dtype: DType,
        chunks: &[HeadChunk],
        tiling: &Tiling,
        device: &Device,
    ) -> candle_core::Result<Self> {
        let rows = tiling.max_rows(dims, chunks);
        let keys = chunks.iter().map(|chunk| {
            let first = tiling.sum_blocks(dims, chunk).next();
            first.map_or(0, |keys| keys.len() * chunk.num_kv_heads)
        });
        let (packed, tile) = (rows * dims.head_dim, rows * tiling.score_stride(dims));
        // In f32, probabilities and gradients of scores are computed in place.
        let rounded = if dtype == DType::F32 { 0 } else { tile };
        Ok(Self {
            packed_q: scratch(packed, dtype, device)?,
            packed_dout: scratch(packed, dtype, device)?,
            scores: scratch(tile, DType::F32, device)?,
            dscores: scratch(tile, DType::F32, device)?,
            p: scratch(rounded, dtype, device)?,
            ds: scratch(rounded, dtype, device)?,
            dq_sums: scratch(packed, DType::F32, device)?,
            kv_sums: scratch(2 * keys.max().unwrap_or(0) * dims.head_dim, DType::F32, device)?,
        })
    }
}

struct Backward<'a> {
    pass: Pass<'a>,
    tiling: &'a Tiling,
    scale: f32,
    q: Address,
    k: Address,
    v: Address,
    dout: Address,
    lse: Address,
    delta: Address,
    dq: Address,
    dk: Address,
    dv: Address,
    scratch: Scratch<Address>,
    zero: Kernel,
    softmax: Kernel,
}

/// The keys whose gradients are being summed, `[kv head, key, d]`.
struct KeySums<'a> {
    keys: &'a Range<usize>,
    dk: Address,
    dv: Address,
}

impl Backward<'_> {
    /// Computes `dk` and `dv` of some keys of a chunk of heads, and their contribution to its `dq`.
    fn sum_block(&self, row: usize, chunk: &HeadChunk, keys: &Range<usize>) -> Result<(), DeviceError> {
        let Self { pass, scratch, .. } = self;
        let num_queries = pass.dims.num_queries;
        let len = chunk.num_kv_heads * keys.len() * pass.dims.head_dim;
        let sums = KeySums { keys, dk: scratch.kv_sums, dv: scratch.kv_sums.offset(len) };
        self.zero(scratch.kv_sums, 2 * len)?;
        if chunk.group > 0 {
            // The first keys overwrite `dq`, for all queries.
            let seeing = pass.layout.visible(row).queries_of(keys);
            let queries = if keys.start == 0 { 0..num_queries } else { seeing };
            for queries in blocks(queries, num_queries, self.tiling.query_block(&pass.dims, chunk)) {
                self.query_block(&QueryBlock { row, chunk: *chunk, queries }, &sums)?;
            }
        }
        pass.scatter_keys(self.dk, sums.dk, row, chunk, keys)?;
        pass.scatter_keys(self.dv, sums.dv, row, chunk, keys)
    }

    fn query_block(&self, block: &QueryBlock, sums: &KeySums<'_>) -> Result<(), DeviceError> {
        let Self { pass, scratch, .. } = self;
        pass.gather(scratch.packed_q, self.q, block)?;
        pass.gather(scratch.packed_dout, self.dout, block)?;
        self.zero(scratch.dq_sums, block.num_rows() * pass.dims.head_dim)?;
        for tile in self.tiling.tiles(pass.layout.visible(block.row), block.queries.clone(), sums.keys) {
            self.tile(block, &tile, sums)?;
        }
        pass.scatter_queries(self.dq, scratch.dq_sums, block, sums.keys.start > 0)
    }

    fn tile(&self, block: &QueryBlock, tile: &Rectangle, sums: &KeySums<'_>) -> Result<(), DeviceError> {
        let Self { pass, scale, scratch, .. } = self;
        let scores_of = |address| pass.scores(address, block, tile);
        let (q, dout) =
            (pass.rows(scratch.packed_q, block, tile), pass.rows(scratch.packed_dout, block, tile));
        let (k, v) = (pass.keys(self.k, block, tile), pass.keys(self.v, block, tile));
        pass.multiply(block, *scale, q, k.transposed(), 0.0, scores_of(scratch.scores))?;
        pass.multiply(block, 1.0, dout, v.transposed(), 0.0, scores_of(scratch.dscores))?;
        self.softmax(block, tile)?;
        let (p, ds) = (scores_of(scratch.p), scores_of(scratch.ds));
        pass.multiply(block, 1.0, p.transposed(), dout, 1.0, self.sums_of(sums.dv, sums, tile))?;
        pass.multiply(block, *scale, ds.transposed(), q, 1.0, self.sums_of(sums.dk, sums, tile))?;
        pass.multiply(block, *scale, ds, k, 1.0, pass.rows(scratch.dq_sums, block, tile))
    }

    /// The sums of the tile's keys.
    fn sums_of(&self, address: Address, sums: &KeySums<'_>, tile: &Rectangle) -> MatrixAt {
        let head_dim = self.pass.dims.head_dim;
        let address = address.offset((tile.keys.start - sums.keys.start) * head_dim);
        MatrixAt::row_major(address, tile.keys.len(), head_dim, head_dim).batched(sums.keys.len() * head_dim)
    }

    fn softmax(&self, block: &QueryBlock, tile: &Rectangle) -> Result<(), DeviceError> {
        let Self { pass, scratch, .. } = self;
        let addresses = [
            scratch.p.into(),
            scratch.ds.into(),
            scratch.scores.into(),
            scratch.dscores.into(),
            pass.row_term_at(self.lse, block.row, tile.queries.start).into(),
            pass.row_term_at(self.delta, block.row, tile.queries.start).into(),
            pass.heads(&block.chunk).into(),
            pass.ranges_of(block, tile).into(),
        ];
        let sizes = sizes([
            block.rows_of(tile).len(),
            block.chunk.group,
            pass.dims.num_queries,
            tile.keys.start,
            tile.keys.len(),
            pass.score_stride,
        ]);
        let args = [&addresses[..], &sizes, &[pass.softcap()]].concat();
        // SAFETY: the tile's scores are within the scratch, its queries within `lse`, `delta` and the ranges.
        unsafe { pass.launch_on_tile(&self.softmax, block, tile, &args) }
    }

    fn zero(&self, sums: Address, elements: usize) -> Result<(), DeviceError> {
        let args = [sums.into(), (elements as u64).into()];
        // SAFETY: the callers' sums are within the scratch.
        unsafe { self.pass.launcher.launch(&self.zero, Grid::threads(elements.div_ceil(4)), &args) }
    }
}
