//! Forward: for each block of queries, tile after tile of keys, with an online softmax.

use super::pass::{Pass, QueryBlock, align, scratch, sizes};
use super::tiling::Tiling;
use crate::attention::{
    blocks::{Rectangle, blocks},
    operands::{Operands, Problem},
};
use crate::device::{Address, DeviceError, Kernel, Launcher, sources::ATTENTION};
use candle_core::{DType, Tensor};

/// Writes `o [b, sq, hq, d]` and `lse [b, hq, sq]`.
pub(in crate::attention) fn forward(
    launcher: &Launcher,
    problem: &Problem<'_>,
    o: &Tensor,
    lse: &Tensor,
    tiling: &Tiling,
) -> Result<(), DeviceError> {
    let Problem { operands: Operands { q, k, v, scale, layout, .. }, dims } = *problem;
    let (device, dtype) = (q.device(), problem.dtype());
    let (ranges, heads) = (layout.ranges_on(device)?, layout.heads_by_kv_head_on(device)?);
    let chunks = tiling.head_chunks(layout.q_to_kv(), &dims, dims.num_kv_heads);
    let stride = tiling.score_stride(&dims);
    let rows = tiling.max_rows(&dims, &chunks);
    let packed_q = scratch(rows * dims.head_dim, dtype, device)?;
    let scores = scratch(rows * stride, DType::F32, device)?;
    // In f32, probabilities replace the scores.
    let in_place = dtype == DType::F32;
    let probabilities = scratch(if in_place { 0 } else { rows * stride }, dtype, device)?;
    let acc = scratch(rows * dims.head_dim, DType::F32, device)?;
    let state = scratch(2 * rows, DType::F32, device)?;
    if launcher.is_dry() {
        return Ok(());
    }
    let outputs = [o, lse, &packed_q, &scores, &probabilities, &acc, &state];
    launcher.open(outputs, [q, k, v, &ranges, &heads], |outputs, [q, k, v, ranges, heads]| {
        let [o, lse, packed_q, scores, probabilities, acc, state] = outputs;
        let scores = align(scores);
        let pass = Forward {
            pass: Pass::new(launcher, problem, stride, ranges, heads)?,
            scale,
            q,
            k,
            v,
            o,
            lse,
            packed_q: align(packed_q),
            scores,
            probabilities: if in_place { scores } else { align(probabilities) },
            acc: align(acc),
            maxima: state,
            sums: state.offset(rows),
            begin: Kernel::new(&ATTENTION, "attention_begin"),
            softmax: Kernel::of_dtype(&ATTENTION, "attention_softmax", dtype)?,
            finish: Kernel::of_dtype(&ATTENTION, "attention_finish", dtype)?,
        };
        for row in 0..dims.batch {
            for &chunk in chunks.iter().filter(|chunk| chunk.group > 0) {
                let size = tiling.query_block(&dims, &chunk);
                for queries in blocks(0..dims.num_queries, dims.num_queries, size) {
                    pass.query_block(&QueryBlock { row, chunk, queries }, tiling)?;
                }
            }
        }
        Ok(())
    })
}

struct Forward<'a> {
    pass: Pass<'a>,
    scale: f32,
    q: Address,
    k: Address,
    v: Address,
    o: Address,
    lse: Address,
    packed_q: Address,
    scores: Address,
    probabilities: Address,
    /// A block's sums of `p v`, in f32 until all keys are added.
    acc: Address,
    /// Maximum score so far of each packed row.
    maxima: Address,
    /// Sum of `exp(score - maximum)` so far of each packed row.
    sums: Address,
    begin: Kernel,
    softmax: Kernel,
    finish: Kernel,
}

impl Forward<'_> {
    fn query_block(&self, block: &QueryBlock, tiling: &Tiling) -> Result<(), DeviceError> {
        let Self { pass, .. } = self;
        pass.gather(self.packed_q, self.q, block)?;
        self.begin(block)?;
        let visible = pass.layout.visible(block.row);
        for tile in tiling.tiles(visible, block.queries.clone(), &(0..pass.dims.num_keys)) {
            self.tile(block, &tile)?;
        }
        self.finish(block)
    }

    /// acc = 0, sums = 0, maxima = -inf.
    fn begin(&self, block: &QueryBlock) -> Result<(), DeviceError> {
        let (rows, head_dim) = (block.num_rows() as u32, self.pass.dims.head_dim as u32);
        let args = [self.acc.into(), self.maxima.into(), self.sums.into(), rows.into(), head_dim.into()];
        // SAFETY: the block's rows are within all three.
        unsafe { self.pass.launcher.launch(&self.begin, self.pass.elements_grid(block.num_rows()), &args) }
    }

    fn tile(&self, block: &QueryBlock, tile: &Rectangle) -> Result<(), DeviceError> {
        let Self { pass, .. } = self;
        let q = pass.rows(self.packed_q, block, tile);
        let k = pass.keys(self.k, block, tile).transposed();
        pass.multiply(block, self.scale, q, k, 0.0, pass.scores(self.scores, block, tile))?;
        self.softmax(block, tile)?;
        let p = pass.scores(self.probabilities, block, tile);
        let v = pass.keys(self.v, block, tile);
        pass.multiply(block, 1.0, p, v, 1.0, pass.rows(self.acc, block, tile))
    }

    fn softmax(&self, block: &QueryBlock, tile: &Rectangle) -> Result<(), DeviceError> {
        let Self { pass, .. } = self;
        let (rows, head_dim) = (block.rows_of(tile), pass.dims.head_dim);
        let addresses = [
            self.probabilities.into(),
            self.maxima.offset(rows.start).into(),
            self.sums.offset(rows.start).into(),
            self.acc.offset(rows.start * head_dim).into(),
            self.scores.into(),
            pass.ranges_of(block, tile).into(),
        ];
        let sizes = sizes([
            rows.len(),
            block.rows_per_kv_head(),
            block.chunk.group,
            tile.keys.start,
            tile.keys.len(),
            pass.score_stride,
            head_dim,
        ]);
        let args = [&addresses[..], &sizes, &[pass.softcap()]].concat();
        // SAFETY: the tile's scores and rows are within the scratch, its queries within the ranges.
        unsafe { pass.launch_on_tile(&self.softmax, block, tile, &args) }
    }

    /// o = acc / sums, lse = maxima + ln(sums).
    fn finish(&self, block: &QueryBlock) -> Result<(), DeviceError> {
        let Self { pass, .. } = self;
        let dims = &pass.dims;
        let addresses = [
            pass.queries_at(self.o, block).into(),
            pass.row_term_at(self.lse, block.row, block.queries.start).into(),
            self.acc.into(),
            self.maxima.into(),
            self.sums.into(),
            pass.heads(&block.chunk).into(),
        ];
        let sizes = sizes([
            block.num_rows(),
            block.queries.len(),
            block.chunk.group,
            dims.num_heads,
            dims.num_queries,
            dims.head_dim,
        ]);
        let args = [&addresses[..], &sizes].concat();
        // SAFETY: the block's rows are within the scratch, its queries and heads within `o` and `lse`.
        unsafe { pass.launcher.launch(&self.finish, pass.elements_grid(block.num_rows()), &args) }
    }
}
