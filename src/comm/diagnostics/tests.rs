//! Tests of recording, reporting and comparing calls.

use super::divergence::{Calls, divergence, mismatched_op, not_arrived, reporting_rank};
use super::*;
use crate::comm::{CallSignature, CollectiveOp, Elements, GroupLabel, ReduceOp};
use candle_core::DType;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(in crate::comm) fn label(name: &str, members: &[usize]) -> Arc<GroupLabel> {
    Arc::new(GroupLabel { name: name.into(), members: members.to_vec() })
}

/// Parses a call: `all_reduce` has one element, `all_reduce(3)` has three.
pub(in crate::comm) fn call(text: &str) -> CallSignature {
    let (op, count) = text.split_once('(').unwrap_or((text, "1)"));
    let count = count.trim_end_matches(')').parse().unwrap();
    let (elements, op_sum) = (Elements { dtype: DType::F32, count }, ReduceOp::Sum);
    match op {
        "all_reduce" => CallSignature::AllReduce { op: op_sum, elements },
        "all_gather" => CallSignature::AllGather { chunk: elements },
        "all_to_all" => {
            CallSignature::AllToAll { dtype: DType::F32, send: [count].into(), recv: [count].into() }
        }
        "broadcast" => CallSignature::Broadcast { elements, root: 0 },
        "barrier" => CallSignature::Barrier,
        "send" => CallSignature::Send { elements, dst: 0 },
        "recv" => CallSignature::Recv { elements, src: 0 },
        _ => panic!("{text}"),
    }
}

pub(in crate::comm) fn issued(calls: &[(Arc<GroupLabel>, u64, &str)]) -> FlightRecorder {
    let mut recorder = FlightRecorder::default();
    for (group, sequence, text) in calls.iter().cloned() {
        let call = call(text);
        recorder.record(OpLabel { group, op: call.op(), sequence }, call);
    }
    recorder
}

/// An operation of any kind.
fn at(group: &Arc<GroupLabel>, sequence: u64) -> OpLabel {
    OpLabel { group: group.clone(), op: CollectiveOp::Barrier, sequence }
}

type CallOf<'a> = (&'a Arc<GroupLabel>, u64, &'static str);

fn in_progress(calls: &[CallOf<'_>]) -> FlightRecorder {
    issued(
        &calls.iter().map(|(group, sequence, text)| ((*group).clone(), *sequence, *text)).collect::<Vec<_>>(),
    )
}

/// All calls but the last are complete.
fn history(calls: &[CallOf<'_>]) -> Vec<EntryReport> {
    let mut recorder = in_progress(calls);
    (0..calls.len() as u64 - 1).for_each(|id| recorder.complete(id));
    recorder.report()
}

#[test]
fn the_last_64_are_reported_in_order_with_what_is_under_way() {
    let group = label("sp", &[0, 1]);
    let calls: Vec<_> = (0..100).map(|id| (&group, id, "barrier")).collect();
    let text = lines(&history(&calls));
    let lines: Vec<&str> = text.trim_start_matches('\n').lines().collect();
    assert_eq!(lines.len(), 64);
    assert_eq!(lines[0], "  #36 of \"sp\": barrier, complete");
    assert_eq!(lines[63], "  #99 of \"sp\": barrier, in progress");
}

#[test]
fn the_rank_on_another_path_is_named_with_its_last_call() {
    let (world, sp) = (label("world", &[0, 1, 2]), label("sp", &[1, 2]));
    let ranks: Calls = BTreeMap::from([
        (0, history(&[(&world, 4, "barrier"), (&world, 5, "all_reduce")])),
        (1, history(&[(&world, 4, "barrier"), (&world, 5, "all_reduce")])),
        (2, history(&[(&world, 4, "barrier"), (&sp, 0, "broadcast")])),
    ]);
    let expected = "
  #0 of \"sp\" (ranks [1, 2]):
    rank(s) [2] called broadcast(1 × f32 from rank 0 of the group)
    rank 1 has not joined; last call: #5 of \"world\": all_reduce(Sum, 1 × f32), in progress
  #5 of \"world\" (ranks [0, 1, 2]):
    rank(s) [0, 1] called all_reduce(Sum, 1 × f32)
    rank 2 has not joined; last call: #0 of \"sp\": broadcast(1 × f32 from rank 0 of the group), in progress";
    assert_eq!(divergence(&ranks), expected);
}

#[test]
fn different_calls_at_one_sequence_number_are_reported_and_later_ones_are_not() {
    let world = label("world", &[0, 1]);
    let ranks: Calls = BTreeMap::from([
        (0, history(&[(&world, 0, "barrier"), (&world, 1, "all_gather"), (&world, 2, "barrier")])),
        (1, history(&[(&world, 0, "barrier"), (&world, 1, "all_reduce")])),
    ]);
    let text = divergence(&ranks);
    assert!(text.starts_with("\n  #1 of \"world\""), "{text}");
    assert!(text.contains("[0] called all_gather") && text.contains("[1] called all_reduce"), "{text}");
    assert!(!text.contains("#2"), "{text}");
}

#[test]
fn missing_ranks_and_mismatched_ops_are_not_confused_with_different_arguments() {
    let (world, sp) = (label("world", &[0, 1, 2, 3]), label("sp", &[2, 3]));
    let ranks: Calls = BTreeMap::from([
        (0, history(&[(&world, 4, "barrier"), (&world, 5, "all_to_all(1)")])),
        (1, history(&[(&world, 4, "barrier"), (&world, 5, "barrier")])),
        (2, history(&[(&world, 4, "barrier"), (&world, 5, "all_to_all(2)"), (&sp, 5, "barrier")])),
    ]);
    assert_eq!(not_arrived(&ranks, &at(&world, 5)), [3], "no report");
    assert_eq!(not_arrived(&ranks, &at(&world, 6)), [0, 1, 2, 3], "another group's number does not count");
    assert_eq!(not_arrived(&ranks, &at(&sp, 3)), [3], "an overwritten call was issued");
    let other = mismatched_op(&ranks, &at(&world, 5)).unwrap();
    assert_eq!((other.rank, other.called.as_str()), (1, "barrier"));
    assert_eq!(other.others_called, "all_to_all(f32, sending [1], expecting [1])");
    assert_eq!(other.others, [0, 2]);
    assert_eq!(mismatched_op(&ranks, &at(&world, 4)), None);
    assert_eq!((reporting_rank(&[]), reporting_rank(&[0, 1, 3])), (0, 2));
    let mut report = HangReport::default();
    ranks.into_iter().for_each(|(rank, calls)| report.note(rank, CallReport { calls, wait: None }));
    let text = report.first_divergence(0, &[3]).unwrap();
    assert!(text.contains("rank 3 has not joined; no report from this rank"), "{text}");
}

#[test]
fn a_rank_blocked_by_an_older_operation_has_not_joined_the_next_one() {
    let (world, sp) = (label("world", &[0, 1, 2, 3]), label("sp", &[2, 3]));
    let calls = [(&world, 4, "barrier"), (&sp, 5, "barrier")];
    let ranks = BTreeMap::from([(2, history(&calls)), (3, in_progress(&calls).report())]);
    assert_eq!(not_arrived(&ranks, &at(&sp, 5)), [3]);
    assert_eq!(not_arrived(&ranks, &at(&sp, 4)), [] as [usize; 0], "already complete");
}

#[test]
fn all_but_the_newest_can_be_completed_at_once() {
    let group = label("sp", &[0, 1]);
    let mut history = in_progress(&[(&group, 0, "barrier"), (&group, 1, "barrier"), (&group, 2, "barrier")]);
    history.complete_before_newest();
    let text = lines(&history.report());
    assert_eq!(text.matches("complete").count(), 2, "{text}");
    assert!(text.ends_with("#2 of \"sp\": barrier, in progress"), "{text}");
}

#[test]
fn groups_with_equal_names_are_distinct_and_overwritten_calls_count_as_issued() {
    let [first, second] = [label("sp", &[0, 1]), label("sp", &[2, 3])];
    // A rank of another group of that name may be further ahead; and rank 1 has recorded more of its calls.
    let ranks: Calls = BTreeMap::from([
        (0, history(&[(&first, 8, "barrier"), (&first, 9, "barrier")])),
        (1, history(&[(&first, 7, "barrier"), (&first, 8, "barrier"), (&first, 9, "barrier")])),
        (2, history(&[(&second, 3, "barrier")])),
        (3, history(&[(&second, 3, "barrier")])),
    ]);
    assert_eq!(divergence(&ranks), "\n  none among the recorded calls");
}
