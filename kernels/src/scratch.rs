//! Working memory that a thread reuses between kernels.

use std::cell::RefCell;
use std::thread::LocalKey;

/// Elements in a cache line, to which the memory is aligned.
const ALIGNMENT: usize = 16;

/// Reallocated only if it is too small.
pub(super) type Scratch = RefCell<Vec<f32>>;

/// Total number of elements of buffers of the given lengths.
pub(super) fn total<const N: usize>(lengths: [usize; N]) -> usize {
    lengths.iter().map(|length| length.next_multiple_of(ALIGNMENT)).sum::<usize>() + ALIGNMENT
}

/// Calls `work` with `N` buffers of the given lengths, each aligned to a cache line, with unspecified
/// content.
///
/// `work` must not call this again on the same thread, so it must not wait for the thread pool.
pub(super) fn with_scratch<const N: usize, R>(
    scratch: &'static LocalKey<Scratch>,
    lengths: [usize; N],
    work: impl FnOnce([&mut [f32]; N]) -> R,
) -> R {
    let total = total(lengths);
    let lengths = lengths.map(|length| length.next_multiple_of(ALIGNMENT));
    scratch.with_borrow_mut(|scratch| {
        if scratch.len() < total {
            drop(std::mem::take(scratch));
            *scratch = vec![0.0; total];
        }
        // NaN as f32, and as each bf16 half of a word, so that a read before a write shows.
        #[cfg(test)]
        scratch.fill(f32::from_bits(0x7fc0_7fc0));
        let offset = scratch.as_ptr().align_offset(ALIGNMENT * size_of::<f32>());
        let mut rest = &mut scratch[offset..];
        work(lengths.map(|length| rest.split_off_mut(..length).unwrap_or_default()))
    })
}
