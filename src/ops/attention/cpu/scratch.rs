//! Working memory that each thread keeps between calls.

use std::cell::RefCell;

/// Elements in a cache line, to which the memory is aligned.
const ALIGNMENT: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with `N` buffers of the given lengths, each aligned to a cache line, contents undefined.
///
/// `work` must not come back here on the same thread, so it must not wait for the thread pool.
pub(super) fn with_scratch<const N: usize, R>(
    lengths: [usize; N],
    work: impl FnOnce([&mut [f32]; N]) -> R,
) -> R {
    let lengths = lengths.map(|length| length.next_multiple_of(ALIGNMENT));
    let total = lengths.iter().sum::<usize>() + ALIGNMENT;
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < total {
            *scratch = vec![0.0; total];
        }
        let offset = scratch.as_ptr().align_offset(ALIGNMENT * size_of::<f32>());
        let mut rest = &mut scratch[offset..];
        work(lengths.map(|length| rest.split_off_mut(..length).unwrap_or_default()))
    })
}
