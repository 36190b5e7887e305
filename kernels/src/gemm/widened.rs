//! Matmuls of matrices of any element type in f32, without f32 copies of whole matrices.
//!
//! A task copies its operands into the cache as f32, block by block, and rounds the final sums once. So a
//! matmul of 16-bit matrices moves half the bytes of an f32 one, and takes about as long. The order of
//! summation does not depend on the number of threads and tasks.

use super::operand::MatmulOperand;
use super::transposed::transpose_rows;
use super::unpacked::{self, Matmul};
use crate::cast::Float;
use crate::scratch::{Scratch, total, with_scratch};
use crate::simd::simd_kernel;
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Part of k that is copied and summed at a time: a block of `b` then stays in the first-level cache.
const BLOCK_K: usize = 128;
/// Columns of `b` that are copied together.
const BLOCK_COLUMNS: usize = 64;
/// The rows of a task are a multiple of this, as of the heights of the matmul's tiles.
const ROW_STEP: usize = 24;
/// Maximum number of rows per task.
const MAX_ROWS: usize = 44 * ROW_STEP;
/// Maximum number of columns per task.
const MAX_COLUMNS: usize = 16 * BLOCK_COLUMNS;
/// Maximum number of sums per task; they pass through the second-level cache once per [`BLOCK_K`].
const MAX_SUMS: usize = MAX_ROWS * MAX_COLUMNS / 2;
/// Multiply-adds in the time that copying one element takes.
const COPY_COST: usize = 24;
/// Number of splits that are compared, from the fewest on.
const MAX_SPLITS: usize = 16;

thread_local! {
    static SCRATCH: Scratch = const { Scratch::new(Vec::new()) };
}

/// Computes `c = a·b`, or `c += a·b` with `add`. `b` is given transposed.
///
/// # Shapes
/// `a: [m, k], b: [n, k], c: [m, n]` row-major without gaps
///
/// # Panics
/// If the shapes do not match.
pub(crate) fn multiply<A: Float, B: Float, C: Float>(
    a: MatmulOperand<'_, A>,
    b: MatmulOperand<'_, B>,
    c: &mut [C],
    add: bool,
) {
    assert_eq!((a.k, a.rows.checked_mul(b.rows)), (b.k, Some(c.len())));
    let sizes = [a.rows, b.rows];
    let tasks = tasks_of(sizes, task_sizes(sizes, rayon::current_num_threads()));
    let c = Destination { elements: c.as_mut_ptr(), columns: b.rows, _borrowed: PhantomData };
    tasks.into_par_iter().for_each(|task| task.run(&a, &b, &c, add));
}

/// Bytes that `threads` threads retain after matmuls of up to these sizes `[m, n, k]`.
pub(crate) fn scratch_bytes(sizes: [usize; 3], threads: usize) -> usize {
    threads * total(lengths(sizes)) * size_of::<f32>()
}

/// Lengths of a task's buffers: sums, rows of `a`, columns of `b`.
fn lengths([m, n, k]: [usize; 3]) -> [usize; 3] {
    let k = k.min(BLOCK_K);
    [m.saturating_mul(n).min(MAX_SUMS), m.min(MAX_ROWS) * k, k * BLOCK_COLUMNS]
}

/// Rows and columns of a task that minimize the finishing time: few tasks copy little, many tasks balance
/// well.
fn task_sizes([m, n]: [usize; 2], threads: usize) -> [usize; 2] {
    let pieces = |whole: usize, most: usize| {
        let fewest = whole.div_ceil(most).max(1);
        fewest..fewest + threads.clamp(2, MAX_SPLITS)
    };
    let splits =
        pieces(m, MAX_ROWS).flat_map(|down| pieces(n, MAX_COLUMNS).map(move |across| [down, across]));
    let of_split = |[down, across]: [usize; 2]| {
        let rows = m.div_ceil(down).next_multiple_of(ROW_STEP).max(ROW_STEP);
        let columns = n.div_ceil(across).next_multiple_of(BLOCK_COLUMNS).max(BLOCK_COLUMNS);
        let cost_of_task = rows * columns + COPY_COST * (rows + columns);
        ([rows, columns], (down * across).div_ceil(threads) * cost_of_task)
    };
    let fitting = splits.map(of_split).filter(|([rows, columns], _)| rows * columns <= MAX_SUMS);
    fitting.min_by_key(|(_, cost)| *cost).map_or([MAX_ROWS / 2, MAX_COLUMNS], |(sizes, _)| sizes)
}

fn tasks_of([m, n]: [usize; 2], [rows, columns]: [usize; 2]) -> Vec<Task> {
    let pieces =
        |whole: usize, step: usize| (0..whole).step_by(step).map(move |start| start..whole.min(start + step));
    let rows = pieces(m, rows);
    rows.flat_map(|rows| pieces(n, columns).map(move |columns| Task { rows: rows.clone(), columns }))
        .collect()
}

/// A rectangle of the destination.
struct Task {
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Task {
    fn run<A: Float, B: Float, C: Float>(
        &self,
        a: &MatmulOperand<'_, A>,
        b: &MatmulOperand<'_, B>,
        c: &Destination<'_, C>,
        add: bool,
    ) {
        let (rows, columns) = (self.rows.len(), self.columns.len());
        let lengths = lengths([a.rows, b.rows, a.k]);
        let (a, b) = (a.row_range(self.rows.start, rows), b.row_range(self.columns.start, columns));
        with_scratch(&SCRATCH, lengths, |[sums, of_a, of_b]| {
            let sums = &mut sums[..rows * columns];
            for first in (0..a.k.max(1)).step_by(BLOCK_K) {
                let (a, b) = (a.k_range(first, BLOCK_K), b.k_range(first, BLOCK_K));
                let left = LeftPanel::of(&a, of_a);
                for column in (0..columns).step_by(BLOCK_COLUMNS) {
                    let b = b.row_range(column, BLOCK_COLUMNS);
                    copy_transposed(&b, of_b);
                    left.multiply(of_b, [rows, b.rows], &mut sums[column..], columns, first > 0);
                }
            }
            for (row, sums) in sums.chunks_exact(columns).enumerate() {
                // SAFETY: the rows and columns lie in `c`, whose length `multiply` has checked, and no other
                // task has them.
                store(sums, unsafe { c.row(self.rows.start + row, &self.columns) }, add);
            }
        });
    }
}

/// A block of a left operand in f32.
struct LeftPanel<'a> {
    elements: &'a [f32],
    k: usize,
    strides: [usize; 2],
}

impl<'a> LeftPanel<'a> {
    /// Copies `a` to `buffer`.
    fn of<A: Float>(a: &MatmulOperand<'_, A>, buffer: &'a mut [f32]) -> Self {
        let MatmulOperand { data, rows, k, row_stride, k_stride } = *a;
        let strides = if k_stride == 1 {
            A::widen_rows(data, row_stride, buffer, k, [rows, k]);
            [k, 1]
        } else {
            A::widen_rows(data, k_stride, buffer, rows, [k, rows]);
            [1, rows]
        };
        Self { elements: buffer, k, strides }
    }

    /// Writes or adds the product with `right`, whose rows are [`BLOCK_COLUMNS`] apart.
    fn multiply(&self, right: &[f32], [rows, cols]: [usize; 2], sums: &mut [f32], stride: usize, add: bool) {
        let [row_stride, k_stride] = self.strides;
        assert!(
            rows == 0 || self.k == 0 || {
                let last = (rows - 1) * row_stride + (self.k - 1) * k_stride;
                last < self.elements.len() && right.len() >= (self.k - 1) * BLOCK_COLUMNS + cols
            }
        );
        assert!(rows == 0 || sums.len() >= (rows - 1) * stride + cols);
        let matmul = Matmul {
            rows,
            cols,
            terms: self.k,
            dst: sums.as_mut_ptr(),
            dst_stride: stride,
            lhs: self.elements.as_ptr(),
            lhs_strides: self.strides,
            rhs: right.as_ptr(),
            rhs_stride: BLOCK_COLUMNS,
            factor: 1.0,
            add,
        };
        // SAFETY: the last elements of all three are in bounds, as just checked, and `sums` is borrowed for
        // writing.
        unsafe { unpacked::multiply(matmul) }
    }
}

/// Copies the transpose `[k, rows]` of `b` in f32, with rows [`BLOCK_COLUMNS`] apart.
fn copy_transposed<B: Float>(b: &MatmulOperand<'_, B>, target: &mut [f32]) {
    let MatmulOperand { data, rows, k, row_stride, k_stride } = *b;
    if row_stride == 1 {
        B::widen_rows(data, k_stride, target, BLOCK_COLUMNS, [k, rows]);
    } else {
        transpose_rows(data, row_stride, target, BLOCK_COLUMNS, [rows, k]);
    }
}

/// Rounds `sums` to `elements`, after adding the old elements if requested.
fn store<C: Float>(sums: &[f32], elements: &mut [C], add: bool) {
    if !add {
        return C::round(sums, elements);
    }
    if let Some(elements) = C::as_f32_mut(elements) {
        return add_to(elements, sums);
    }
    let mut values = [0.0; MAX_COLUMNS];
    let values = &mut values[..elements.len()];
    C::widen(elements, values);
    add_to(values, sums);
    C::round(values, elements);
}

simd_kernel! {
    fn add_to<S>(values: &mut [f32], sums: &[f32]) {
        for (value, sum) in values.iter_mut().zip(sums) {
            *value += *sum;
        }
    }
}

/// A matrix in which each task writes its own rectangle.
struct Destination<'a, C> {
    elements: *mut C,
    columns: usize,
    _borrowed: PhantomData<&'a mut [C]>,
}

// SAFETY: elements are accessed only through `row`, whose callers guarantee that they do not overlap.
unsafe impl<C: Send> Sync for Destination<'_, C> {}

impl<C> Destination<'_, C> {
    /// # Safety
    /// The row and the columns exist, and no other code accesses these elements while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the callers' rectangles are disjoint")]
    unsafe fn row(&self, row: usize, columns: &Range<usize>) -> &mut [C] {
        // SAFETY: by this function's contract.
        unsafe {
            let start = self.elements.add(row * self.columns + columns.start);
            std::slice::from_raw_parts_mut(start, columns.len())
        }
    }
}

#[cfg(test)]
mod tests;
