//! Tests of ranks that report their calls, connected on this machine.

use super::*;
use crate::comm::diagnostics::OpLabel;
use crate::comm::diagnostics::tests::{issued, label};
use crate::comm::store::control_channel::tests::{connected, impatient};
use crate::comm::store::tests::stores_hosted_by;
use crate::comm::{CollectiveOp, GroupLabel};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Channels of a connected world, which do not wait for one another on shutdown.
fn channels(ranks: usize) -> Vec<ControlChannel> {
    connected(ranks).into_iter().map(impatient).collect()
}

/// The launcher's channel, then those of its ranks.
fn channels_under_a_launcher(ranks: usize) -> Vec<ControlChannel> {
    stores_hosted_by(NO_RANK, ranks).into_iter().map(ControlChannel::new).map(impatient).collect()
}

type Call = (Arc<GroupLabel>, u64, &'static str);

fn world() -> Arc<GroupLabel> {
    label("world", &[0, 1, 2])
}

/// The report of a rank that has issued these calls; all are in progress, in order.
fn in_progress(calls: &[Call]) -> CallReport {
    let wait = calls.first().map(|(group, sequence, _)| wait(group, *sequence));
    CallReport { calls: issued(calls).report(), wait }
}

fn wait(group: &Arc<GroupLabel>, sequence: u64) -> Wait {
    let label = OpLabel { group: group.clone(), op: CollectiveOp::AllReduce, sequence };
    Wait { label, missing: Vec::new() }
}

/// The calls of a rank in the group of all ranks; only the last is in progress.
fn called(calls: &[&'static str]) -> Vec<EntryReport> {
    let calls: Vec<Call> = (0..).zip(calls).map(|(sequence, call)| (world(), sequence, *call)).collect();
    let mut history = issued(&calls);
    history.complete_before_newest();
    history.report()
}

fn stall_at(sequence: u64) -> Stall {
    Stall { wait: wait(&world(), sequence), waited: Duration::from_millis(1500) }
}

/// Rank 0 stalls; the other ranks answer with these reports.
fn collect(reported: Vec<CallReport>, stall: &Stall) -> (Option<CommError>, Option<String>) {
    let ends = channels(reported.len()).into_iter().enumerate();
    let mut ranks: Vec<_> = ends.map(|(rank, end)| ControlPlane::new(rank, reported.len(), end)).collect();
    let others = ranks.split_off(1);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let done = &done;
        for (mut other, reported) in others.into_iter().zip(&reported[1..]) {
            scope.spawn(move || {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    other.listen(|| reported.clone()).unwrap();
                    std::thread::sleep(POLL_INTERVAL);
                }
            });
        }
        let found = ranks[0].find_missing(stall, reported[0].calls.clone());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        let first_divergence = found.as_ref().and_then(|error| ranks[0].first_divergence(error));
        (found, first_divergence)
    })
}

fn collect_from_all(calls: [&[&'static str]; 3], stall: &Stall) -> (Option<CommError>, Option<String>) {
    collect(calls.map(|calls| CallReport { calls: called(calls), wait: None }).into(), stall)
}

#[test]
fn missing_ranks_are_named_and_the_divergence_is_reported() {
    let (all, one) = (&["barrier", "all_reduce"][..], &["barrier"][..]);
    let (found, first_divergence) = collect_from_all([all, all, one], &stall_at(1));
    let Some(CommError::Timeout { group, op, sequence, waited_ms, missing }) = found else {
        panic!("{found:?}")
    };
    assert_eq!((group.as_str(), op, sequence, waited_ms), ("world", CollectiveOp::AllReduce, 1, 1500));
    assert_eq!(missing, [2]);
    let first_divergence = first_divergence.unwrap();
    assert!(first_divergence.contains("rank(s) [0, 1] called all_reduce"), "{first_divergence}");
    assert!(first_divergence.contains("rank 2 has not joined"), "{first_divergence}");
}

#[test]
fn the_rank_with_a_different_call_is_named() {
    let (usual, other) = (&["barrier", "all_reduce(3)"][..], &["barrier", "broadcast(3)"][..]);
    let (found, _) = collect_from_all([usual, other, usual], &stall_at(1));
    let Some(CommError::Desync { rank, called, others, others_called, .. }) = found else {
        panic!("{found:?}")
    };
    assert_eq!(
        (rank, called.as_str(), others_called.as_str()),
        (1, "broadcast(3 × f32 from rank 0 of the group)", "all_reduce(Sum, 3 × f32)")
    );
    assert_eq!(others, [0, 2]);
}

#[test]
fn ranks_that_have_all_joined_are_not_blamed() {
    let calls = &["barrier", "all_reduce"][..];
    assert_eq!(collect_from_all([calls; 3], &stall_at(1)), (None, None));
}

/// A mesh dp 2 × sp 2. Rank 0 waits along sp for rank 1, which has issued that operation too, but after one that waits
/// along dp.
fn mesh() -> [Arc<GroupLabel>; 2] {
    [label("sp", &[0, 1]), label("dp", &[1, 3])]
}

#[test]
fn a_waiting_rank_leads_to_the_rank_that_blocks_it() {
    let [sp, dp] = mesh();
    let reported = [
        in_progress(&[(sp.clone(), 5, "all_reduce")]),
        in_progress(&[(dp.clone(), 2, "all_reduce"), (sp.clone(), 5, "all_reduce")]),
        in_progress(&[]),
        // It has an operation in progress, but along another axis.
        in_progress(&[(label("sp", &[2, 3]), 5, "all_reduce")]),
    ];
    let stall = Stall { wait: wait(&sp, 5), waited: Duration::from_millis(1500) };
    let (found, first_divergence) = collect(reported.to_vec(), &stall);
    let along_sp = Wait { missing: vec![2], ..wait(&label("sp", &[2, 3]), 5) };
    assert_eq!(found, Some(along_sp.timed_out(stall.waited)), "rank 3 waits for rank 2, which made no call");
    let first_divergence = first_divergence.unwrap();
    assert!(
        first_divergence.contains("rank 0 waits in all_reduce #5 of \"sp\" for rank(s) [1]"),
        "{first_divergence}"
    );
    assert!(
        first_divergence.contains("rank 1 waits in all_reduce #2 of \"dp\" for rank(s) [3]"),
        "{first_divergence}"
    );
}

#[test]
fn ranks_with_different_calls_block_the_ranks_behind_them() {
    let [sp, dp] = mesh();
    let reported = [
        in_progress(&[(sp.clone(), 5, "all_reduce(1)")]),
        in_progress(&[(dp.clone(), 2, "all_reduce(1)"), (sp.clone(), 5, "all_reduce(1)")]),
        in_progress(&[]),
        in_progress(&[(dp.clone(), 2, "barrier")]),
    ];
    let stall = Stall { wait: wait(&sp, 5), waited: Duration::from_millis(1500) };
    let (found, _) = collect(reported.to_vec(), &stall);
    let Some(CommError::Desync { group, sequence: 2, rank: 3, .. }) = found else { panic!("{found:?}") };
    assert_eq!(group, "dp");
}

#[test]
fn the_rank_that_sees_a_process_end_notifies_the_others() {
    let mut ends = channels(3);
    let mut last = ControlPlane::new(2, 3, ends.pop().unwrap());
    // Drops the channel itself, without the shutdown notice of `ControlPlane`.
    drop(ends.pop());
    let mut first = ControlPlane::new(0, 3, ends.pop().unwrap());
    let deadline = Instant::now() + Duration::from_secs(20);
    let failure_at = |control: &mut ControlPlane| loop {
        match control.listen(Default::default) {
            Err(CommError::PeerFailed { rank, .. }) => break rank,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
    };
    assert_eq!(failure_at(&mut first), 1);
    assert_eq!(failure_at(&mut last), 1);
}

#[test]
fn an_unreported_failure_reaches_all_ranks() {
    let ends = channels(3).into_iter().enumerate();
    let mut ranks: Vec<_> = ends.map(|(rank, end)| ControlPlane::new(rank, 3, end)).collect();
    let error = CommError::PeerFailed { rank: 1, reason: "out of memory".into() };
    ranks[1].announce_failure(&error);
    let deadline = Instant::now() + Duration::from_secs(20);
    for rank in [0, 2] {
        let mut received = Ok(());
        while received.is_ok() && Instant::now() < deadline {
            received = ranks[rank].listen(Default::default);
        }
        assert_eq!(received, Err(error.clone()), "rank {rank}");
    }
}

#[test]
fn a_silent_rank_is_missing_and_a_failed_rank_is_the_reason() {
    let mut ends = channels(3);
    let mut silent = ends.pop().unwrap();
    let mut first = ControlPlane::new(0, 3, ends.remove(0));
    let error = CommError::PeerFailed { rank: 1, reason: "out of memory".into() };
    // Rank 2 never polls; rank 1 has not failed yet.
    let history = &["barrier", "all_reduce"];
    ends[0].send(&ControlMessage::CallReport(CallReport { calls: called(history), wait: None }));
    let found = first.find_missing(&stall_at(1), called(history));
    assert!(matches!(&found, Some(CommError::Timeout { missing, .. }) if *missing == [2]), "{found:?}");
    ends[0].send(&ControlMessage::Failed(error.clone()));
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut outcome = Ok(());
    while outcome.is_ok() && Instant::now() < deadline {
        outcome = first.listen(Default::default);
    }
    assert_eq!(outcome, Err(error));
    assert!(silent.poll().len() >= 2, "messages were sent meanwhile");
}

#[test]
fn if_rank_0_does_not_answer_it_alone_is_blamed() {
    let mut ends = channels(3);
    let mut last = ControlPlane::new(2, 3, ends.pop().unwrap());
    // Rank 1 answers to rank 0, which is alive but never polls, so it forwards nothing.
    let history = &["barrier", "all_reduce"];
    ends[1].send(&ControlMessage::CallReport(CallReport { calls: called(history), wait: None }));
    let found = last.find_missing(&stall_at(1), called(history));
    assert!(matches!(&found, Some(CommError::Timeout { missing, .. }) if *missing == [0]), "{found:?}");
    let first_divergence = last.first_divergence(found.as_ref().unwrap());
    assert_eq!(first_divergence, None, "rank 1 would log it");
}

#[test]
fn if_a_launcher_forwards_nothing_no_rank_is_blamed() {
    let mut ends = channels_under_a_launcher(3);
    let mut last = ControlPlane::new(2, 3, ends.pop().unwrap());
    let history = &["barrier", "all_reduce"];
    ends[2].send(&ControlMessage::CallReport(CallReport { calls: called(history), wait: None }));
    assert_eq!(last.find_missing(&stall_at(1), called(history)), None);
}

#[test]
fn the_end_of_the_launcher_is_not_a_failure_of_a_rank() {
    let mut ends = channels_under_a_launcher(2);
    let mut last = ControlPlane::new(1, 2, ends.pop().unwrap());
    drop(ends.remove(0));
    let deadline = Instant::now() + Duration::from_secs(20);
    while last.channel.is_connected() && Instant::now() < deadline {
        assert_eq!(last.listen(Default::default), Ok(()));
    }
    assert!(!last.channel.is_connected());
}

/// Runs rank 1 to its end, and returns the result of rank 0.
fn received_from(end: impl FnOnce(ControlPlane) + Send) -> Result<(), CommError> {
    let mut ends = connected(2);
    let other = ControlPlane::new(1, 2, ends.pop().unwrap());
    let mut first = ControlPlane::new(0, 2, ends.pop().unwrap());
    std::thread::scope(|scope| {
        // The panic must not end the test.
        scope.spawn(|| catch_unwind(AssertUnwindSafe(|| end(other))));
        // The connection closes once all messages were read.
        let deadline = Instant::now() + Duration::from_secs(20);
        while first.channel.is_connected() && Instant::now() < deadline {
            first.listen(Default::default)?;
        }
        assert!(!first.channel.is_connected());
        Ok(())
    })
}

#[test]
fn the_end_of_a_rank_is_a_failure_only_if_it_panics() {
    assert_eq!(received_from(drop), Ok(()), "groups dropped");
    let silent = |end: Result<(), CommError>| matches!(end, Err(CommError::PeerFailed { rank: 1, .. }));
    assert!(silent(received_from(|_control| panic!("panic of a rank"))));
    let elsewhere = |mut control: ControlPlane| control.skip_shutdown_notice();
    assert!(
        silent(received_from(elsewhere)),
        "the rank's thread panicked, and another thread dropped the rest"
    );
    let twice = |mut control: ControlPlane| control.announce_shutdown();
    assert_eq!(received_from(twice), Ok(()));
}
