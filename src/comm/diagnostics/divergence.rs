//! The divergence of ranks: the first call that differs, from the last operations that each rank reported.

use super::desync::Divergence;
use super::flight_recorder::EntryReport;
use super::op_label::OpLabel;
use crate::comm::GroupLabel;
use std::collections::{BTreeMap, BTreeSet};

/// The last operations of each rank, by global rank.
pub(super) type Calls = BTreeMap<usize, Vec<EntryReport>>;

/// The rank that logs the divergence: the first that is not missing.
pub(super) fn reporting_rank(missing: &[usize]) -> usize {
    (0..).find(|rank| !missing.contains(rank)).unwrap_or(0)
}

/// Returns the members of a group that have not joined one of its collectives: they have not issued it, or an earlier
/// operation blocks them, since a rank runs its operations in order. A rank without a report counts as missing.
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "in other backends every message has a sender"))]
pub(super) fn not_arrived(calls: &Calls, label: &OpLabel) -> Vec<usize> {
    let OpLabel { group, sequence, .. } = label;
    let has_come = |member: &&usize| {
        let mut is_kept = false;
        for call in calls.get(member).into_iter().flatten().filter(|call| !call.label.op.is_message()) {
            // Operations older than the recorded ones were issued.
            if call.label.group == *group && call.label.sequence >= *sequence {
                return call.label.sequence > *sequence || !call.is_in_progress || !is_kept;
            }
            is_kept |= call.is_in_progress;
        }
        false
    };
    group.members.iter().filter(|member| !has_come(member)).copied().collect()
}

/// Returns the first rank whose operation at a sequence number differs from that of most ranks. Arguments are ignored,
/// since they may legitimately differ between ranks.
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "other backends compare lengths or calls"))]
pub(super) fn mismatched_op(calls: &Calls, label: &OpLabel) -> Option<Divergence> {
    let OpLabel { group, sequence, .. } = label;
    let at_sequence = |call: &&EntryReport| call.is_collective_of(group) && call.label.sequence == *sequence;
    let at_sequence: Vec<(usize, &EntryReport)> =
        calls.iter().filter_map(|(rank, calls)| Some((*rank, calls.iter().find(at_sequence)?))).collect();
    let alike = |(_, call): &(usize, &EntryReport)| {
        let same = at_sequence.iter().filter(|(_, other)| other.label.op == call.label.op);
        same.map(|(rank, _)| *rank).collect::<Vec<_>>()
    };
    // The largest set; ties go to the lowest rank.
    let (most, others) = at_sequence
        .iter()
        .map(|call| (call.1, alike(call)))
        .reduce(|best, next| if next.1.len() > best.1.len() { next } else { best })?;
    let (rank, call) = at_sequence.iter().find(|(rank, _)| !others.contains(rank))?;
    Some(Divergence { rank: *rank, called: call.call.clone(), others, others_called: most.call.clone() })
}

/// Describes, for every group, the first collective that not all members issued, or not with the
/// same call. For ranks that did not issue it, adds their last call.
pub(super) fn divergence(calls: &Calls) -> String {
    let collectives = calls.values().flatten().filter(|call| !call.label.op.is_message());
    let groups: BTreeSet<&GroupLabel> = collectives.map(|call| &*call.label.group).collect();
    let found: String = groups.into_iter().filter_map(|group| divergence_in(group, calls)).collect();
    if found.is_empty() { "\n  none among the recorded calls".to_owned() } else { found }
}

fn divergence_in(group: &GroupLabel, calls: &Calls) -> Option<String> {
    let of_group = |calls: &'_ [EntryReport]| -> BTreeMap<u64, usize> {
        let own = calls.iter().enumerate().filter(|(_, call)| call.is_collective_of(group));
        own.map(|(index, call)| (call.label.sequence, index)).collect()
    };
    let members: Vec<(usize, BTreeMap<u64, usize>, &[EntryReport])> = calls
        .iter()
        .filter(|(rank, _)| group.members.contains(rank))
        .map(|(rank, calls)| (*rank, of_group(calls), calls.as_slice()))
        .collect();
    let sequences: BTreeSet<u64> = members.iter().flat_map(|(_, own, _)| own.keys().copied()).collect();
    sequences.into_iter().find_map(|sequence| {
        let mut called: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        let mut not_arrived = Vec::new();
        for (rank, own, all) in &members {
            match own.get(&sequence) {
                Some(&index) => called.entry(all[index].comparable()).or_default().push(*rank),
                // Operations older than the recorded ones were issued.
                None if own.last_key_value().is_none_or(|(last, _)| *last < sequence) => {
                    not_arrived.push(NotArrived { rank: *rank, last: all.last() });
                }
                None => {}
            }
        }
        (called.len() > 1 || !not_arrived.is_empty())
            .then(|| describe(group, sequence, &called, &not_arrived))
    })
}

/// A rank that has not issued a collective, and its last call.
struct NotArrived<'a> {
    rank: usize,
    last: Option<&'a EntryReport>,
}

fn describe(
    group: &GroupLabel,
    sequence: u64,
    called: &BTreeMap<&str, Vec<usize>>,
    not_arrived: &[NotArrived<'_>],
) -> String {
    let mut text = format!("\n  #{sequence} of \"{}\" (ranks {:?}):", group.name, group.members);
    for (call, ranks) in called {
        text += &format!("\n    rank(s) {ranks:?} called {call}");
    }
    for NotArrived { rank, last } in not_arrived {
        let last =
            last.map_or_else(|| "no report from this rank".to_owned(), |call| format!("last call: {call}"));
        text += &format!("\n    rank {rank} has not joined; {last}");
    }
    text
}
