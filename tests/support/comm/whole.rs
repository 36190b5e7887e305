//! Every operation once, in a group of any size, for machines with few GPUs.

use super::{Backend, code, tensor, values, zeros};
use std::sync::Arc;
use ulysses::comm::{Call, ProcessGroup, ProcessGroupExt, RecvBlock, ReduceOp, StridedBlock, StridedPlan};

/// Elements per pair of ranks.
const COUNT: usize = 1_003;

pub(crate) fn sums_gathers_and_broadcasts(backend: &dyn Backend, ranks: usize) {
    backend.run(ranks, |group| {
        let rank = group.rank();
        let ranks_sum = |i: usize| (0..ranks).map(|rank| code::<f32>(rank, i)).sum::<f32>();
        let all = tensor(COUNT, |i| code::<f32>(rank, i));
        group.all_reduce(&all, ReduceOp::Sum)?;
        assert!(values::<f32>(&all).into_iter().eq((0..COUNT).map(ranks_sum)));

        let (input, chunk) = (tensor(ranks * COUNT, |i| code::<f32>(rank, i)), zeros::<f32>(COUNT));
        group.reduce_scatter(&input, &chunk, ReduceOp::Sum)?;
        assert!(values::<f32>(&chunk).into_iter().eq((rank * COUNT..(rank + 1) * COUNT).map(ranks_sum)));

        let flat = zeros::<i64>(ranks * COUNT);
        group.all_gather(&tensor(COUNT, |i| code::<i64>(rank, i)), &flat)?;
        let expected = (0..ranks).flat_map(|rank| (0..COUNT).map(move |i| code::<i64>(rank, i)));
        assert!(values::<i64>(&flat).into_iter().eq(expected));

        let last = tensor(COUNT, |i| code::<u8>(rank, i));
        group.broadcast(&last, ranks - 1)?;
        assert!(values::<u8>(&last).into_iter().eq((0..COUNT).map(|i| code::<u8>(ranks - 1, i))));
        let reduced = tensor(COUNT, |i| code::<f32>(rank, i));
        group.reduce(&reduced, ReduceOp::Sum, ranks - 1)?;
        let expected = |i| if rank == ranks - 1 { ranks_sum(i) } else { code::<f32>(rank, i) };
        assert!(values::<f32>(&reduced).into_iter().eq((0..COUNT).map(expected)));
        let whole = (rank == 0).then(|| zeros::<i64>(ranks * COUNT));
        group.gather(&tensor(COUNT, |i| code::<i64>(rank, i)), whole.as_ref(), 0)?;
        let own = zeros::<i64>(COUNT);
        group.scatter(whole.as_ref(), &own, 0)?;
        assert!(values::<i64>(&own).into_iter().eq((0..COUNT).map(|i| code::<i64>(rank, i))));
        let mean = group.all_reduce_values(&[2.0 * rank as f32, 1.0], ReduceOp::Average)?;
        assert_eq!(mean, [(ranks - 1) as f32, 1.0]);
        let product = group.all_reduce_values(&[1 + rank as i64], ReduceOp::Product)?;
        assert_eq!(product, [(1..=ranks as i64).product::<i64>()]);

        let largest = group.all_reduce_values(&[rank as f64, -(rank as f64)], ReduceOp::Max)?;
        assert_eq!(largest, [(ranks - 1) as f64, 0.0]);
        group.barrier()
    });
}

pub(crate) fn exchanges_messages_and_sub_groups(backend: &dyn Backend, ranks: usize) {
    backend.run(ranks, |group| {
        let rank = group.rank();
        // Rank i sends i + 2j + 1 elements to rank j.
        let count = |src: usize, dst: usize| src + 2 * dst + 1;
        let send: Vec<usize> = (0..ranks).map(|dst| count(rank, dst)).collect();
        let recv: Vec<usize> = (0..ranks).map(|src| count(src, rank)).collect();
        let output = zeros::<f32>(recv.iter().sum());
        group.all_to_all(&tensor(send.iter().sum(), |i| code::<f32>(rank, i)), &output, &send, &recv)?;
        let from = |src: usize| {
            let before: usize = (0..rank).map(|dst| count(src, dst)).sum();
            (0..count(src, rank)).map(move |i| code::<f32>(src, before + i))
        };
        assert!(values::<f32>(&output).into_iter().eq((0..ranks).flat_map(from)));

        // Two rows of three elements to each peer, which adds them to ones.
        let block = |peer: usize| StridedBlock {
            tensor: 0,
            offset: 3 * peer,
            batch: 1,
            batch_stride: 0,
            rows: 2,
            row_stride: 3 * ranks,
            run: 3,
        };
        let plan = StridedPlan {
            send: (0..ranks).map(|peer| vec![block(peer)]).collect(),
            recv: (0..ranks).map(|peer| vec![RecvBlock { block: block(peer), accumulate: true }]).collect(),
        };
        let output = tensor(6 * ranks, |_| 1.0f32);
        let input = tensor(6 * ranks, |i| (100 * rank + i) as f32);
        group.all_to_all_strided(&[input], std::slice::from_ref(&output), &Arc::new(plan))?;
        let place = |i: usize| {
            let (row, column) = (i / (3 * ranks), i % (3 * ranks));
            (1 + 100 * (column / 3) + row * 3 * ranks + 3 * rank + column % 3) as f32
        };
        assert!(values::<f32>(&output).into_iter().eq((0..6 * ranks).map(place)));

        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let (sent, received) = (tensor(COUNT, |i| code::<u32>(rank, i)), zeros::<u32>(COUNT));
        let (sending, receiving) = (group.start_send(&sent, next)?, group.start_recv(&received, previous)?);
        receiving.wait()?;
        sending.wait()?;
        assert!(values::<u32>(&received).into_iter().eq((0..COUNT).map(|i| code::<u32>(previous, i))));
        let back = zeros::<u32>(COUNT);
        let batch = [Call::send(&received, previous), Call::recv(&back, next)];
        let pending = group.start_messages(&batch)?;
        super::pending::poll_to_the_end(&pending);
        pending.wait()?;
        assert_eq!(values::<u32>(&back), values::<u32>(&sent));

        let Some(half) = group.split("half", Some(rank % 2), ranks - rank)? else { panic!("has a color") };
        let members: Vec<usize> = (0..ranks).rev().filter(|other| other % 2 == rank % 2).collect();
        assert_eq!(half.global_ranks(), members);
        assert_eq!(
            half.all_gather_values(&[rank as u32])?,
            members.iter().map(|&r| r as u32).collect::<Vec<_>>()
        );
        Ok(())
    });
}
