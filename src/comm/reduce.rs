//! Reductions over the ranks' tensors, always in rank order.

use super::dtype::{Arithmetic, Number};
use super::{CommError, ReduceOp};
use rayon::prelude::*;

/// Elements reduced at a time: the running sums stay in the first-level cache while
/// the ranks' elements stream past, so memory is read and written once.
const BLOCK: usize = 4096;
/// Blocks in one task of a parallel reduction.
const TASK: usize = 16 * BLOCK;

/// Gives access to the ranks' elements: `read(rank, begin, len, use)` calls `use`
/// with elements `begin..begin + len` of that rank. Access is asked for block by
/// block, so that no rank's tensor stays locked.
pub(super) trait Sources<T>: Sync {
    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Calls `visit` with part of a rank's elements.
    fn read(&self, rank: usize, begin: usize, visit: &mut dyn FnMut(&[T])) -> Result<(), CommError>;
}

/// Reduces elements `begin..begin + target.len()` of all ranks into `target`.
///
/// Each element is `((x₀ ∘ x₁) ∘ x₂) …` in rank order, computed in
/// [`Arithmetic::Wide`] and rounded once: independent of how the range is divided.
pub(super) fn reduce_into<T: Arithmetic>(
    op: ReduceOp,
    sources: &dyn Sources<T>,
    begin: usize,
    target: &mut [T],
) -> Result<(), CommError> {
    match op {
        ReduceOp::Sum => reduce_with(sources, begin, target, |a, b| a.plus(b)),
        // A NaN on either side wins, so that it cannot hide.
        ReduceOp::Max => reduce_with(sources, begin, target, |a, b| if a > b || a.is_nan() { a } else { b }),
        ReduceOp::Min => reduce_with(sources, begin, target, |a, b| if a < b || a.is_nan() { a } else { b }),
    }
}

fn reduce_with<T: Arithmetic>(
    sources: &dyn Sources<T>,
    begin: usize,
    target: &mut [T],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy + Sync,
) -> Result<(), CommError> {
    if target.len() <= TASK || rayon::current_num_threads() == 1 {
        return reduce_blocks(sources, begin, target, combine);
    }
    let tasks = target.par_chunks_mut(TASK).enumerate();
    tasks.try_for_each(|(task, target)| reduce_blocks(sources, begin + task * TASK, target, combine))
}

fn reduce_blocks<T: Arithmetic>(
    sources: &dyn Sources<T>,
    begin: usize,
    target: &mut [T],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
) -> Result<(), CommError> {
    let last = sources.ranks() - 1;
    let mut sums: Vec<T::Wide> = Vec::with_capacity(BLOCK.min(target.len()));
    for (index, target) in target.chunks_mut(BLOCK).enumerate() {
        let begin = begin + index * BLOCK;
        let len = target.len();
        if last == 0 {
            sources.read(0, begin, &mut |from| target.copy_from_slice(&from[..len]))?;
            continue;
        }
        sources.read(0, begin, &mut |from| {
            sums.clear();
            sums.extend(from[..len].iter().map(|&x| x.widen()));
        })?;
        for rank in 1..last {
            sources.read(rank, begin, &mut |from| {
                for (sum, &x) in sums.iter_mut().zip(&from[..len]) {
                    *sum = combine(*sum, x.widen());
                }
            })?;
        }
        sources.read(last, begin, &mut |from| {
            for ((to, &sum), &x) in target.iter_mut().zip(&sums).zip(&from[..len]) {
                *to = T::narrow(combine(sum, x.widen()));
            }
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    struct Slices<T>(Vec<Vec<T>>);

    impl<T: Sync> Sources<T> for Slices<T> {
        fn ranks(&self) -> usize {
            self.0.len()
        }

        fn read(&self, rank: usize, begin: usize, visit: &mut dyn FnMut(&[T])) -> Result<(), CommError> {
            visit(&self.0[rank][begin..]);
            Ok(())
        }
    }

    fn reduce<T: Arithmetic>(op: ReduceOp, ranks: &[&[T]]) -> Vec<T> {
        let mut target = ranks[0].to_vec();
        reduce_into(op, &Slices(ranks.iter().map(|r| r.to_vec()).collect()), 0, &mut target).unwrap();
        target
    }

    #[test]
    fn sums_run_in_rank_order() {
        // (1e8 + 1) - 1e8 loses the 1 in f32; (1e8 - 1e8) + 1 keeps it.
        assert_eq!(reduce(ReduceOp::Sum, &[&[1e8_f32], &[1.0], &[-1e8]]), [0.0]);
        assert_eq!(reduce(ReduceOp::Sum, &[&[1e8_f32], &[-1e8], &[1.0]]), [1.0]);
    }

    #[test]
    fn sixteen_bit_floats_are_rounded_once() {
        // In bf16 256 + 1 rounds back to 256, so adding step by step would stay there.
        let one = [bf16::ONE];
        let sum = reduce(ReduceOp::Sum, &[&[bf16::from_f32(256.0)], &one, &one, &one, &one]);
        assert_eq!(sum, [bf16::from_f32(260.0)]);
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(reduce(ReduceOp::Sum, &[&[250_u8], &[10]]), [4]);
    }

    #[test]
    fn a_nan_survives_max_and_min_from_any_rank() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            for place in 0..3 {
                let ranks: Vec<[f32; 1]> =
                    (0..3).map(|r| [if r == place { f32::NAN } else { r as f32 }]).collect();
                let ranks: Vec<&[f32]> = ranks.iter().map(|r| &r[..]).collect();
                assert!(reduce(op, &ranks)[0].is_nan(), "{op:?} with NaN on rank {place}");
            }
        }
    }

    #[test]
    fn parts_and_threads_do_not_change_the_result() {
        let len = 3 * TASK + 17;
        let sources = Slices(
            (0..3).map(|r| (0..len).map(|i| ((i * 7 + r) as f32).sin()).collect()).collect::<Vec<Vec<f32>>>(),
        );
        let mut whole = vec![0.0; len];
        reduce_into(ReduceOp::Sum, &sources, 0, &mut whole).unwrap();
        let mut part = vec![0.0; len - 1000];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        pool.install(|| reduce_into(ReduceOp::Sum, &sources, 1000, &mut part)).unwrap();
        assert_eq!(whole[1000..], part);
        let expected = (sources.0[0][5] + sources.0[1][5]) + sources.0[2][5];
        assert_eq!(whole[5], expected);
    }
}
