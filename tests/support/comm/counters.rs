//! Byte counters, compared with literals.

use super::{Backend, tensor, zeros};
use std::sync::Arc;
use ulysses::comm::{
    CollectiveOp, CommError, OpStats, ProcessGroup, ProcessGroupExt, RecvBlock, ReduceOp, StridedBlock,
    StridedPlan,
};

fn stats(calls: u64, bytes_sent: u64, bytes_received: u64) -> OpStats {
    OpStats { calls, bytes_sent, bytes_received }
}

/// Runs `work` on every rank and returns the counters of `op`.
fn count(
    backend: &dyn Backend,
    world_size: usize,
    op: CollectiveOp,
    work: impl Fn(&dyn ProcessGroup) -> Result<(), CommError> + Sync,
) -> Vec<OpStats> {
    backend.run(world_size, |group| {
        work(&*group)?;
        let stats = group.stats();
        assert_eq!(stats.total(), stats.get(op), "nothing else was counted: {stats:?}");
        Ok(stats.get(op))
    })
}

pub(crate) fn collectives_count_the_bytes_that_crossed_ranks(backend: &dyn Backend) {
    let counted = count(backend, 4, CollectiveOp::AllGather, |group| {
        group.all_gather(&tensor(10, |i| i as f32), &zeros::<f32>(40))
    });
    assert_eq!(counted, [stats(1, 120, 120); 4], "3 peers × 10 × 4 bytes");

    let counted = count(backend, 4, CollectiveOp::ReduceScatter, |group| {
        group.reduce_scatter(&tensor(40, |i| i as f64), &zeros::<f64>(10), ReduceOp::Sum)
    });
    assert_eq!(counted, [stats(1, 240, 240); 4], "3 peers × 10 × 8 bytes");

    let counted = count(backend, 3, CollectiveOp::Broadcast, |group| {
        group.broadcast(&tensor(5, |i| i as u8), 1)?;
        group.broadcast(&tensor(5, |i| i as u8), 1)
    });
    assert_eq!(counted, [stats(2, 0, 10), stats(2, 20, 0), stats(2, 0, 10)]);

    let counted = count(backend, 3, CollectiveOp::Barrier, |group| group.barrier());
    assert_eq!(counted, [stats(1, 0, 0); 3]);
}

pub(crate) fn all_reduce_counts_its_real_traffic_small_and_large(backend: &dyn Backend) {
    // Direct algorithm: every rank reads 2 × 300 bytes (16-bit elements).
    let small = count(backend, 3, CollectiveOp::AllReduce, |group| {
        group.all_reduce(&tensor(150, |_| half::bf16::ONE), ReduceOp::Sum)
    });
    assert_eq!(small, [stats(1, 600, 600); 3]);
    // Two-phase algorithm: 2 · (n − 1)/n of 48,000 bytes.
    let large = count(backend, 4, CollectiveOp::AllReduce, |group| {
        group.all_reduce(&tensor(12_000, |_| 1.0_f32), ReduceOp::Sum)
    });
    assert_eq!(large, [stats(1, 72_000, 72_000); 4]);
}

pub(crate) fn all_to_all_counts_uneven_traffic_without_a_ranks_own_part(backend: &dyn Backend) {
    // Rank 0 keeps 7 and sends 1 and 2, rank 1 sends 3 to rank 0, rank 2 nothing.
    let matrix = [[7, 1, 2], [3, 0, 0], [0, 0, 4]];
    let counted = count(backend, 3, CollectiveOp::AllToAll, |group| {
        let (send, recv) = (matrix[group.rank()], matrix.map(|row| row[group.rank()]));
        let (input, output) = (tensor(send.iter().sum(), |i| i as i64), zeros::<i64>(recv.iter().sum()));
        group.all_to_all(&input, &output, &send, &recv)
    });
    assert_eq!(counted, [stats(1, 24, 24), stats(1, 24, 8), stats(1, 0, 16)]);
}

pub(crate) fn operations_with_a_root_count_its_traffic(backend: &dyn Backend) {
    let small = count(backend, 3, CollectiveOp::Reduce, |group| {
        group.reduce(&tensor(100, |i| i as f32), ReduceOp::Sum, 1)
    });
    assert_eq!(small, [stats(1, 400, 0), stats(1, 0, 800), stats(1, 400, 0)]);
    // Two phases: chunks of 3000 of 12,000 elements, then the reduced ones to the root.
    let large = count(backend, 4, CollectiveOp::Reduce, |group| {
        group.reduce(&tensor(12_000, |_| 1.0_f32), ReduceOp::Sum, 0)
    });
    let other = stats(1, 48_000, 36_000);
    assert_eq!(large, [stats(1, 36_000, 72_000), other, other, other]);
    let gathered = count(backend, 3, CollectiveOp::Gather, |group| {
        let output = (group.rank() == 2).then(|| zeros::<f64>(15));
        group.gather(&tensor(5, |i| i as f64), output.as_ref(), 2)
    });
    assert_eq!(gathered, [stats(1, 40, 0), stats(1, 40, 0), stats(1, 0, 80)]);
    let scattered = count(backend, 3, CollectiveOp::Scatter, |group| {
        let input = (group.rank() == 0).then(|| tensor(15, |i| i as u32));
        group.scatter(input.as_ref(), &zeros::<u32>(5), 0)?;
        // A rank's bytes are counted when its peers read them.
        Ok(())
    });
    assert_eq!(scattered, [stats(1, 40, 0), stats(1, 0, 20), stats(1, 0, 20)]);
}

pub(crate) fn messages_are_counted_on_both_sides(backend: &dyn Backend) {
    let counted = backend.run(2, |group| {
        if group.rank() == 0 {
            group.send(&tensor(9, |i| i as u32), 1)?;
        } else {
            group.recv(&zeros::<u32>(9), 0)?;
        }
        Ok((group.stats().get(CollectiveOp::Send), group.stats().get(CollectiveOp::Recv)))
    });
    assert_eq!(counted, [(stats(1, 36, 0), stats(0, 0, 0)), (stats(0, 0, 0), stats(1, 0, 36))]);
}

pub(crate) fn strided_exchange_counts_what_it_moves(backend: &dyn Backend) {
    // Two rows of three elements to each peer. The bytes are the same whether the backend copies strided blocks
    // or packs them for an all_to_all.
    let totals = backend.run(3, |group| {
        let block = |offset| StridedBlock {
            tensor: 0,
            offset,
            batch: 1,
            batch_stride: 0,
            rows: 2,
            row_stride: 9,
            run: 3,
        };
        let plan = StridedPlan {
            send: (0..3).map(|peer| vec![block(3 * peer)]).collect(),
            recv: (0..3).map(|peer| vec![RecvBlock { block: block(3 * peer), accumulate: false }]).collect(),
        };
        group.all_to_all_strided(&[tensor(18, |i| i as f32)], &[zeros::<f32>(18)], &Arc::new(plan))?;
        Ok(group.stats().total())
    });
    assert_eq!(totals, [stats(1, 48, 48); 3]);
}
