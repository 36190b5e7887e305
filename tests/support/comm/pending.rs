//! Pending operations.

use super::{Backend, code, tensor, values, zeros};
use candle_core::Tensor;
use std::time::{Duration, Instant};
use ulysses::comm::{Call, CommError, Pending, ProcessGroupExt, ReduceOp};

/// Polls until the operation is complete; a broken backend must not hang.
pub(crate) fn poll_to_the_end(pending: &Pending) {
    let started = Instant::now();
    while !pending.is_completed() {
        assert!(started.elapsed() < Duration::from_secs(20), "polls do not complete the operation");
        std::thread::yield_now();
    }
}

pub(crate) fn polls_complete_operations(backend: &dyn Backend) {
    backend.run(3, |group| {
        let rank = group.rank();
        let (reduced, gathered) = (tensor(10_000, |i| code::<f32>(rank, i)), zeros::<u32>(6));
        let received = zeros::<f32>(500);
        let reducing = group.start_all_reduce(&reduced, ReduceOp::Sum)?;
        let own = tensor(2, |i| (10 * rank + i) as u32);
        let gathering = group.start_all_gather(&own, &gathered)?.then(|| Ok(()));
        let sent = tensor(500, |_| rank as f32);
        let messages = group
            .start_messages(&[Call::send(&sent, (rank + 1) % 3), Call::recv(&received, (rank + 2) % 3)])?;
        let all = [reducing, gathering, messages];
        all.iter().rev().for_each(poll_to_the_end);
        assert!(all.iter().all(Pending::is_completed), "stays complete");
        all.into_iter().try_for_each(Pending::wait)?;
        assert_eq!(values::<u32>(&gathered), [0, 1, 10, 11, 20, 21]);
        assert!(values::<f32>(&received).iter().all(|&x| x == ((rank + 2) % 3) as f32));
        assert!(
            values::<f32>(&reduced).into_iter().enumerate().all(|(i, x)| x == (15 + 3 * (i % 11)) as f32)
        );
        Ok(())
    });
}

pub(crate) fn an_operation_is_not_complete_before_all_ranks_have_joined(backend: &dyn Backend) {
    backend.run(2, |group| {
        let twin = group.split("twin", Some(0), group.rank())?.unwrap();
        let tensor = tensor(10_000, |_| 1.0_f32);
        if group.rank() == 1 {
            // Rank 0 reaches this barrier after its polls.
            group.barrier()?;
        }
        let pending = twin.start_all_reduce(&tensor, ReduceOp::Sum)?;
        if group.rank() == 0 {
            assert!((0..100).all(|_| !pending.is_completed()));
            group.barrier()?;
        }
        poll_to_the_end(&pending);
        pending.wait()?;
        assert!(values::<f32>(&tensor).iter().all(|&x| x == 2.0));
        Ok(())
    });
}

pub(crate) fn operations_can_be_waited_for_in_any_order(backend: &dyn Backend) {
    backend.run(3, |group| {
        let rank = group.rank();
        let reduced: Vec<_> = (0..4).map(|n| tensor(3_000 * n, |i| code::<f32>(rank, i + n))).collect();
        let gathered = zeros::<u32>(6);
        let mut pending = Vec::new();
        for tensor in &reduced[..2] {
            pending.push(group.start_all_reduce(tensor, ReduceOp::Sum)?);
        }
        pending.push(group.start_all_gather(&tensor(2, |i| (10 * rank + i) as u32), &gathered)?);
        for tensor in &reduced[2..] {
            pending.push(group.start_all_reduce(tensor, ReduceOp::Sum)?);
        }
        // A different order on every rank.
        pending.rotate_left(rank);
        pending.into_iter().rev().try_for_each(|pending| pending.wait())?;
        for (n, tensor) in reduced.iter().enumerate() {
            assert!(
                values::<f32>(tensor)
                    .into_iter()
                    .enumerate()
                    .all(|(i, x)| x == (15 + 3 * ((i + n) % 11)) as f32)
            );
        }
        assert_eq!(values::<u32>(&gathered), [0, 1, 10, 11, 20, 21]);
        Ok(())
    });
}

pub(crate) fn a_dropped_operation_still_completes(backend: &dyn Backend) {
    let sums = backend.run(3, |group| {
        let tensor = tensor(10_000, |i| code::<f32>(group.rank(), i));
        drop(group.start_all_reduce(&tensor, ReduceOp::Sum)?);
        Ok(values::<f32>(&tensor))
    });
    assert!(sums.iter().all(|sum| sum.iter().enumerate().all(|(i, &x)| x == (15 + 3 * (i % 11)) as f32)));
}

pub(crate) fn operations_of_two_groups_can_be_waited_for_in_opposite_orders(backend: &dyn Backend) {
    backend.run(2, |group| {
        let twin = group.split("twin", Some(0), group.rank())?.unwrap();
        for round in 0..50 {
            let rank = group.rank();
            let (a, b) = (tensor(5_000, |_| (rank + round) as f32), tensor(5_000, |_| (rank * round) as f32));
            let (first, second) = if rank == 0 {
                (group.start_all_reduce(&a, ReduceOp::Sum)?, twin.start_all_reduce(&b, ReduceOp::Sum)?)
            } else {
                let b = twin.start_all_reduce(&b, ReduceOp::Sum)?;
                (b, group.start_all_reduce(&a, ReduceOp::Sum)?)
            };
            first.wait()?;
            second.wait()?;
            assert!(values::<f32>(&a).iter().all(|&x| x == (1 + 2 * round) as f32));
            assert!(values::<f32>(&b).iter().all(|&x| x == round as f32));
        }
        Ok(())
    });
}

pub(crate) fn an_operation_goes_on_while_its_rank_waits_in_another_group(backend: &dyn Backend) {
    backend.run(2, |group| {
        let twin = group.split("twin", Some(0), group.rank())?.unwrap();
        let tensor = tensor(10_000, |_| 1.0_f32);
        let reducing = group.start_all_reduce(&tensor, ReduceOp::Sum)?;
        if group.rank() == 0 {
            // Rank 1 reaches this barrier only after rank 0 has done its part above.
            twin.barrier()?;
            reducing.wait()?;
        } else {
            reducing.wait()?;
            twin.barrier()?;
        }
        assert!(values::<f32>(&tensor).iter().all(|&x| x == 2.0));
        Ok(())
    });
}

pub(crate) fn inputs_may_be_overwritten_once_waited_for(backend: &dyn Backend) {
    backend.run(4, |group| {
        let (input, output) = (zeros::<f32>(20_000), zeros::<f32>(80_000));
        for round in 0..50 {
            let value = (round * 10 + group.rank()) as f32;
            input.slice_set(&tensor(20_000, |_| value), 0, 0)?;
            group.all_gather(&input, &output)?;
            input.slice_set(&tensor(20_000, |_| -1.0f32), 0, 0)?;
            let expected = |i: usize| (round * 10 + i / 20_000) as f32;
            assert!(
                values::<f32>(&output).into_iter().enumerate().all(|(i, x)| x == expected(i)),
                "round {round}"
            );
        }
        Ok(())
    });
}

pub(crate) fn operations_may_read_and_write_the_same_two_storages_crosswise(backend: &dyn Backend) {
    // One exchange goes from the left half of `x` to the right half of `y`, the next
    // from the left half of `y` to the right half of `x`. Two ranks in different exchanges would each lock the
    // storage that the other needs.
    const PART: usize = 20_000;
    backend.run(3, |group| {
        let (rank, ranks) = (group.rank(), group.world_size());
        let buffer = |base: usize| tensor(PART * (1 + ranks), |i| (base + rank * 10 + i % 7) as f32);
        let halves = |flat: &Tensor| {
            Ok::<_, CommError>((flat.narrow(0, 0, PART)?, flat.narrow(0, PART, PART * ranks)?))
        };
        for round in 0..100 {
            let (x, y) = (buffer(1_000 + round), buffer(2_000 + round));
            let ((x_left, x_right), (y_left, y_right)) = (halves(&x)?, halves(&y)?);
            let there = group.start_all_gather(&x_left, &y_right)?;
            let back = group.start_all_gather(&y_left, &x_right)?;
            there.wait()?;
            back.wait()?;
            let gathered = |base: usize| {
                move |(i, x): (usize, f32)| x == (base + round + i / PART * 10 + i % PART % 7) as f32
            };
            assert!(values::<f32>(&y_right).into_iter().enumerate().all(gathered(1_000)), "round {round}");
            assert!(values::<f32>(&x_right).into_iter().enumerate().all(gathered(2_000)), "round {round}");
        }
        Ok(())
    });
}
