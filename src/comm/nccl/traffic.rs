//! Bytes that an operation moves between one rank and the others.

use crate::comm::{CallSignature, GroupStats, OpStats, Traffic};
use candle_core::DType;

/// Counts a call of a rank. Groups of one rank count nothing.
pub(super) fn count(stats: &mut GroupStats, call: &CallSignature, dtype: DType, rank: usize, ranks: usize) {
    if ranks > 1 {
        stats.add(call.op(), moved(call, dtype, rank, ranks));
    }
}

/// Returns one call with the bytes that it moves, counted as in NCCL's bandwidth figures: over a ring of `ranks`, each rank
/// passes `(ranks − 1) / ranks` of the bytes in either direction, twice for an all_reduce. A reduce is counted as if every
/// rank sent its elements to the root.
fn moved(call: &CallSignature, dtype: DType, rank: usize, ranks: usize) -> OpStats {
    match call {
        CallSignature::AllReduce { elements, .. } => {
            let bytes = (2 * (ranks - 1) * elements.count * dtype.size_in_bytes() / ranks) as u64;
            OpStats { calls: 1, bytes_sent: bytes, bytes_received: bytes }
        }
        CallSignature::Reduce { elements, root, .. } => {
            let gathered = CallSignature::Gather { chunk: *elements, root: *root };
            Traffic::new(&gathered, rank, ranks).stats(dtype)
        }
        _ => Traffic::new(call, rank, ranks).stats(dtype),
    }
}

/// Returns the offset of each rank's part, for counts in rank order.
pub(super) fn offsets(counts: &[usize]) -> Vec<usize> {
    let mut next = 0;
    let begin = |count: &usize| {
        next += count;
        next - count
    };
    counts.iter().map(begin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{CollectiveOp, Elements, ReduceOp};

    #[test]
    fn each_operation_counts_bytes_sent_and_received() {
        let moved = |call: CallSignature, dtype, rank, ranks| {
            let OpStats { bytes_sent, bytes_received, .. } = moved(&call, dtype, rank, ranks);
            (bytes_sent, bytes_received)
        };
        let (op, dtype) = (ReduceOp::Sum, DType::F32);
        let elements = |count| Elements { dtype, count };
        let whole = |count| CallSignature::AllReduce { op, elements: elements(count) };
        assert_eq!(moved(whole(12_000), dtype, 0, 4), (72_000, 72_000));
        assert_eq!(moved(whole(1), dtype, 0, 3), (5, 5), "a ring, however few the elements");
        let chunk = elements(3000);
        assert_eq!(moved(CallSignature::ReduceScatter { op, chunk }, dtype, 0, 4), (36_000, 36_000));
        assert_eq!(moved(CallSignature::AllGather { chunk }, dtype, 0, 4), (36_000, 36_000));
        for count in [5, 5000] {
            let (elements, bytes) = (Elements { dtype: DType::U8, count }, count as u64);
            let broadcast = |rank| moved(CallSignature::Broadcast { elements, root: 1 }, DType::U8, rank, 3);
            assert_eq!([broadcast(1), broadcast(0)], [(2 * bytes, 0), (0, bytes)]);
            let reduce = |rank| moved(CallSignature::Reduce { op, elements, root: 1 }, DType::U8, rank, 3);
            assert_eq!([reduce(1), reduce(0)], [(0, 2 * bytes), (bytes, 0)]);
        }
        let (send, recv) = ([7, 1, 2].into(), [7, 3, 0].into());
        let exchange = CallSignature::AllToAll { dtype: DType::I64, send, recv };
        assert_eq!(moved(exchange, DType::I64, 0, 3), (24, 24));
    }

    #[test]
    fn counters_add_up_and_a_group_of_one_counts_nothing() {
        let mut stats = GroupStats::default();
        let elements = Elements { dtype: DType::U8, count: 5 };
        let broadcast = CallSignature::Broadcast { elements, root: 0 };
        (0..2).for_each(|_| count(&mut stats, &broadcast, DType::U8, 0, 3));
        let expected = OpStats { calls: 2, bytes_sent: 20, bytes_received: 0 };
        assert_eq!(stats.get(CollectiveOp::Broadcast), expected);
        count(&mut stats, &broadcast, DType::U8, 0, 1);
        assert_eq!(stats.total(), expected);
    }

    #[test]
    fn offsets_are_running_sums() {
        assert_eq!(offsets(&[3, 0, 5, 1]), [0, 3, 3, 8]);
    }
}
