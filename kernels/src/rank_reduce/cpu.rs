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
        ReduceOp::Sum => sum(sources, begin, target, T::narrow),
        // A NaN on either side wins, so that it cannot hide.
        ReduceOp::Max => {
            let max = |a: T::Wide, b| if a > b || a.is_nan() { a } else { b };
            reduce_with(sources, begin, target, max, T::narrow);
        }
        ReduceOp::Min => {
            let min = |a: T::Wide, b| if a < b || a.is_nan() { a } else { b };
            reduce_with(sources, begin, target, min, T::narrow);
        }
        ReduceOp::Average => {
            let ranks = sources.len();
            reduce_with(sources, begin, target, |a, b| a.plus(b), |sum| T::narrow(sum.over(ranks)));
        }
        ReduceOp::Product => reduce_with(sources, begin, target, |a, b| a.times(b), T::narrow),
    }
}

/// As [`reduce`], for a sum that `narrow` converts to the type of `target`.
pub(super) fn sum<T: Arithmetic, U: Copy + Send>(
    sources: &[&[T]],
    begin: usize,
    target: &mut [U],
    narrow: fn(T::Wide) -> U,
) {
    reduce_with(sources, begin, target, |a, b| a.plus(b), narrow);
}

fn reduce_with<T: Arithmetic, U: Copy + Send>(
    sources: &[&[T]],
    begin: usize,
    target: &mut [U],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy + Sync,
    narrow: impl Fn(T::Wide) -> U + Copy + Sync,
) {
    if target.len() <= TASK || rayon::current_num_threads() == 1 {
        return reduce_blocks(sources, begin, target, combine, narrow);
    }
    let tasks = target.par_chunks_mut(TASK).enumerate();
    tasks.for_each(|(task, target)| reduce_blocks(sources, begin + task * TASK, target, combine, narrow));
}

fn reduce_blocks<T: Arithmetic, U: Copy>(
    sources: &[&[T]],
    begin: usize,
    target: &mut [U],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
    narrow: impl Fn(T::Wide) -> U,
) {
    let [first, between @ .., last] = sources else {
        // At most one source.
        for (to, &x) in target.iter_mut().zip(sources.iter().flat_map(|only| &only[begin..])) {
            *to = narrow(x.widen());
        }
        return;
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
            *to = narrow(combine(sum, x.widen()));
        }
    }
}
