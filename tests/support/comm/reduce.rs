//! all_reduce and reduce_scatter.

use super::{Backend, Value, code, for_each_dtype, irregular, tensor, values, zeros};
use half::{bf16, f16};
use ulysses::comm::{CollectiveOp, ProcessGroupExt, ReduceOp};

/// Sizes below and above the switch to two phases, with uneven chunks, several blocks and several tasks.
const COUNTS: [usize; 7] = [0, 1, 5, 4096, 4097, 10_001, 200_003];

pub(crate) fn all_reduce_sums_every_dtype_at_every_size(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for (world_size, count) in [1, 2, 3, 4, 8].into_iter().flat_map(|n| COUNTS.map(|count| (n, count))) {
            let sums = backend.run(world_size, |group| {
                let tensor = tensor(count, |i| code::<T>(group.rank(), i));
                group.all_reduce(&tensor, ReduceOp::Sum)?;
                Ok(values::<T>(&tensor))
            });
            let ranks: usize = (0..world_size).map(|rank| rank * 5).sum();
            let expected: Vec<T> =
                (0..count).map(|i| T::from_f64((ranks + world_size * (i % 11)) as f64)).collect();
            for (rank, sum) in sums.iter().enumerate() {
                assert!(*sum == expected, "{:?} × {count} on rank {rank} of {world_size}", T::DTYPE);
            }
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn all_reduce_finds_max_and_min(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for count in [3, 9_000] {
            // The rank of the largest element depends on the index.
            let element = |rank: usize, i: usize| T::from_f64(((rank + i) % 3 + 1) as f64);
            let results = backend.run(3, |group| {
                let (max, min) = (
                    tensor(count, |i| element(group.rank(), i)),
                    tensor(count, |i| element(group.rank(), i)),
                );
                group.all_reduce(&max, ReduceOp::Max)?;
                group.all_reduce(&min, ReduceOp::Min)?;
                Ok((values::<T>(&max), values::<T>(&min)))
            });
            for (max, min) in results {
                assert!(max.iter().all(|&x| x == T::from_f64(3.0)), "{:?}", T::DTYPE);
                assert!(min.iter().all(|&x| x == T::from_f64(1.0)), "{:?}", T::DTYPE);
            }
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn sums_run_in_rank_order_bit_for_bit_on_all_ranks_and_in_all_runs(backend: &dyn Backend) {
    for count in [1_000, 30_011] {
        let expected: Vec<u32> = (0..count)
            .map(|i| (1..4).fold(irregular(0, i), |sum, rank| sum + irregular(rank, i)).to_bits())
            .collect();
        for _ in 0..3 {
            let sums = backend.run(4, |group| {
                let tensor = tensor(count, |i| irregular(group.rank(), i));
                group.all_reduce(&tensor, ReduceOp::Sum)?;
                Ok(values::<f32>(&tensor))
            });
            for sum in sums {
                assert!(sum.iter().map(|x| x.to_bits()).eq(expected.iter().copied()), "{count} elements");
            }
        }
    }
}

pub(crate) fn sixteen_bit_sums_are_rounded_once(backend: &dyn Backend) {
    for count in [1, 5_000] {
        let sums = backend.run(4, |group| {
            let tensor = tensor(count, |_| bf16::from_f32(if group.rank() == 0 { 256.0 } else { 1.0 }));
            group.all_reduce(&tensor, ReduceOp::Sum)?;
            Ok(values::<bf16>(&tensor))
        });
        // 256 + 1 is 256 in bf16; 259 is between 258 and 260, and rounds to even.
        assert!(sums.iter().flatten().all(|&sum| sum == bf16::from_f32(260.0)));
    }
}

pub(crate) fn reduce_scatter_gives_the_chunks_of_all_reduce_bit_for_bit(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for (world_size, chunk) in [(1, 7), (2, 0), (2, 5), (3, 1), (3, 4_099), (4, 30_000)] {
            let count = world_size * chunk;
            backend.run(world_size, |group| {
                let element = |i| T::from_f64(f64::from(irregular(group.rank(), i)).abs() / 4.0);
                let (input, output, whole) =
                    (tensor(count, element), zeros::<T>(chunk), tensor(count, element));
                group.reduce_scatter(&input, &output, ReduceOp::Sum)?;
                group.all_reduce(&whole, ReduceOp::Sum)?;
                let whole = values::<T>(&whole);
                assert!(
                    values::<T>(&output) == whole[group.rank() * chunk..][..chunk],
                    "{:?} × {count}",
                    T::DTYPE
                );
                assert!(
                    values::<T>(&input).into_iter().eq((0..count).map(element)),
                    "the input was written to"
                );
                Ok(())
            });
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn sixteen_bit_elements_are_summed_into_f32_in_rank_order(backend: &dyn Backend) {
    fn case<T: Value + Into<f32>>(backend: &dyn Backend) {
        for (world_size, chunk) in [(1, 7), (2, 0), (3, 4_099), (4, 30_000)] {
            let element = |rank: usize, i: usize| T::from_f64(f64::from(irregular(rank, i)));
            let chunks = backend.run(world_size, |group| {
                let input = tensor(world_size * chunk, |i| element(group.rank(), i));
                let output = zeros::<f32>(chunk);
                group.reduce_scatter(&input, &output, ReduceOp::Sum)?;
                // A rank's bytes are counted when its peers read them.
                group.barrier()?;
                let sent = group.stats().get(CollectiveOp::ReduceScatter).bytes_sent;
                Ok((values::<f32>(&output), sent))
            });
            let sum = |i| (0..world_size).map(|rank| element(rank, i).into()).reduce(|sum: f32, x| sum + x);
            for (rank, (output, sent)) in chunks.into_iter().enumerate() {
                let expected = (0..chunk).map(|i| sum(rank * chunk + i).unwrap());
                let label = format!("{:?}, chunk {rank} of {world_size} × {chunk}", T::DTYPE);
                assert!(output.into_iter().map(f32::to_bits).eq(expected.map(f32::to_bits)), "{label}");
                assert_eq!(sent, ((world_size - 1) * chunk * 2) as u64, "{label}");
            }
        }
    }
    case::<bf16>(backend);
    case::<f16>(backend);
}

pub(crate) fn averages_and_products_are_those_of_all_ranks(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for (world_size, count) in [(1, 3), (2, 5), (4, 9_000)] {
            let results = backend.run(world_size, |group| {
                let rank = group.rank();
                let product = tensor(count, |i| T::from_f64(if i % 4 == rank { 3.0 } else { 2.0 }));
                group.all_reduce(&product, ReduceOp::Product)?;
                let average = tensor(count, |i| T::from_f64((4 * rank + i % 5) as f64));
                let refused = group.all_reduce(&average, ReduceOp::Average).is_err();
                assert_eq!(refused, !T::DTYPE.is_float(), "integers have no average");
                let chunk = zeros::<T>(count);
                if !refused {
                    let input = tensor(world_size * count, |i| T::from_f64((4 * rank + i / count) as f64));
                    group.reduce_scatter(&input, &chunk, ReduceOp::Average)?;
                }
                Ok(((values::<T>(&product), values::<T>(&average)), values::<T>(&chunk)))
            });
            let mean = (2 * (world_size - 1)) as f64;
            for (rank, ((product, average), chunk)) in results.into_iter().enumerate() {
                let twos = |i: usize| world_size - usize::from(i % 4 < world_size);
                let expected = |i| {
                    T::from_f64(
                        (2_usize.pow(twos(i) as u32) * if twos(i) < world_size { 3 } else { 1 }) as f64,
                    )
                };
                assert!(product.into_iter().eq((0..count).map(expected)), "{:?}", T::DTYPE);
                if T::DTYPE.is_float() {
                    assert!(average.into_iter().eq((0..count).map(|i| T::from_f64(mean + (i % 5) as f64))));
                    assert!(
                        chunk.into_iter().all(|x| x == T::from_f64(mean + rank as f64)),
                        "{:?}",
                        T::DTYPE
                    );
                }
            }
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn reduce_leaves_the_result_on_the_root_only(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for (world_size, count) in [(1, 4), (2, 0), (3, 7), (4, 10_001)] {
            for root in [0, world_size - 1] {
                backend.run(world_size, |group| {
                    let element = |i| code::<T>(group.rank(), i);
                    let reduced = tensor(count, element);
                    group.reduce(&reduced, ReduceOp::Sum, root)?;
                    let expected: Vec<T> = if group.rank() == root {
                        let ranks: usize = (0..world_size).map(|rank| rank * 5).sum();
                        (0..count).map(|i| T::from_f64((ranks + world_size * (i % 11)) as f64)).collect()
                    } else {
                        (0..count).map(element).collect()
                    };
                    assert!(values::<T>(&reduced) == expected, "{:?} × {count} to rank {root}", T::DTYPE);
                    Ok(())
                });
            }
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn the_result_of_reduce_is_bit_equal_to_that_of_all_reduce(backend: &dyn Backend) {
    for (count, op) in [(1_000, ReduceOp::Sum), (30_011, ReduceOp::Average), (30_011, ReduceOp::Max)] {
        backend.run(3, |group| {
            let of_rank = || tensor(count, |i| bf16::from_f32(irregular(group.rank(), i)));
            let (reduced, all_reduced) = (of_rank(), of_rank());
            group.reduce(&reduced, op, 1)?;
            group.all_reduce(&all_reduced, op)?;
            assert!(group.rank() != 1 || values::<bf16>(&reduced) == values::<bf16>(&all_reduced), "{op:?}");
            Ok(())
        });
    }
}

pub(crate) fn reduce_scatter_may_write_over_its_own_input(backend: &dyn Backend) {
    let results = backend.run(3, |group| {
        let flat = tensor(3_000, |i| code::<f32>(group.rank(), i));
        let output = flat.narrow(0, group.rank() * 1_000, 1_000)?;
        group.reduce_scatter(&flat, &output, ReduceOp::Sum)?;
        Ok(values::<f32>(&output))
    });
    for (rank, chunk) in results.into_iter().enumerate() {
        assert!((0..1_000).all(|i| chunk[i] == (15 + 3 * ((rank * 1_000 + i) % 11)) as f32));
    }
}
