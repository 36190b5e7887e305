//! The errors of all ranks when one rank fails.

use super::{Backend, Group, tensor, zeros};
use candle_core::Tensor;
use std::sync::Arc;
use std::time::{Duration, Instant};
use ulysses::comm::{
    CollectiveOp, CommError, LaunchError, Pending, ProcessGroupExt, RecvBlock, ReduceOp, StridedBlock,
    StridedPlan,
};

const TIMEOUT: Duration = Duration::from_millis(1_500);

/// Runs `work`, which must fail within `within`. Returns the error of the launch and of each rank (`None` for a
/// rank that panicked or succeeded).
fn fail(
    backend: &dyn Backend,
    world_size: usize,
    within: Duration,
    work: impl Fn(&Group) -> Result<(), CommError> + Sync,
) -> (LaunchError, Vec<Option<CommError>>) {
    let started = Instant::now();
    let failed = backend.fail_for(world_size, TIMEOUT, &work);
    let took = started.elapsed();
    assert!(took < within, "took {took:?}");
    failed
}

fn all_reduce(count: usize, group: &Group) -> Result<(), CommError> {
    let tensor = tensor(count, |i| i as f32);
    group.all_reduce(&tensor, ReduceOp::Sum)?;
    received(&tensor, group)
}

/// Reads a result. On a GPU, an operation may fail after `wait` has returned.
fn received(tensor: &Tensor, group: &Group) -> Result<(), CommError> {
    super::values::<f32>(tensor);
    group.check()
}

pub(crate) fn a_panic_reaches_the_others_at_once(backend: &dyn Backend) {
    let (launched, errors) = fail(backend, 3, TIMEOUT, |group| {
        all_reduce(10, group)?;
        assert!(group.rank() != 1, "out of cheese");
        all_reduce(10, group)
    });
    assert!(
        matches!(&launched, LaunchError::Panicked { rank: 1, message } if message.contains("out of cheese"))
    );
    for rank in [0, 2] {
        let error = errors[rank].as_ref().unwrap();
        assert!(
            matches!(error, CommError::PeerFailed { rank: 1, reason } if reason.contains("out of cheese")),
            "{error}"
        );
    }
}

pub(crate) fn a_panic_with_an_operation_under_way_reaches_the_others_at_once(backend: &dyn Backend) {
    // After the longer delay, its peers have read its tensors: on a GPU, their kernels may still be reading when it frees them.
    for delay in [0, 20].map(Duration::from_millis) {
        let (launched, errors) = fail(backend, 3, TIMEOUT, |group| {
            let (reduced, message) = (tensor(9_000, |i| i as f32), tensor(9_000, |i| i as f32));
            let reducing = group.start_all_reduce(&reduced, ReduceOp::Sum)?;
            let messaging = match group.rank() {
                2 => vec![group.start_send(&message, 0)?, group.start_send(&message, 1)?],
                _ => vec![group.start_recv(&message, 2)?],
            };
            if group.rank() == 2 {
                std::thread::sleep(delay);
                panic!("mid-flight");
            }
            Pending::all(messaging).wait()?;
            reducing.wait()?;
            received(&reduced, group)?;
            // A backend that moves data in the background may have completed the operations.
            group.barrier()
        });
        assert!(matches!(launched, LaunchError::Panicked { rank: 2, .. }), "{launched}");
        for error in errors[..2].iter().flatten() {
            assert!(matches!(error, CommError::PeerFailed { rank: 2, .. }), "{error}");
        }
        assert!(errors[0].is_some() && errors[1].is_some());
    }
}

pub(crate) fn an_error_reaches_all_ranks_at_once_and_is_the_error_of_the_launch(backend: &dyn Backend) {
    let own = CommError::Tensor("disk full".into());
    let (launched, errors) =
        fail(backend, 4, TIMEOUT, |group| if group.rank() == 3 { Err(own.clone()) } else { group.barrier() });
    assert_eq!((launched.rank(), launched.comm_error()), (Some(3), Some(&own)));
    for error in errors[..3].iter().map(|error| error.as_ref().unwrap()) {
        assert!(
            matches!(error, CommError::PeerFailed { rank: 3, reason } if reason.contains("disk full")),
            "{error}"
        );
    }
}

pub(crate) fn an_invalid_argument_on_one_rank_reaches_the_others(backend: &dyn Backend) {
    let (launched, errors) = fail(backend, 3, TIMEOUT, |group| {
        let count = if group.rank() == 1 { 5 } else { 4 };
        let output = zeros::<f32>(12);
        group.all_gather(&tensor(count, |i| i as f32), &output)?;
        received(&output, group)
    });
    assert!(matches!(
        launched.comm_error(),
        Some(CommError::InvalidArgument { op: CollectiveOp::AllGather, .. })
    ));
    assert_eq!(launched.rank(), Some(1));
    for rank in [0, 2] {
        assert!(matches!(&errors[rank], Some(CommError::PeerFailed { rank: 1, .. })), "{:?}", errors[rank]);
    }
}

/// Rank 2 of four diverges: the error of every rank has both calls and their position.
fn diverge(
    backend: &dyn Backend,
    called: &str,
    others_called: &str,
    divergent: impl Fn(&Group) -> Result<(), CommError> + Sync,
    usual: impl Fn(&Group) -> Result<(), CommError> + Sync,
) {
    let (launched, errors) = fail(backend, 4, TIMEOUT, |group| {
        group.barrier()?;
        if group.rank() == 2 { divergent(group) } else { usual(group) }
    });
    let expected = CommError::Desync {
        group: "world".into(),
        sequence: 1,
        rank: 2,
        called: called.into(),
        others: vec![0, 1, 3],
        others_called: others_called.into(),
    };
    assert_eq!(launched.comm_error(), Some(&expected));
    assert_eq!(errors, vec![Some(expected); 4]);
}

pub(crate) fn a_different_collective_is_an_error_with_both_calls(backend: &dyn Backend) {
    let (called, others) = ("barrier", "all_reduce(Sum, 10 × f32)");
    diverge(backend, called, others, |group| group.barrier(), |group| all_reduce(10, group));
}

pub(crate) fn a_different_count_dtype_operator_or_root_is_an_error(backend: &dyn Backend) {
    let usual = "all_reduce(Sum, 10 × f32)";
    diverge(
        backend,
        "all_reduce(Sum, 11 × f32)",
        usual,
        |group| all_reduce(11, group),
        |group| all_reduce(10, group),
    );
    let doubles = |group: &Group| group.all_reduce(&tensor(10, |i| i as f64), ReduceOp::Sum);
    diverge(backend, "all_reduce(Sum, 10 × f64)", usual, doubles, |group| all_reduce(10, group));
    let max = |group: &Group| group.all_reduce(&tensor(10, |i| i as f32), ReduceOp::Max);
    diverge(backend, "all_reduce(Max, 10 × f32)", usual, max, |group| all_reduce(10, group));
    let broadcast = |root| move |group: &Group| group.broadcast(&tensor(3, |i| i as u8), root);
    let (called, others) =
        ("broadcast(3 × u8 from rank 0 of the group)", "broadcast(3 × u8 from rank 1 of the group)");
    diverge(backend, called, others, broadcast(0), broadcast(1));
    let gather = |root| {
        move |group: &Group| {
            let output = (group.rank() == root).then(|| zeros::<u8>(12));
            group.gather(&tensor(3, |i| i as u8), output.as_ref(), root)
        }
    };
    let of = |root| format!("gather(3 × u8 per rank to rank {root} of the group)");
    diverge(backend, &of(2), &of(3), gather(2), gather(3));
    let reduce = |op| move |group: &Group| group.reduce(&tensor(3, |i| i as f32), op, 0);
    let of = |op: &str| format!("reduce({op}, 3 × f32 to rank 0 of the group)");
    diverge(backend, &of("Average"), &of("Product"), reduce(ReduceOp::Average), reduce(ReduceOp::Product));
}

pub(crate) fn a_count_mismatch_is_an_error_before_data_moves(backend: &dyn Backend) {
    let (launched, errors) = fail(backend, 3, TIMEOUT, |group| {
        // Rank 1 sends two elements to each rank, which expects one.
        let send = if group.rank() == 1 { 2 } else { 1 };
        let output = tensor(3, |_| -1.0_f32);
        let result = group.all_to_all(&tensor(3 * send, |i| i as f32), &output, &[send; 3], &[1; 3]);
        assert_eq!(super::values::<f32>(&output), [-1.0; 3]);
        result
    });
    assert!(matches!(launched.comm_error(), Some(CommError::Desync { rank: 1, .. })), "{launched}");
    assert!(
        errors.iter().all(|error| matches!(error, Some(CommError::Desync { rank: 1, .. }))),
        "{errors:?}"
    );
}

pub(crate) fn mismatched_strided_plans_are_errors(backend: &dyn Backend) {
    let (_, errors) = fail(backend, 3, TIMEOUT, |group| {
        let run = if group.rank() == 0 { 3 } else { 2 };
        let block = StridedBlock::contiguous(0, 0, run);
        let recv =
            |from: usize| RecvBlock { block: StridedBlock::contiguous(0, 3 * from, run), accumulate: false };
        let plan =
            StridedPlan { send: vec![vec![block]; 3], recv: (0..3).map(|from| vec![recv(from)]).collect() };
        group.all_to_all_strided(&[zeros::<f32>(3)], &[zeros::<f32>(9)], &Arc::new(plan))
    });
    assert!(
        errors.iter().all(|error| matches!(error, Some(CommError::Desync { rank: 0, .. }))),
        "{errors:?}"
    );
}

pub(crate) fn a_missing_rank_is_an_error_after_the_timeout(backend: &dyn Backend) {
    let (launched, errors) = fail(backend, 3, 3 * TIMEOUT, |group| {
        if group.rank() == 1 {
            std::thread::sleep(2 * TIMEOUT);
        }
        all_reduce(10, group)
    });
    for error in errors.iter().map(|error| error.as_ref().unwrap()).chain(launched.comm_error()) {
        let CommError::Timeout { group, op, sequence, waited_ms, missing } = error else { panic!("{error}") };
        assert_eq!((group.as_str(), *op, *sequence), ("world", CollectiveOp::AllReduce, 0));
        assert_eq!(*missing, [1]);
        assert!((1_500..3_000).contains(waited_ms), "{waited_ms}");
    }
}

/// A mesh dp 2 × sp 2: rank 1 waits for 0 along sp, rank 3 for 1 along dp, and rank 0 for 2, the root blocker. Rank
/// 1 times out first.
pub(crate) fn the_error_names_the_root_blocker_and_not_a_waiting_rank(backend: &dyn Backend) {
    let (launched, errors) = fail(backend, 4, 4 * TIMEOUT, |group| {
        let rank = group.rank();
        let sp = group.split("sp", Some(rank / 2), 0)?.unwrap();
        let dp = group.split("dp", Some(rank % 2), 0)?.unwrap();
        group.barrier()?;
        if rank == 2 {
            // It has started an operation but does not wait for it.
            let pending = sp.start_barrier()?;
            // Sleeps longer than the timeout, without answering.
            std::thread::sleep(3 * TIMEOUT);
            return pending.wait();
        }
        if rank == 1 {
            return sp.barrier();
        }
        std::thread::sleep(TIMEOUT / 3);
        all_reduce(10, &dp)
    });
    for error in errors.iter().map(|error| error.as_ref().unwrap()).chain(launched.comm_error()) {
        let CommError::Timeout { group, op, sequence, waited_ms, missing } = error else { panic!("{error}") };
        assert_eq!((group.as_str(), *op, *sequence), ("dp", CollectiveOp::AllReduce, 0), "{error}");
        assert_eq!(*missing, [2]);
        assert!(*waited_ms >= 1_500, "{waited_ms}");
    }
}

pub(crate) fn a_rank_that_exits_early_is_an_error_at_once(backend: &dyn Backend) {
    let (launched, errors) = fail(backend, 3, TIMEOUT, |group| {
        all_reduce(10, group)?;
        if group.rank() == 0 { Ok(()) } else { all_reduce(10, group) }
    });
    let expected =
        CommError::PeerLeft { group: "world".into(), op: CollectiveOp::AllReduce, sequence: 1, rank: 0 };
    assert_eq!(launched.comm_error(), Some(&expected));
    assert_eq!(errors, [None, Some(expected.clone()), Some(expected)]);
}

pub(crate) fn a_failure_in_a_small_group_fails_the_whole_world(backend: &dyn Backend) {
    let (_, errors) = fail(backend, 4, TIMEOUT, |group| {
        let pair = group.split("pair", Some(group.rank() / 2), 0)?.unwrap();
        if group.rank() == 3 {
            pair.abort("told to");
        }
        pair.barrier()?;
        group.barrier()
    });
    let expected = CommError::PeerFailed { rank: 3, reason: "told to".into() };
    assert_eq!(errors, vec![Some(expected); 4]);
}

/// A GPU runs the operations of both groups one after another: none ends before the one that waits for a rank.
pub(crate) fn operations_of_two_groups_end_when_a_rank_fails(backend: &dyn Backend) {
    let own = CommError::Tensor("disk full".into());
    let (launched, errors) = fail(backend, 2, TIMEOUT, |group| {
        let twin = group.split("twin", Some(0), 0)?.unwrap();
        all_reduce(10, &twin)?;
        all_reduce(10, group)?;
        if group.rank() == 1 {
            // Meanwhile the other starts its operations.
            std::thread::sleep(Duration::from_millis(100));
            return Err(own.clone());
        }
        let tensors = [0, 1].map(|_| tensor(10, |i| i as f32));
        let first = twin.start_all_reduce(&tensors[0], ReduceOp::Sum)?;
        let second = group.start_all_reduce(&tensors[1], ReduceOp::Sum)?;
        Pending::all(vec![first, second]).wait()?;
        received(&tensors[1], group)
    });
    assert_eq!(launched.comm_error(), Some(&own));
    assert!(matches!(&errors[0], Some(CommError::PeerFailed { rank: 1, .. })), "{errors:?}");
}

pub(crate) fn ranks_of_a_sub_group_are_named_by_their_global_rank(backend: &dyn Backend) {
    let (_, errors) = fail(backend, 4, TIMEOUT, |group| {
        let odd = group.split("parity", Some(group.rank() % 2), 0)?.unwrap();
        if group.rank() == 3 { all_reduce(5, &odd) } else { odd.barrier() }?;
        group.barrier()
    });
    for error in errors.iter().map(|error| error.as_ref().unwrap()) {
        assert!(
            matches!(error, CommError::Desync { rank: 3, others, group, .. } if *others == [1] && group == "parity")
        );
    }
}

pub(crate) fn a_message_of_another_kind_fails_both_sides(backend: &dyn Backend) {
    let recv = |group: &Group| group.recv(&zeros::<f32>(4), 0);
    for (described, send) in [("5 × f32", tensor(5, |i| i as f32)), ("4 × i64", tensor(4, |i| i as i64))] {
        let (_, errors) =
            fail(
                backend,
                2,
                TIMEOUT,
                |group| {
                    if group.rank() == 0 { group.send(&send, 1) } else { recv(group) }
                },
            );
        for error in errors.iter().map(|error| error.as_ref().unwrap()) {
            assert!(matches!(error, CommError::Desync { rank: 0, .. }), "{error}");
            assert!(
                error.to_string().contains(described) && error.to_string().contains("recv(4 × f32)"),
                "{error}"
            );
        }
    }
}

pub(crate) fn a_message_to_or_from_a_rank_that_left_fails_at_once(backend: &dyn Backend) {
    for send in [true, false] {
        let (_, errors) = fail(backend, 2, TIMEOUT, |group| match (group.rank(), send) {
            (0, true) => group.send(&zeros::<u8>(1), 1),
            (0, false) => group.recv(&zeros::<u8>(1), 1),
            _ => Ok(()),
        });
        assert!(matches!(&errors[0], Some(CommError::PeerLeft { rank: 1, .. })), "{errors:?}");
    }
}

pub(crate) fn polling_ends_when_a_peer_has_left(backend: &dyn Backend) {
    let (_, errors) = fail(backend, 2, TIMEOUT, |group| {
        if group.rank() == 1 {
            return Ok(());
        }
        let tensor = tensor(10, |_| 1.0_f32);
        let pending = group.start_all_reduce(&tensor, ReduceOp::Sum)?;
        let later = group.start_barrier()?;
        super::pending::poll_to_the_end(&pending);
        let failure = pending.wait();
        assert_eq!(failure, later.wait(), "the failure of every operation in progress");
        failure
    });
    assert!(matches!(&errors[0], Some(CommError::PeerLeft { rank: 1, .. })), "{errors:?}");
}

pub(crate) fn calls_after_a_failure_return_the_same_error(backend: &dyn Backend) {
    let (_, errors) = fail(backend, 2, TIMEOUT, |group| {
        let first = if group.rank() == 0 { group.barrier() } else { all_reduce(3, group) };
        let again = group.barrier();
        assert!(first.is_err());
        assert_eq!(first, again);
        assert_eq!(group.split("late", Some(0), 0).unwrap_err(), first.clone().unwrap_err());
        first
    });
    assert!(errors.iter().all(|error| matches!(error, Some(CommError::Desync { .. }))));
}

pub(crate) fn wrong_arguments_are_typed_errors_and_leave_the_group_usable(backend: &dyn Backend) {
    backend.run(2, |group| {
        let (four, eight) = (tensor(4, |i| i as f32), tensor(8, |i| i as f32));
        let transposed = eight.reshape((2, 4))?.t()?;
        let refused = [
            group.all_gather(&four, &four),
            group.all_gather(&four, &tensor(8, |i| i as u32)),
            group.reduce_scatter(&four, &four, ReduceOp::Sum),
            group.reduce_scatter(&tensor(8, |_| half::bf16::ONE), &four, ReduceOp::Max),
            group.reduce_scatter(&eight, &tensor(4, |_| half::bf16::ONE), ReduceOp::Sum),
            group.all_reduce(&transposed, ReduceOp::Sum),
            group.all_to_all(&four, &four, &[2, 1], &[2, 2]),
            group.all_to_all(&four, &four, &[4], &[2, 2]),
            group.all_to_all(&four, &four, &[2, 2], &[usize::MAX, 5]),
            group.broadcast(&four, 2),
            group.reduce(&four, ReduceOp::Sum, 2),
            group.reduce(&tensor(4, |i| i as i64), ReduceOp::Average, 0),
            group.all_reduce(&tensor(4, |i| i as u32), ReduceOp::Average),
            group.gather(&four, None, group.rank()),
            group.gather(&four, Some(&eight), 1 - group.rank()),
            group.gather(&four, Some(&four), group.rank()),
            group.gather(&four, None, 2),
            group.scatter(None, &four, group.rank()),
            group.scatter(Some(&eight), &four, 1 - group.rank()),
            group.scatter(Some(&eight), &tensor(4, |i| i as u32), group.rank()),
            group.send(&four, 9),
            group.recv(&four, 2),
            group.all_to_all_strided(&[], &[], &Arc::new(StridedPlan::default())),
        ];
        for result in refused {
            assert!(matches!(result, Err(CommError::InvalidArgument { .. })), "{result:?}");
        }
        group.barrier()
    });
}
