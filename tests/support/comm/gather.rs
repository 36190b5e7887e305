//! all_gather, broadcast, and their variants for plain values.

use super::{Backend, Value, code, for_each_dtype, tensor, values, zeros};
use ulysses::comm::{Disagreement, ProcessGroupExt, ReduceOp};

pub(crate) fn all_gather_concatenates_in_rank_order(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for (world_size, count) in [(1, 3), (2, 0), (2, 1), (3, 7), (4, 40_001), (8, 5)] {
            let gathered = backend.run(world_size, |group| {
                let output = zeros::<T>(count * group.world_size());
                group.all_gather(&tensor(count, |i| code::<T>(group.rank(), i)), &output)?;
                Ok(values::<T>(&output))
            });
            let expected: Vec<T> =
                (0..world_size).flat_map(|rank| (0..count).map(move |i| code::<T>(rank, i))).collect();
            assert!(
                gathered.iter().all(|values| *values == expected),
                "{:?} {world_size} × {count}",
                T::DTYPE
            );
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn all_gather_of_a_part_of_its_own_output_works_in_place(backend: &dyn Backend) {
    // As in ZeRO, each rank's input is its partition of the output buffer.
    for _ in 0..20 {
        let gathered = backend.run(4, |group| {
            let own = group.rank() * 500..(group.rank() + 1) * 500;
            let flat = tensor(2_000, |i| if own.contains(&i) { i as f32 } else { -1.0 });
            group.all_gather(&flat.narrow(0, own.start, 500)?, &flat)?;
            Ok(values::<f32>(&flat))
        });
        assert!(gathered.iter().all(|flat| flat.iter().enumerate().all(|(i, &x)| x == i as f32)));
    }
}

pub(crate) fn broadcast_reaches_all_ranks_from_every_root(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for (world_size, count) in [(1, 2), (2, 0), (3, 9), (4, 10_000)] {
            let results = backend.run(world_size, |group| {
                let from_root = |root| {
                    let tensor = tensor(count, |i| code::<T>(group.rank(), i));
                    group.broadcast(&tensor, root)?;
                    Ok(values::<T>(&tensor))
                };
                (0..world_size).map(from_root).collect::<Result<Vec<_>, _>>()
            });
            for (root, tensor) in results.iter().flat_map(|tensors| tensors.iter().enumerate()) {
                assert!(tensor.iter().copied().eq((0..count).map(|i| code::<T>(root, i))), "{:?}", T::DTYPE);
            }
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn gather_collects_at_any_root_and_scatter_distributes(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for (world_size, count) in [(1, 3), (2, 0), (3, 7), (4, 10_000)] {
            backend.run(world_size, |group| {
                let rank = group.rank();
                for root in 0..world_size {
                    let gathered = (rank == root).then(|| zeros::<T>(world_size * count));
                    group.gather(&tensor(count, |i| code::<T>(rank, i + root)), gathered.as_ref(), root)?;
                    let scattered = zeros::<T>(count);
                    group.scatter(gathered.as_ref(), &scattered, root)?;
                    assert!(
                        values::<T>(&scattered).into_iter().eq((0..count).map(|i| code::<T>(rank, i + root)))
                    );
                    if let Some(gathered) = gathered {
                        let of_ranks =
                            (0..world_size).flat_map(|r| (0..count).map(move |i| code::<T>(r, i + root)));
                        assert!(values::<T>(&gathered).into_iter().eq(of_ranks), "{:?} at {root}", T::DTYPE);
                    }
                }
                Ok(())
            });
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn gather_and_scatter_may_use_a_part_of_the_roots_tensor(backend: &dyn Backend) {
    backend.run(3, |group| {
        let rank = group.rank();
        let flat = tensor(300, |i| if i / 100 == rank { i as f32 } else { -1.0 });
        let own = flat.narrow(0, rank * 100, 100)?;
        group.gather(&own, (rank == 2).then_some(&flat), 2)?;
        assert!(rank != 2 || values::<f32>(&flat).into_iter().eq((0..300).map(|i| i as f32)));
        // The root's chunk is a part of its input.
        group.scatter((rank == 2).then_some(&flat), &own, 2)?;
        assert!(values::<f32>(&own).into_iter().eq((rank * 100..(rank + 1) * 100).map(|i| i as f32)));
        Ok(())
    });
}

pub(crate) fn values_are_reduced_and_gathered(backend: &dyn Backend) {
    backend.run(3, |group| {
        let rank = group.rank() as i64;
        assert_eq!(group.all_reduce_values(&[rank, 10 * rank], ReduceOp::Sum)?, [3, 30]);
        assert_eq!(group.all_reduce_values(&[rank as f64], ReduceOp::Max)?, [2.0]);
        assert_eq!(group.all_gather_values(&[rank, -rank])?, [0, 0, 1, -1, 2, -2]);
        assert!(group.all_gather_values::<u8>(&[])?.is_empty());
        Ok(())
    });
}

pub(crate) fn varied_lengths_are_gathered_including_none(backend: &dyn Backend) {
    backend.run(4, |group| {
        // Rank r contributes r values, so rank 0 contributes none.
        let own: Vec<u32> = (0..group.rank() as u32).map(|i| 10 * group.rank() as u32 + i).collect();
        assert_eq!(group.all_gather_varied(&own)?, [vec![], vec![10], vec![20, 21], vec![30, 31, 32]]);
        assert_eq!(group.all_gather_varied::<u8>(&[])?, vec![Vec::<u8>::new(); 4]);
        Ok(())
    });
}

pub(crate) fn the_first_different_rank_is_found_with_its_value(backend: &dyn Backend) {
    backend.run(3, |group| {
        let rank = group.rank();
        assert_eq!(group.find_disagreement(&[7, u64::MAX])?, None);
        assert_eq!(group.find_disagreement(&[])?, None);
        assert_eq!(
            group.find_disagreement(&[7, if rank == 1 { 0 } else { u64::MAX }])?,
            Some(Disagreement { rank: 1, index: 1 })
        );
        // Ranks are global.
        let pair = group.split("pair", (rank > 0).then_some(0), rank)?;
        let told = pair.map(|pair| pair.find_disagreement(&[rank as u64])).transpose()?;
        assert_eq!(told, (rank > 0).then_some(Some(Disagreement { rank: 2, index: 0 })));
        Ok(())
    });
}
