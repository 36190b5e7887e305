//! Shared parts of the forward and backward tiles: packed queries, and the matrix views of the matmuls.

use super::tiling::HeadChunk;
use crate::attention::{AttentionLayout, blocks::Rectangle, dims::Dims, operands::Problem};
use crate::device::{
    Address, Arg, DeviceError, Grid, Kernel, Launcher, Matmul, MatrixAt, sources::ATTENTION,
};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// Warps per block: the rows of a tile that it processes.
const WARPS: usize = Grid::THREADS as usize / 32;

/// The queries of one sequence that a chunk of heads processes at a time, packed: rows `[kv head, query,
/// member]` of `head_dim` elements.
pub(super) struct QueryBlock {
    pub(super) row: usize,
    pub(super) chunk: HeadChunk,
    pub(super) queries: Range<usize>,
}

impl QueryBlock {
    pub(super) fn num_rows(&self) -> usize {
        self.chunk.num_kv_heads * self.rows_per_kv_head()
    }

    pub(super) fn rows_per_kv_head(&self) -> usize {
        self.queries.len() * self.chunk.group
    }

    /// The rows of a tile, numbered within each KV head.
    pub(super) fn rows_of(&self, tile: &Rectangle) -> Range<usize> {
        let row = |query: usize| (query - self.queries.start) * self.chunk.group;
        row(tile.queries.start)..row(tile.queries.end)
    }
}

/// One call: its sizes, kernels and tables.
///
/// Invariant: the tables are those of the layout, and the addresses passed to methods are of tensors and
/// scratch whose sizes follow from `dims` and the tiling.
pub(super) struct Pass<'a> {
    pub(super) launcher: &'a Launcher,
    pub(super) dims: Dims,
    pub(super) layout: &'a AttentionLayout,
    dtype: DType,
    /// Distance between rows of scores, in elements.
    pub(super) score_stride: usize,
    ranges: Address,
    heads: Address,
    gather: Kernel,
    scatter: Kernel,
}

impl<'a> Pass<'a> {
    pub(super) fn new(
        launcher: &'a Launcher,
        problem: &Problem<'a>,
        score_stride: usize,
        ranges: Address,
        heads: Address,
    ) -> Result<Self, DeviceError> {
        let dtype = problem.dtype();
        Ok(Self {
            launcher,
            dims: problem.dims,
            layout: problem.operands.layout,
            dtype,
            score_stride,
            ranges,
            heads,
            gather: Kernel::of_dtype(&ATTENTION, "attention_gather", dtype)?,
            scatter: Kernel::of_dtype(&ATTENTION, "attention_scatter", dtype)?,
        })
    }

    /// The query heads of a chunk.
    pub(super) fn heads(&self, chunk: &HeadChunk) -> Address {
        self.heads.offset(chunk.first_head)
    }

    /// The block's first element of a tensor `[b, sq, hq, d]`.
    pub(super) fn queries_at(&self, tensor: Address, block: &QueryBlock) -> Address {
        let Dims { num_queries, num_heads, head_dim, .. } = self.dims;
        tensor.offset((block.row * num_queries + block.queries.start) * num_heads * head_dim)
    }

    /// A query's element for the first head of a tensor `[b, hq, sq]`.
    pub(super) fn row_term_at(&self, tensor: Address, row: usize, query: usize) -> Address {
        tensor.offset(row * self.dims.num_heads * self.dims.num_queries + query)
    }

    /// Packs the block's queries of a tensor `[b, sq, hq, d]`.
    pub(super) fn gather(&self, packed: Address, x: Address, block: &QueryBlock) -> Result<(), DeviceError> {
        let placing =
            self.placing(block.num_rows(), block.queries.len(), block.chunk.group, self.dims.num_heads);
        let addresses = [packed.into(), self.queries_at(x, block).into(), self.heads(&block.chunk).into()];
        let args = [&addresses[..], &placing].concat();
        // SAFETY: the block's rows are within `packed`, its queries and heads within `x`.
        unsafe { self.launcher.launch(&self.gather, self.elements_grid(block.num_rows()), &args) }
    }

    /// Writes the packed sums of the block's queries to a tensor `[b, sq, hq, d]`, or adds them to it.
    pub(super) fn scatter_queries(
        &self,
        x: Address,
        sums: Address,
        block: &QueryBlock,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let placing =
            self.placing(block.num_rows(), block.queries.len(), block.chunk.group, self.dims.num_heads);
        let addresses = [self.queries_at(x, block).into(), sums.into(), self.heads(&block.chunk).into()];
        let args = [&addresses[..], &placing, &[accumulate.into()]].concat();
        // SAFETY: the block's rows are within `sums`, its queries and heads within `x`.
        unsafe { self.launcher.launch(&self.scatter, self.elements_grid(block.num_rows()), &args) }
    }

    /// Writes sums `[kv head, key, d]` to a tensor `[b, skv, hkv, d]`.
    pub(super) fn scatter_keys(
        &self,
        x: Address,
        sums: Address,
        row: usize,
        chunk: &HeadChunk,
        keys: &Range<usize>,
    ) -> Result<(), DeviceError> {
        let rows = chunk.num_kv_heads * keys.len();
        let placing = self.placing(rows, keys.len(), 1, self.dims.num_kv_heads);
        let x = self.keys_at(x, row, chunk, keys.start);
        let addresses = [x.into(), sums.into(), Address::null(DType::U32).into()];
        let args = [&addresses[..], &placing, &[false.into()]].concat();
        // SAFETY: the keys' rows are within `sums`, the keys and heads within `x`.
        unsafe { self.launcher.launch(&self.scatter, self.elements_grid(rows), &args) }
    }

    /// Starts a kernel with one warp per row of a tile.
    ///
    /// # Safety
    /// As [`Launcher::launch`].
    pub(super) unsafe fn launch_on_tile(
        &self,
        kernel: &Kernel,
        block: &QueryBlock,
        tile: &Rectangle,
        args: &[Arg<'_>],
    ) -> Result<(), DeviceError> {
        let rows = block.rows_of(tile).len();
        let grid = Grid { blocks: [rows.div_ceil(WARPS), block.chunk.num_kv_heads, 1], ..Grid::blocks(0) };
        // SAFETY: by this function's contract.
        unsafe { self.launcher.launch(kernel, grid, args) }
    }

    /// The key ranges of the tile's queries, beginning with the first query.
    pub(super) fn ranges_of(&self, block: &QueryBlock, tile: &Rectangle) -> Address {
        self.ranges.offset(2 * (block.row * self.dims.num_queries + tile.queries.start))
    }

    /// The soft cap of the scores as a kernel's parameter: 0 for none.
    pub(super) fn softcap(&self) -> Arg<'static> {
        self.layout.logits().softcap.unwrap_or(0.0).into()
    }

    /// The tile's scores, or another tensor of their shape.
    pub(super) fn scores(&self, scores: Address, block: &QueryBlock, tile: &Rectangle) -> MatrixAt {
        let rows = block.rows_of(tile).len();
        let scores = MatrixAt::row_major(scores, rows, tile.keys.len(), self.score_stride);
        scores.batched(rows * self.score_stride)
    }

    /// The tile's packed rows.
    pub(super) fn rows(&self, packed: Address, block: &QueryBlock, tile: &Rectangle) -> MatrixAt {
        let (rows, head_dim) = (block.rows_of(tile), self.dims.head_dim);
        let packed =
            MatrixAt::row_major(packed.offset(rows.start * head_dim), rows.len(), head_dim, head_dim);
        packed.batched(block.rows_per_kv_head() * head_dim)
    }

    /// The tile's keys in a tensor `[b, skv, hkv, d]`.
    pub(super) fn keys(&self, tensor: Address, block: &QueryBlock, tile: &Rectangle) -> MatrixAt {
        let Dims { num_kv_heads, head_dim, .. } = self.dims;
        let address = self.keys_at(tensor, block.row, &block.chunk, tile.keys.start);
        MatrixAt::row_major(address, tile.keys.len(), head_dim, num_kv_heads * head_dim).batched(head_dim)
    }

    /// Computes c = alpha · a·b + beta · c for each KV head of the block.
    pub(super) fn multiply(
        &self,
        block: &QueryBlock,
        alpha: f32,
        a: MatrixAt,
        b: MatrixAt,
        beta: f32,
        c: MatrixAt,
    ) -> Result<(), DeviceError> {
        let batch = block.chunk.num_kv_heads;
        // SAFETY: the matrices are within their tensors (the invariant), and `c` is separate scratch.
        unsafe { self.launcher.gemm(&Matmul { alpha, a, b, beta, c, batch }) }
    }

    fn keys_at(&self, tensor: Address, row: usize, chunk: &HeadChunk, key: usize) -> Address {
        let Dims { num_keys, num_kv_heads, head_dim, .. } = self.dims;
        tensor.offset(((row * num_keys + key) * num_kv_heads + chunk.first_kv_head) * head_dim)
    }

    /// The kernel parameters for the position of packed rows.
    fn placing(&self, rows: usize, tokens: usize, group: usize, num_heads: usize) -> [Arg<'static>; 5] {
        sizes([rows, tokens, group, num_heads, self.dims.head_dim])
    }

    /// One thread per 16 bytes of the rows.
    pub(super) fn elements_grid(&self, rows: usize) -> Grid {
        Grid::threads((rows * self.dims.head_dim * self.dtype.size_in_bytes()).div_ceil(16))
    }
}

/// Sizes as a kernel's parameters.
pub(super) fn sizes<const N: usize>(sizes: [usize; N]) -> [Arg<'static>; N] {
    sizes.map(|size| (size as u32).into())
}

/// Scratch memory, to be used from [`align`] on.
pub(super) fn scratch(elements: usize, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
    crate::tensor::empty(elements + 16 / dtype.size_in_bytes(), dtype, device)
}

/// The first address in a [`scratch`] tensor that allows accesses of 16 bytes.
pub(super) fn align(scratch: Address) -> Address {
    let candidates = (0..8).map(|elements| scratch.offset(elements));
    candidates.into_iter().find(|address| address.is_aligned_to(16)).unwrap_or(scratch)
}
