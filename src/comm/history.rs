//! The last operations of every rank, for when ranks wait for one another in vain.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

/// How many are remembered.
const REMEMBERED: usize = 64;

/// A group: its name, which others may have too, and its global ranks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Label {
    pub(super) name: String,
    pub(super) members: Vec<usize>,
}

/// The operations that a rank has issued last. It takes its memory at once, and no more.
#[derive(Debug)]
pub(super) struct History<C> {
    records: VecDeque<(Record<C>, IsComplete)>,
}

type IsComplete = bool;

/// An operation, as it was called.
#[derive(Debug)]
pub(super) struct Record<C> {
    pub(super) id: u64,
    pub(super) group: Arc<Label>,
    /// Within the group or, of a message, within the pair of ranks.
    pub(super) sequence: u64,
    pub(super) is_collective: bool,
    pub(super) call: C,
}

/// An operation as others are told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Told {
    group: Label,
    sequence: u64,
    is_collective: bool,
    call: String,
    is_under_way: bool,
}

impl<C> Default for History<C> {
    fn default() -> Self {
        Self { records: VecDeque::with_capacity(REMEMBERED) }
    }
}

impl<C: fmt::Display> History<C> {
    pub(super) fn add(&mut self, record: Record<C>) {
        if self.records.len() == REMEMBERED {
            self.records.pop_front();
        }
        self.records.push_back((record, false));
    }

    /// Notes that an operation is complete, if it is remembered.
    pub(super) fn complete(&mut self, id: u64) {
        if let Some((_, is_complete)) = self.records.iter_mut().rev().find(|(record, _)| record.id == id) {
            *is_complete = true;
        }
    }

    /// Notes that all but the newest are complete.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "the others know what is under way"))]
    pub(super) fn complete_before_newest(&mut self) {
        for (_, is_complete) in self.records.iter_mut().rev().skip(1) {
            *is_complete = true;
        }
    }

    /// The oldest collective that is not complete, as `is_under_way` decides.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "the others know what is under way"))]
    pub(super) fn oldest_under_way(
        &self,
        is_under_way: impl Fn(&Record<C>, bool) -> bool,
    ) -> Option<&Record<C>> {
        let mut records = self.records.iter();
        let found = records.find(|(record, done)| record.is_collective && is_under_way(record, *done));
        found.map(|(record, _)| record)
    }

    /// The oldest first.
    pub(super) fn tell(&self) -> Vec<Told> {
        self.tell_by(|_, is_complete| !is_complete)
    }

    /// As [`tell`](Self::tell); `is_under_way` decides what is not complete, by the record and what was noted.
    pub(super) fn tell_by(&self, is_under_way: impl Fn(&Record<C>, bool) -> bool) -> Vec<Told> {
        let tell = |(record, is_complete): &(Record<C>, IsComplete)| Told {
            group: (*record.group).clone(),
            sequence: record.sequence,
            is_collective: record.is_collective,
            call: record.call.to_string(),
            is_under_way: is_under_way(record, *is_complete),
        };
        self.records.iter().map(tell).collect()
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_under_way { "under way" } else { "complete" };
        write!(f, "#{} of \"{}\": {}, {state}", self.sequence, self.group.name, self.call)
    }
}

/// A line for each operation.
pub(super) fn lines(told: &[Told]) -> String {
    told.iter().map(|told| format!("\n  {told}")).collect()
}

/// The rank that says where the ranks part: the first that is not missing.
pub(super) fn first_to_tell(missing: &[usize]) -> usize {
    (0..).find(|rank| !missing.contains(rank)).unwrap_or(0)
}

/// Where the ranks part, by what they have told; of the missing ones that have told nothing, nothing is known.
pub(super) fn where_they_part(mut histories: Vec<(usize, Vec<Told>)>, missing: &[usize]) -> String {
    let is_silent = |rank: &usize| histories.iter().all(|(of, _)| of != rank);
    let silent: Vec<usize> = missing.iter().copied().filter(is_silent).collect();
    histories.extend(silent.into_iter().map(|rank| (rank, Vec::new())));
    histories.sort_by_key(|(rank, _)| *rank);
    divergence(&histories)
}

/// The members of a group that have not issued a collective of it, by what the ranks have told. Who has told nothing
/// has not.
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "elsewhere every message has a sender"))]
pub(super) fn absent(ranks: &[(usize, Vec<Told>)], group: &Label, sequence: u64) -> Vec<usize> {
    let has_issued = |member: &&usize| {
        let told = ranks.iter().filter(|(rank, _)| rank == *member).flat_map(|(_, told)| told);
        // What is older than what is remembered was issued.
        told.filter(|told| told.is_collective && told.group == *group).any(|told| told.sequence >= sequence)
    };
    group.members.iter().filter(|member| !has_issued(member)).copied().collect()
}

/// Of the ranks that have called another operation at a place than most others, the first: with what it called, the
/// others and what those called. Arguments do not count, since those of one operation may differ between ranks.
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "elsewhere lengths or calls are compared"))]
pub(super) fn another_operation(
    ranks: &[(usize, Vec<Told>)],
    group: &Label,
    sequence: u64,
) -> Option<(usize, String, Vec<usize>, String)> {
    let at_place = |told: &&Told| told.is_collective && told.group == *group && told.sequence == sequence;
    let calls: Vec<(usize, &str)> = ranks
        .iter()
        .filter_map(|(rank, told)| Some((*rank, told.iter().find(at_place)?.call.as_str())))
        .collect();
    let operation = |call: &str| call.split('(').next().unwrap_or_default().to_owned();
    let alike = |(_, call): &(usize, &str)| {
        let same = calls.iter().filter(|(_, other)| operation(other) == operation(call));
        same.map(|(rank, _)| *rank).collect::<Vec<_>>()
    };
    // The largest set; of equal ones, that of the lowest rank.
    let (most, others) = calls
        .iter()
        .map(|call| (call.1, alike(call)))
        .reduce(|best, next| if next.1.len() > best.1.len() { next } else { best })?;
    let (rank, called) = calls.iter().find(|(rank, _)| !others.contains(rank))?;
    Some((*rank, (*called).to_owned(), others, most.to_owned()))
}

/// Where the ranks part, by what they have told, each with its global rank: of every group the first collective
/// that not all of its members have issued, or not with the same call, and what those that did not issued last.
pub(super) fn divergence(ranks: &[(usize, Vec<Told>)]) -> String {
    let mut groups: Vec<&Label> = ranks
        .iter()
        .flat_map(|(_, told)| told)
        .filter(|told| told.is_collective)
        .map(|told| &told.group)
        .collect();
    groups.sort_unstable();
    groups.dedup();
    let found: Vec<String> = groups.into_iter().filter_map(|group| divergence_in(group, ranks)).collect();
    if found.is_empty() {
        "\n  no group has one among the calls that are known".to_owned()
    } else {
        found.concat()
    }
}

fn divergence_in(group: &Label, ranks: &[(usize, Vec<Told>)]) -> Option<String> {
    let members: Vec<(usize, BTreeMap<u64, &Told>, &[Told])> = ranks
        .iter()
        .filter(|(rank, _)| group.members.contains(rank))
        .map(|(rank, told)| {
            let own = told.iter().filter(|told| told.is_collective && told.group == *group);
            (*rank, own.map(|told| (told.sequence, told)).collect(), told.as_slice())
        })
        .collect();
    let mut sequences: Vec<u64> = members.iter().flat_map(|(_, calls, _)| calls.keys().copied()).collect();
    sequences.sort_unstable();
    sequences.dedup();
    for sequence in sequences {
        let mut calls: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        let mut absent = Vec::new();
        for (rank, own, all) in &members {
            match own.get(&sequence) {
                Some(told) => calls.entry(&told.call).or_default().push(*rank),
                // What is older than what is remembered was issued.
                None if own.last_key_value().is_none_or(|(last, _)| *last < sequence) => {
                    absent.push((*rank, all.last()));
                }
                None => {}
            }
        }
        if calls.len() > 1 || !absent.is_empty() {
            return Some(part(group, sequence, &calls, &absent));
        }
    }
    None
}

fn part(
    group: &Label,
    sequence: u64,
    calls: &BTreeMap<&str, Vec<usize>>,
    absent: &[(usize, Option<&Told>)],
) -> String {
    let mut text = format!("\n  #{sequence} of \"{}\" (ranks {:?}):", group.name, group.members);
    for (call, ranks) in calls {
        text += &format!("\n    rank(s) {ranks:?} called {call}");
    }
    for (rank, last) in absent {
        let last = last
            .map_or_else(|| "nothing is known of it".to_owned(), |told| format!("its last call is {told}"));
        text += &format!("\n    rank {rank} has not come to it; {last}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(name: &str, members: &[usize]) -> Arc<Label> {
        Arc::new(Label { name: name.into(), members: members.to_vec() })
    }

    fn history(calls: &[(&Arc<Label>, u64, &'static str)]) -> Vec<Told> {
        let mut history = History::default();
        for (id, (group, sequence, call)) in calls.iter().enumerate() {
            let (group, sequence, call) = ((*group).clone(), *sequence, *call);
            history.add(Record { id: id as u64, group, sequence, is_collective: true, call });
        }
        (0..calls.len() as u64 - 1).for_each(|id| history.complete(id));
        history.tell()
    }

    #[test]
    fn the_last_64_are_told_in_order_with_what_is_under_way() {
        let group = label("sp", &[0, 1]);
        let calls: Vec<_> = (0..100).map(|id| (&group, id, "barrier")).collect();
        let text = lines(&history(&calls));
        let lines: Vec<&str> = text.trim_start_matches('\n').lines().collect();
        assert_eq!(lines.len(), 64);
        assert_eq!(lines[0], "  #36 of \"sp\": barrier, complete");
        assert_eq!(lines[63], "  #99 of \"sp\": barrier, under way");
    }

    #[test]
    fn the_rank_that_took_another_path_is_told_with_its_last_call() {
        let (world, sp) = (label("world", &[0, 1, 2]), label("sp", &[1, 2]));
        let ranks = [
            (0, history(&[(&world, 4, "barrier"), (&world, 5, "all_reduce")])),
            (1, history(&[(&world, 4, "barrier"), (&world, 5, "all_reduce")])),
            (2, history(&[(&world, 4, "barrier"), (&sp, 0, "broadcast")])),
        ];
        let expected = "
  #0 of \"sp\" (ranks [1, 2]):
    rank(s) [2] called broadcast
    rank 1 has not come to it; its last call is #5 of \"world\": all_reduce, under way
  #5 of \"world\" (ranks [0, 1, 2]):
    rank(s) [0, 1] called all_reduce
    rank 2 has not come to it; its last call is #0 of \"sp\": broadcast, under way";
        assert_eq!(divergence(&ranks), expected);
    }

    #[test]
    fn different_calls_at_one_place_are_told_and_later_ones_are_not() {
        let world = label("world", &[0, 1]);
        let ranks = [
            (0, history(&[(&world, 0, "barrier"), (&world, 1, "all_gather"), (&world, 2, "barrier")])),
            (1, history(&[(&world, 0, "barrier"), (&world, 1, "all_reduce")])),
        ];
        let text = divergence(&ranks);
        assert!(text.starts_with("\n  #1 of \"world\""), "{text}");
        assert!(text.contains("[0] called all_gather") && text.contains("[1] called all_reduce"), "{text}");
        assert!(!text.contains("#2"), "{text}");
    }

    #[test]
    fn absent_ranks_and_other_operations_are_told_from_different_arguments() {
        let (world, sp) = (label("world", &[0, 1, 2, 3]), label("sp", &[2, 3]));
        let ranks = [
            (0, history(&[(&world, 4, "barrier"), (&world, 5, "all_to_all(1)")])),
            (1, history(&[(&world, 4, "barrier"), (&world, 5, "barrier")])),
            (2, history(&[(&world, 4, "barrier"), (&world, 5, "all_to_all(2)"), (&sp, 5, "barrier")])),
        ];
        assert_eq!(absent(&ranks, &world, 5), [3], "which has told nothing");
        assert_eq!(absent(&ranks, &world, 6), [0, 1, 2, 3], "another group's number does not count");
        assert_eq!(absent(&ranks, &sp, 3), [3], "what is forgotten was issued");
        let (rank, called, others, others_called) = another_operation(&ranks, &world, 5).unwrap();
        assert_eq!((rank, called.as_str(), others_called.as_str()), (1, "barrier", "all_to_all(1)"));
        assert_eq!(others, [0, 2]);
        assert_eq!(another_operation(&ranks, &world, 4), None);
        assert_eq!((first_to_tell(&[]), first_to_tell(&[0, 1, 3])), (0, 2));
        let text = where_they_part(ranks.to_vec(), &[3]);
        assert!(text.contains("rank 3 has not come to it; nothing is known of it"), "{text}");
    }

    #[test]
    fn all_but_the_newest_can_be_completed_at_once() {
        let group = label("sp", &[0, 1]);
        let mut history = History::default();
        for id in 0..3 {
            history.add(Record {
                id,
                group: group.clone(),
                sequence: id,
                is_collective: true,
                call: "barrier",
            });
        }
        history.complete_before_newest();
        let text = lines(&history.tell());
        assert_eq!(text.matches("complete").count(), 2, "{text}");
        assert!(text.ends_with("#2 of \"sp\": barrier, under way"), "{text}");
    }

    #[test]
    fn groups_of_one_name_are_told_apart_and_forgotten_calls_count_as_made() {
        let [first, second] = [label("sp", &[0, 1]), label("sp", &[2, 3])];
        // Another pair may be further; and rank 1 remembers more of its own.
        let ranks = [
            (0, history(&[(&first, 8, "barrier"), (&first, 9, "barrier")])),
            (1, history(&[(&first, 7, "barrier"), (&first, 8, "barrier"), (&first, 9, "barrier")])),
            (2, history(&[(&second, 3, "barrier")])),
            (3, history(&[(&second, 3, "barrier")])),
        ];
        assert_eq!(divergence(&ranks), "\n  no group has one among the calls that are known");
    }
}
