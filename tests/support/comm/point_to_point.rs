//! send and recv.

use super::{Backend, Value, code, for_each_dtype, tensor, values, zeros};
use ulysses::comm::{Call, CommError, ProcessGroupExt, ReduceOp};

pub(crate) fn a_ring_passes_tensors_on(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        for (world_size, count) in [(1, 4), (2, 0), (2, 9), (3, 5_000), (4, 1)] {
            backend.run(world_size, |group| {
                let rank = group.rank();
                let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
                let received = zeros::<T>(count);
                let sending = group.start_send(&tensor(count, |i| code::<T>(rank, i)), next)?;
                group.recv(&received, previous)?;
                sending.wait()?;
                assert!(values::<T>(&received).into_iter().eq((0..count).map(|i| code::<T>(previous, i))));
                Ok(())
            });
        }
    }
    for_each_dtype!(case(backend));
}

pub(crate) fn messages_between_a_pair_keep_their_order(backend: &dyn Backend) {
    backend.run(2, |group| {
        let other = 1 - group.rank();
        let sends: Vec<_> = (0..10)
            .map(|n| group.start_send(&tensor(n, |i| (100 * n + i) as u32), other))
            .collect::<Result<_, _>>()?;
        for n in 0..10 {
            let received = zeros::<u32>(n);
            group.recv(&received, other)?;
            assert!(values::<u32>(&received).into_iter().eq((0..n).map(|i| (100 * n + i) as u32)));
        }
        // Waiting in reverse order of issue is allowed.
        sends.into_iter().rev().try_for_each(|send| send.wait())
    });
}

pub(crate) fn messages_started_together_keep_their_order(backend: &dyn Backend) {
    backend.run(2, |group| {
        let other = 1 - group.rank();
        let sent = |n: usize| tensor(n, |i| (100 * n + i) as u32);
        let sends: Vec<_> = (0..10).map(|n| group.start_send(&sent(n), other)).collect::<Result<_, _>>()?;
        let received: Vec<_> = (0..10).map(zeros::<u32>).collect();
        let receives = received.iter().map(|tensor| group.start_recv(tensor, other));
        let receives: Vec<_> = receives.collect::<Result<_, _>>()?;
        sends.into_iter().chain(receives).rev().try_for_each(|pending| pending.wait())?;
        for (n, tensor) in received.iter().enumerate() {
            assert_eq!(values::<u32>(tensor), values::<u32>(&sent(n)));
        }
        Ok(())
    });
}

/// The receiver has it before it takes part in the collective.
pub(crate) fn a_message_goes_out_before_a_later_collective(backend: &dyn Backend) {
    backend.run(2, |group| {
        let (message, received) = (tensor(9, |i| i as f32), zeros::<f32>(9));
        let sending = (group.rank() == 0).then(|| group.start_send(&message, 1)).transpose()?;
        if group.rank() == 1 {
            group.recv(&received, 0)?;
            assert_eq!(values::<f32>(&received), values::<f32>(&message));
        }
        assert_eq!(group.all_reduce_values(&[1.0], ReduceOp::Sum)?, [2.0]);
        sending.map_or(Ok(()), |sending| sending.wait())
    });
}

pub(crate) fn a_batch_of_messages_goes_around_rings_in_both_directions(backend: &dyn Backend) {
    // Above and below the sizes that libraries buffer.
    for (world_size, count) in [(1, 4), (2, 0), (2, 9), (3, 300_000), (4, 1)] {
        backend.run(world_size, |group| {
            let rank = group.rank();
            let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
            let sent = [0, 1].map(|way| tensor(count, |i| (10 * (2 * rank + way) + i % 7) as f32));
            let received = [0, 1].map(|_| zeros::<f32>(count));
            let send = |way: usize, dst| Call::send(&sent[way], dst);
            let recv = |way: usize, src| Call::recv(&received[way], src);
            // Sends first on some ranks, receives first on others; of two messages between a pair, order matters.
            let mut batch = vec![send(0, next), send(1, previous), recv(0, previous), recv(1, next)];
            batch.rotate_left(if rank % 2 == 0 { 0 } else { 2 });
            let pending = group.start_messages(&batch)?;
            // Other operations may come in between.
            let sum = group.all_reduce_values(&[rank as f32], ReduceOp::Sum)?;
            assert_eq!(sum, [(0..world_size).sum::<usize>() as f32]);
            pending.wait()?;
            for (way, from) in [previous, next].into_iter().enumerate() {
                let expected = (0..count).map(|i| (10 * (2 * from + way) + i % 7) as f32);
                assert!(
                    values::<f32>(&received[way]).into_iter().eq(expected),
                    "{world_size} × {count}, {way}"
                );
            }
            Ok(())
        });
    }
}

pub(crate) fn a_batch_with_a_wrong_message_starts_none_and_leaves_the_group_usable(backend: &dyn Backend) {
    backend.run(2, |group| {
        let (other, one) = (1 - group.rank(), tensor(1, |_| group.rank() as f32));
        let refused = [
            group.start_messages(&[Call::send(&one, other), Call::recv(&one, 2)]),
            group.start_messages(&[Call::send(&one, other), Call::barrier()]),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(CommError::InvalidArgument { .. })), "{refused:?}");
        }
        group.start_messages(&[])?.wait()?;
        // A message that had been started would arrive first.
        let (two, received) = (tensor(1, |_| 10.0 + group.rank() as f32), zeros::<f32>(1));
        let batch = [Call::recv(&received, other), Call::send(&two, other)];
        group.start_messages(&batch)?.wait()?;
        assert_eq!(values::<f32>(&received), [10.0 + other as f32]);
        Ok(())
    });
}

pub(crate) fn pairs_do_not_wait_for_each_other(backend: &dyn Backend) {
    // Rank 0 expects rank 1's message first, which rank 1 sends only once rank 2 was
    // served by rank 0; and a collective runs between.
    backend.run(3, |group| {
        let buffer = || tensor(3, |i| (group.rank() * 10 + i) as f32);
        match group.rank() {
            0 => {
                let (from_1, from_2) = (buffer(), buffer());
                let first = group.start_recv(&from_1, 1)?;
                let second = group.start_recv(&from_2, 2)?;
                second.wait()?;
                group.barrier()?;
                first.wait()?;
                assert_eq!(
                    (values::<f32>(&from_1), values::<f32>(&from_2)),
                    (vec![10., 11., 12.], vec![20., 21., 22.])
                );
            }
            1 => {
                group.barrier()?;
                group.send(&buffer(), 0)?;
            }
            _ => {
                group.send(&buffer(), 0)?;
                group.barrier()?;
            }
        }
        Ok(())
    });
}
