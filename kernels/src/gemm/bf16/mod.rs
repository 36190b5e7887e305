//! bf16 matmuls with f32 sums, on CPUs with instructions for them.
//!
//! Other CPUs multiply f32 copies, block by block ([`widened`](super::widened)); so do small matmuls, which
//! would spend most of their time on packing. A matmul packs its operands into the order in which the
//! instructions read them ([`pack`]), computes blocks of 32 × 32 ([`kernel`]), and rounds each into the
//! destination or adds it. The order of summation depends neither on the number of threads nor on the block.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernel;
mod pack;
#[cfg(test)]
mod tests;

pub(crate) use kernel::Kernel;

use super::SMALL_MATMUL;
use super::operand::MatmulOperand;
use crate::cast::Float;
use crate::simd::simd_kernel;
use half::{bf16, f16};
use pack::{Order, TILE_ROWS, panel_words};
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// Rows and columns of a block that a kernel computes at once: two tiles of 16 each.
const BLOCK: usize = 32;

/// The sums of a block, row by row.
#[repr(align(64))]
struct Sums([[f32; BLOCK]; BLOCK]);

/// Rows of the destination per task.
const ROWS_PER_TASK: usize = 4 * BLOCK;

/// Part of k that is packed and summed at a time if the sums are stored in f32. A task's data then stays in its
/// cache, and no chain of additions is longer.
const K_PER_SUM: usize = 2048;

/// The sums of a block, of which `rows` by `cols` belong to the result.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    pub(crate) rows: &'a [[f32; BLOCK]],
    pub(crate) width: usize,
}

/// An element type of destinations.
pub(crate) trait Stored: Float {
    /// Whether partial sums may be added up in the destination.
    const ADDS_EXACTLY: bool;

    /// Writes the sums of a block, or adds them. `elements` begins with the block's first element; its rows
    /// are `stride` apart.
    fn store(elements: &mut [Self], stride: usize, sums: Block<'_>, add: bool);
}

impl Stored for f32 {
    const ADDS_EXACTLY: bool = true;

    fn store(elements: &mut [Self], stride: usize, sums: Block<'_>, add: bool) {
        store_f32(elements, stride, sums, add);
    }
}

impl Stored for bf16 {
    const ADDS_EXACTLY: bool = false;

    fn store(elements: &mut [Self], stride: usize, sums: Block<'_>, add: bool) {
        store_bf16(elements, stride, sums, add);
    }
}

/// For callers that are generic over the element type: no kernel multiplies f16.
impl Stored for f16 {
    const ADDS_EXACTLY: bool = false;

    fn store(elements: &mut [Self], stride: usize, Block { rows, width }: Block<'_>, add: bool) {
        for (row, sums) in elements.chunks_mut(stride).zip(rows) {
            for (element, sum) in row[..width].iter_mut().zip(sums) {
                *element = f16::from_f32(if add { element.to_f32() + sum } else { *sum });
            }
        }
    }
}

simd_kernel! {
    fn store_f32<S>(elements: &mut [f32], stride: usize, sums: Block<'_>, add: bool) {
        let Block { rows, width } = sums;
        for (row, sums) in elements.chunks_mut(stride).zip(rows) {
            for (element, sum) in row[..width].iter_mut().zip(sums) {
                *element = if add { *element + sum } else { *sum };
            }
        }
    }
}

simd_kernel! {
    fn store_bf16<S>(elements: &mut [bf16], stride: usize, sums: Block<'_>, add: bool) {
        let Block { rows, width } = sums;
        for (row, sums) in elements.chunks_mut(stride).zip(rows) {
            for (element, sum) in row[..width].iter_mut().zip(sums) {
                let old = if add { element.to_f32() } else { 0.0 };
                *element = bf16::from_f32(old + sum);
            }
        }
    }
}

thread_local! {
    /// Packed panels of B, on the thread that starts a matmul.
    static PACKED_B: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    /// Packed panels of a task's rows of A.
    static PACKED_A: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// The kernel for a matmul of `[m, k]` and `[k, n]` bf16 matrices; `None` if f32 is faster.
pub(crate) fn kernel_for([m, n, k]: [usize; 3]) -> Option<Kernel> {
    let is_small = m.saturating_mul(n).saturating_mul(k) <= SMALL_MATMUL;
    if is_small { None } else { Kernel::detect() }
}

/// Computes `c = a·b`, or `c += a·b` with `add`. `b` is given transposed.
///
/// # Shapes
/// `a: [m, k], b: [n, k], c: [m, n]` row-major without gaps
///
/// # Panics
/// If the shapes do not match.
pub(crate) fn multiply<C: Stored>(
    kernel: Kernel,
    a: MatmulOperand<'_, bf16>,
    b: MatmulOperand<'_, bf16>,
    c: &mut [C],
    add: bool,
) {
    assert_eq!((a.k, a.rows * b.rows), (b.k, c.len()));
    if c.is_empty() {
        return;
    }
    let k_per_sum = if C::ADDS_EXACTLY { K_PER_SUM } else { a.k.max(1) };
    for first in (0..a.k.max(1)).step_by(k_per_sum) {
        let (a, b) = (a.k_range(first, k_per_sum), b.k_range(first, k_per_sum));
        with_words(&PACKED_B, panels_of(b.rows) * b.panel_words(), |packed| {
            b.pack_in_parallel(Order::RowsOfPair, packed);
            let b = PackedRight { panels: packed, columns: b.rows };
            c.par_chunks_mut(ROWS_PER_TASK * b.columns).enumerate().for_each(|(task, c)| {
                multiply_rows(kernel, &a, task * ROWS_PER_TASK, b, c, add || first > 0);
            });
        });
    }
}

/// The right operand of a matmul, packed.
#[derive(Clone, Copy)]
struct PackedRight<'a> {
    panels: &'a [u32],
    columns: usize,
}

/// Computes some rows of the destination, from `first_row` on.
fn multiply_rows<C: Stored>(
    kernel: Kernel,
    a: &MatmulOperand<'_, bf16>,
    first_row: usize,
    b: PackedRight<'_>,
    c: &mut [C],
    add: bool,
) {
    let columns = b.columns;
    let rows = c.len() / columns;
    multiply_packed(kernel, a, first_row..first_row + rows, b, |row, column, sums| {
        C::store(&mut c[row * columns + column..], columns, sums, add);
    });
}

/// Calls `store(row, column, sums)` with each block of `a·b` and its position. Runs on the calling thread
/// only. `b` is given transposed.
///
/// # Shapes
/// `a: [m, k], b: [n, k]`
///
/// # Panics
/// If the shapes do not match.
pub(crate) fn multiply_on_caller(
    kernel: Kernel,
    a: &MatmulOperand<'_, bf16>,
    b: &MatmulOperand<'_, bf16>,
    store: impl FnMut(usize, usize, Block<'_>),
) {
    assert_eq!(a.k, b.k);
    with_words(&PACKED_B, panels_of(b.rows) * b.panel_words(), |packed| {
        b.pack(0, Order::RowsOfPair, packed);
        multiply_packed(kernel, a, 0..a.rows, PackedRight { panels: packed, columns: b.rows }, store);
    });
}

/// As [`multiply_on_caller`], for some rows of `a`, numbered from 0 in `store`.
fn multiply_packed(
    kernel: Kernel,
    a: &MatmulOperand<'_, bf16>,
    rows: Range<usize>,
    b: PackedRight<'_>,
    mut store: impl FnMut(usize, usize, Block<'_>),
) {
    let panel_words = a.panel_words();
    with_words(&PACKED_A, panels_of(rows.len()) * panel_words, |packed_a| {
        a.pack(rows.start / TILE_ROWS, Order::PairsOfRow, packed_a);
        let packed_a = &*packed_a;
        let mut sums = Sums([[0.0; BLOCK]; BLOCK]);
        kernel.ready(|| {
            for column in (0..b.columns).step_by(BLOCK) {
                let b_panels = two_panels(b.panels, column / TILE_ROWS, panel_words);
                let width = BLOCK.min(b.columns - column);
                for row in (0..rows.len()).step_by(BLOCK) {
                    kernel.block(two_panels(packed_a, row / TILE_ROWS, panel_words), b_panels, &mut sums);
                    store(row, column, Block { rows: &sums.0[..BLOCK.min(rows.len() - row)], width });
                }
            }
        });
    });
}

/// Bytes of the panels that a thread retains after a matmul of sizes `[m, n, k]` on its own.
pub(crate) fn packed_bytes([m, n, k]: [usize; 3]) -> usize {
    (panels_of(m) + panels_of(n)) * panel_words(k) * size_of::<u32>()
}

/// Bytes of the panels that `threads` threads retain after [`multiply`].
pub(crate) fn packed_bytes_of_threads([m, n, k]: [usize; 3], adds_exactly: bool, threads: usize) -> usize {
    let k = if adds_exactly { k.min(K_PER_SUM) } else { k };
    let task = packed_bytes([m.min(ROWS_PER_TASK), 0, k]);
    threads * task + packed_bytes([0, n, k])
}

/// Number of panels for so many rows, rounded up to even.
fn panels_of(rows: usize) -> usize {
    rows.div_ceil(BLOCK) * 2
}

fn two_panels(packed: &[u32], first: usize, panel_words: usize) -> [&[u32]; 2] {
    [first, first + 1].map(|panel| &packed[panel * panel_words..][..panel_words])
}

/// Calls `work` with so many words of the thread's buffer, content undefined. The buffer is taken out of its
/// cell, because the thread may steal other work meanwhile.
fn with_words<R>(
    cell: &'static std::thread::LocalKey<RefCell<Vec<u32>>>,
    len: usize,
    work: impl FnOnce(&mut [u32]) -> R,
) -> R {
    let mut words = cell.take();
    if words.len() < len {
        drop(words);
        words = vec![0; len];
    }
    // NaN in both halves, so that a read before a write shows.
    #[cfg(test)]
    words.fill(0x7fc0_7fc0);
    let result = work(&mut words[..len]);
    cell.set(words);
    result
}
