//! Divides the rows of elementwise kernels among the threads of the current rayon pool.
//!
//! Kernels always use rayon's `par_chunks`; a single chunk runs on the calling thread without the pool. So
//! the chunk size is the only decision.

/// A block of fewer elements (128 KiB) is not worth waking a thread.
pub(super) const MIN_BLOCK_ELEMS: usize = 32 * 1024;

/// More blocks than threads, so that one slow thread does not delay the others.
const BLOCKS_PER_THREAD: usize = 4;

/// Number of the `rows`, of `row_elems` elements each, per task.
pub(super) fn rows_per_block(rows: usize, row_elems: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads <= 1 {
        return rows.max(1);
    }
    let smallest = MIN_BLOCK_ELEMS.div_ceil(row_elems.max(1));
    rows.div_ceil(threads * BLOCKS_PER_THREAD).max(smallest)
}
