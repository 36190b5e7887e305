//! Copies between strided blocks of slices.

use super::StridedBlock;
use crate::element::{Arithmetic, Number};
use rayon::prelude::*;

/// Copies smaller than this stay on one thread.
const PARALLEL_MIN_BYTES: usize = 512 << 10;
/// Approximate size of one task of a parallel copy.
const TASK_BYTES: usize = 128 << 10;

/// Copies (or adds) block `from` of `source` to block `to` of `target`, which has the same `batch`, `rows`
/// and `run`.
///
/// The op has checked that both blocks lie within their slices and that `to` does not overlap itself.
pub(super) fn copy_block<T: Arithmetic>(
    source: &[T],
    from: &StridedBlock,
    target: &mut [T],
    to: &StridedBlock,
    accumulate: bool,
) {
    if to.batch * to.rows * to.run == 0 {
        return;
    }
    let (batch, rows, run) = coalesce(from, to);
    for b in 0..batch {
        let source = &source[from.offset + b * from.batch_stride..];
        let target = &mut target[to.offset + b * to.batch_stride..];
        // After merging rows, the strides no longer apply.
        let (from_stride, to_stride) = if rows == 1 { (run, run) } else { (from.row_stride, to.row_stride) };
        copy_rows(source, from_stride, target, to_stride, rows, run, accumulate);
    }
}

/// Merges rows, then batches, that are contiguous on both sides.
fn coalesce(from: &StridedBlock, to: &StridedBlock) -> (usize, usize, usize) {
    let (mut batch, mut rows, mut run) = (to.batch, to.rows, to.run);
    if from.row_stride == run && to.row_stride == run {
        run *= rows;
        rows = 1;
    }
    if rows == 1 && from.batch_stride == run && to.batch_stride == run {
        run *= batch;
        batch = 1;
    }
    (batch, rows, run)
}

fn copy_rows<T: Arithmetic>(
    source: &[T],
    from_stride: usize,
    target: &mut [T],
    to_stride: usize,
    rows: usize,
    run: usize,
    accumulate: bool,
) {
    let target = &mut target[..(rows - 1) * to_stride + run];
    let bytes = rows * run * size_of::<T>();
    if bytes < PARALLEL_MIN_BYTES || rayon::current_num_threads() == 1 {
        for row in 0..rows {
            let to = row * to_stride;
            copy_run(&source[row * from_stride..][..run], &mut target[to..to + run], accumulate);
        }
    } else if rows == 1 {
        let chunk = TASK_BYTES / size_of::<T>();
        let pieces = target.par_chunks_mut(chunk).zip(source[..run].par_chunks(chunk));
        pieces.for_each(|(to, from)| copy_run(from, to, accumulate));
    } else {
        let rows_per_task = (TASK_BYTES / (run * size_of::<T>())).max(1);
        target.par_chunks_mut(rows_per_task * to_stride).enumerate().for_each(|(task, target)| {
            for (row, to) in target.chunks_mut(to_stride).enumerate() {
                let from = (task * rows_per_task + row) * from_stride;
                copy_run(&source[from..from + run], &mut to[..run], accumulate);
            }
        });
    }
}

fn copy_run<T: Arithmetic>(source: &[T], target: &mut [T], accumulate: bool) {
    if accumulate {
        for (to, &from) in target.iter_mut().zip(source) {
            *to = T::narrow(to.widen().plus(from.widen()));
        }
    } else {
        target.copy_from_slice(source);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strided_copy::reference::for_each_element;

    fn block(offset: usize, batch: (usize, usize), rows: (usize, usize), run: usize) -> StridedBlock {
        let ((batch, batch_stride), (rows, row_stride)) = (batch, rows);
        StridedBlock { tensor: 0, offset, batch, batch_stride, rows, row_stride, run }
    }

    fn copy_slowly(source: &[u32], from: &StridedBlock, target: &mut [u32], to: &StridedBlock) {
        for_each_element(from, to, |from, to| target[to] = source[from]);
    }

    #[test]
    fn copies_agree_with_the_definition_whatever_the_strides() {
        let source: Vec<u32> = (0..400).collect();
        let layouts = [(0, (3, 12), (4, 3)), (5, (3, 40), (4, 7)), (2, (3, 3), (4, 9)), (1, (3, 12), (4, 3))];
        for (from_offset, from_batch, from_rows) in layouts {
            for (to_offset, to_batch, to_rows) in layouts {
                let from = block(from_offset, from_batch, from_rows, 3);
                let to = block(to_offset, to_batch, to_rows, 3);
                let (mut fast, mut slow) = (vec![999; 400], vec![999; 400]);
                copy_block(&source, &from, &mut fast, &to, false);
                copy_slowly(&source, &from, &mut slow, &to);
                assert_eq!(fast, slow, "{from:?} -> {to:?}");
            }
        }
    }

    #[test]
    fn large_copies_on_several_threads_agree_with_the_definition() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let source: Vec<u32> = (0..600_000).collect();
        let strided = block(3, (2, 300_000), (500, 590), 411);
        let packed = strided.packed_at(7);
        for (from, to) in [(&strided, &packed), (&packed, &strided), (&packed, &packed)] {
            let (mut fast, mut slow) = (vec![0; 600_000], vec![0; 600_000]);
            pool.install(|| copy_block(&source, from, &mut fast, to, false));
            copy_slowly(&source, from, &mut slow, to);
            assert!(fast == slow, "{from:?} -> {to:?}");
        }
    }

    #[test]
    fn accumulating_adds_to_what_is_there() {
        let from = block(0, (1, 0), (2, 2), 2);
        let mut target = [10_u8, 20, 30, 40, 50];
        copy_block(&[1, 2, 3, 4], &from, &mut target, &block(0, (1, 0), (2, 3), 2), true);
        assert_eq!(target, [11, 22, 30, 43, 54]);
    }
}
