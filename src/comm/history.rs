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

/// The members of a group that have not come to a collective of it, by what the ranks have told: that have not issued it, or
/// are kept by one that they have issued before, as a rank does one after the other. Who has told nothing has not come.
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "elsewhere every message has a sender"))]
pub(super) fn absent(ranks: &[(usize, Vec<Told>)], group: &Label, sequence: u64) -> Vec<usize> {
    let has_come = |member: &&usize| {
        let told = ranks.iter().filter(|(rank, _)| rank == *member).flat_map(|(_, told)| told);
        let mut kept = false;
        for told in told.filter(|told| told.is_collective) {
            // What is older than what is remembered was issued.
            if told.group == *group && told.sequence >= sequence {
                return told.sequence > sequence || !told.is_under_way || !kept;
            }
            kept |= told.is_under_way;
        }
        false
    };
    group.members.iter().filter(|member| !has_come(member)).copied().collect()
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
mod tests;
