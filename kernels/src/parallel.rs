//! How elementwise kernels share rows among the threads of the current rayon pool.
//!
//! Kernels always go through rayon's `par_chunks`; a single chunk runs on the calling thread without
//! touching the pool, so choosing the chunk size is all the decision there is.

/// A block below this many elements (128 KiB) is not worth waking a thread for.
pub(super) const MIN_BLOCK_ELEMS: usize = 32 * 1024;

/// More blocks than threads, so that one late thread does not hold up the others.
const BLOCKS_PER_THREAD: usize = 4;

/// Rows of `row_elems` elements that one task should take out of `rows`.
pub(super) fn rows_per_block(rows: usize, row_elems: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads <= 1 {
        return rows.max(1);
    }
    let smallest = MIN_BLOCK_ELEMS.div_ceil(row_elems.max(1));
    rows.div_ceil(threads * BLOCKS_PER_THREAD).max(smallest)
}
