//! The reduction on slices.

use super::ReduceOp;
use crate::element::{Arithmetic, Number};
use rayon::prelude::*;

/// Elements reduced at a time: the running sums stay in the first-level cache while the ranks' elements
/// stream through, so memory is read and written once.
const BLOCK: usize = 4096;
/// Blocks in one task of a parallel reduction.
const TASK: usize = 16 * BLOCK;

/// Reduces elements `begin..begin + target.len()` of all sources into `target`.
///
/// Each element is `((x₀ ∘ x₁) ∘ x₂) …`, computed in [`Arithmetic::Wide`] and rounded once, for any division
/// of the range.
pub(super) fn reduce<T: Arithmetic>(op: ReduceOp, sources: &[&[T]], begin: usize, target: &mut [T]) {
    match op {
        ReduceOp::Sum => reduce_with(sources, begin, target, |a, b| a.plus(b)),
        // A NaN on either side wins, so that it cannot hide.
        ReduceOp::Max => reduce_with(sources, begin, target, |a, b| if a > b || a.is_nan() { a } else { b }),
        ReduceOp::Min => reduce_with(sources, begin, target, |a, b| if a < b || a.is_nan() { a } else { b }),
    }
}

fn reduce_with<T: Arithmetic>(
    sources: &[&[T]],
    begin: usize,
    target: &mut [T],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy + Sync,
) {
    if target.len() <= TASK || rayon::current_num_threads() == 1 {
        return reduce_blocks(sources, begin, target, combine);
    }
    let tasks = target.par_chunks_mut(TASK).enumerate();
    tasks.for_each(|(task, target)| reduce_blocks(sources, begin + task * TASK, target, combine));
}

fn reduce_blocks<T: Arithmetic>(
    sources: &[&[T]],
    begin: usize,
    target: &mut [T],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
) {
    let [first, between @ .., last] = sources else {
        // At most one source.
        return sources.iter().for_each(|only| target.copy_from_slice(&only[begin..begin + target.len()]));
    };
    let mut sums: Vec<T::Wide> = Vec::with_capacity(BLOCK.min(target.len()));
    for (index, target) in target.chunks_mut(BLOCK).enumerate() {
        let block = begin + index * BLOCK..begin + index * BLOCK + target.len();
        sums.clear();
        sums.extend(first[block.clone()].iter().map(|&x| x.widen()));
        for source in between {
            for (sum, &x) in sums.iter_mut().zip(&source[block.clone()]) {
                *sum = combine(*sum, x.widen());
            }
        }
        for ((to, &sum), &x) in target.iter_mut().zip(&sums).zip(&last[block]) {
            *to = T::narrow(combine(sum, x.widen()));
        }
    }
}
