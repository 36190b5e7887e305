//! Why ranks hang: what each called last and waits for, and who blocks all of them. The rank whose time is up first
//! knows for whom it waits itself, but that one may wait in turn: the wait at the end of this chain is what a timeout
//! names.

use super::divergence::{Calls, not_arrived, mismatched_op, divergence, first_to_report};
use super::flight_recorder::{EntryReport, GroupLabel, lines};
use crate::comm::{CollectiveOp, CommError};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What a rank waits for. What is merely under way, while the rank computes, is no wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) struct Wait {
    #[serde(with = "crate::comm::serde_arc")]
    pub(in crate::comm) group: Arc<GroupLabel>,
    pub(in crate::comm) op: CollectiveOp,
    /// Within the group or, of a message, within the pair of ranks.
    pub(in crate::comm) sequence: u64,
    /// The global ranks that have yet to come.
    pub(in crate::comm) missing: Vec<usize>,
}

impl Wait {
    /// That it has lasted too long.
    pub(in crate::comm) fn timed_out(self, waited: Duration) -> CommError {
        let Self { group, op, sequence, missing } = self;
        let waited_ms = waited.as_millis() as u64;
        CommError::Timeout { group: group.name.clone(), op, sequence, waited_ms, missing }
    }

    /// That it can never end, because this rank has returned.
    pub(in crate::comm) fn left_by(self, rank: usize) -> CommError {
        let Self { group, op, sequence, .. } = self;
        CommError::PeerLeft { group: group.name.clone(), op, sequence, rank }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waits in {} #{} of \"{}\" for ", self.op, self.sequence, self.group.name)?;
        match &self.missing[..] {
            [] => f.write_str("its completion: all have come"),
            missing => write!(f, "rank(s) {missing:?}"),
        }
    }
}

/// What the ranks have reported of their calls since the time of one was up, this rank among them.
#[derive(Debug, Default)]
pub(in crate::comm) struct HangReport {
    calls: Calls,
    waits: BTreeMap<usize, Wait>,
}

impl HangReport {
    /// Notes what a rank has reported, in place of what it may have reported before.
    pub(in crate::comm) fn note(&mut self, rank: usize, calls: Vec<EntryReport>, wait: Option<Wait>) {
        self.calls.insert(rank, calls);
        match wait {
            Some(wait) => self.waits.insert(rank, wait),
            None => self.waits.remove(&rank),
        };
    }

    pub(in crate::comm) fn has(&self, rank: usize) -> bool {
        self.calls.contains_key(&rank)
    }

    /// How many ranks have reported.
    pub(in crate::comm) fn len(&self) -> usize {
        self.calls.len()
    }

    /// The wait that `wait` comes down to: the nearest one for ranks that wait for nobody themselves, as far as they have
    /// reported. Those are all that it then misses. Where ranks wait in a circle none is to blame more than another, and
    /// it is `wait`.
    pub(in crate::comm) fn root_blocker(&self, wait: Wait) -> Wait {
        let of = |rank: &usize| self.waits.get(rank).filter(|wait| !wait.missing.is_empty());
        let (mut seen, mut next) = (BTreeSet::new(), VecDeque::from([&wait]));
        while let Some(current) = next.pop_front() {
            let (waiting, stuck): (Vec<usize>, Vec<usize>) =
                current.missing.iter().partition(|rank| of(rank).is_some());
            if !stuck.is_empty() {
                return Wait { missing: stuck, ..current.clone() };
            }
            next.extend(waiting.iter().filter(|rank| seen.insert(**rank)).filter_map(of));
        }
        wait
    }

    /// The last operations of every rank, where they part, and who waits for whom.
    pub(in crate::comm) fn log(&self, error: &CommError) {
        for (rank, calls) in &self.calls {
            tracing::error!("the last operations of rank {rank}:{}", lines(calls));
        }
        tracing::error!("{error}; first divergence of the ranks:{}{}", divergence(&self.calls), self.waits());
    }

    /// What the first rank that is not missing says of a timeout: where the ranks part, and what they wait for. Of the
    /// missing ones without a report nothing is known.
    #[cfg_attr(
        not(any(feature = "mpi", feature = "nccl")),
        allow(dead_code, reason = "a thread knows what all have called")
    )]
    pub(in crate::comm) fn first_divergence(&mut self, rank: usize, missing: &[usize]) -> Option<String> {
        if first_to_report(missing) != rank {
            return None;
        }
        for silent in missing {
            self.calls.entry(*silent).or_default();
        }
        Some(divergence(&self.calls) + &self.waits())
    }

    /// A line for each rank that waits.
    fn waits(&self) -> String {
        self.waits.iter().map(|(rank, wait)| line(*rank, wait)).collect()
    }
}

/// For ranks that do not know for whom they wait: it follows from the reports of all.
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "elsewhere every message has a sender"))]
impl HangReport {
    /// Finds out for whom each rank waits.
    pub(in crate::comm) fn infer_missing(&mut self) {
        for wait in self.waits.values_mut() {
            wait.missing = not_arrived(&self.calls, &wait.group, wait.sequence);
        }
    }

    /// `rank`, which is stuck, has waited for so long: the failure of the world, or nothing where all have come and called
    /// the same. [`infer_missing`](Self::infer_missing) comes first.
    pub(in crate::comm) fn failure(&self, rank: usize, waited: Duration) -> Option<CommError> {
        let own = self.waits.get(&rank)?;
        let desync = |wait: &Wait| {
            let divergence = mismatched_op(&self.calls, &wait.group, wait.sequence)?;
            Some(divergence.into_error(&wait.group.name, wait.sequence))
        };
        let of_all = std::iter::once(own).chain(self.waits.values());
        // Where all have come and wait, nobody else is the cause.
        let desync = of_all.filter(|wait| wait.missing.is_empty()).find_map(desync);
        desync.or_else(|| (!own.missing.is_empty()).then(|| self.root_blocker(own.clone()).timed_out(waited)))
    }
}

fn line(rank: usize, wait: &Wait) -> String {
    format!("\n  rank {rank} {wait}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `wait` comes down to when ranks have reported that they wait so.
    fn root(wait: Wait, waits: &[(usize, Wait)]) -> Wait {
        let mut report = HangReport::default();
        waits.iter().for_each(|(rank, wait)| report.note(*rank, Vec::new(), Some(wait.clone())));
        report.root_blocker(wait)
    }

    /// A wait in an all_reduce of a group of all ranks.
    fn wait(group: &str, sequence: u64, missing: &[usize]) -> Wait {
        let group = Arc::new(GroupLabel { name: group.into(), members: vec![0, 1, 2, 3, 4, 5] });
        Wait { group, op: CollectiveOp::AllReduce, sequence, missing: missing.to_vec() }
    }

    #[test]
    fn ranks_that_wait_for_nobody_are_the_root() {
        let own = wait("sp", 5, &[1, 3]);
        assert_eq!(root(own.clone(), &[]), own, "they have reported nothing");
        // The reporter's own wait may be among what was told, and so may be those of ranks that matter to nobody.
        let reported = [(0, own.clone()), (2, wait("sp", 5, &[3])), (3, wait("dp", 1, &[]))];
        assert_eq!(root(own.clone(), &reported), own, "a wait for nobody is none");
    }

    #[test]
    fn a_chain_of_waits_leads_to_its_end() {
        // A mesh dp 2 × sp 2 with ranks 2 and 3 cut off.
        let reported = [(1, wait("sp", 68, &[0])), (0, wait("dp", 24, &[2]))];
        assert_eq!(root(wait("sp", 68, &[0]), &reported), wait("dp", 24, &[2]));
        let reported = [(1, wait("b", 2, &[2])), (3, wait("d", 4, &[4])), (2, wait("c", 3, &[3]))];
        assert_eq!(root(wait("a", 1, &[1]), &reported), wait("d", 4, &[4]));
    }

    #[test]
    fn ranks_that_wait_in_a_circle_are_no_cause_and_those_outside_of_it_are() {
        let own = wait("sp", 7, &[1]);
        let circle = [(0, own.clone()), (1, wait("dp", 3, &[2])), (2, wait("sp", 7, &[0, 1]))];
        assert_eq!(root(own.clone(), &circle), own);
        let mut broken = circle;
        broken[2].1.missing.push(3);
        assert_eq!(root(own, &broken), wait("sp", 7, &[3]));
    }

    #[test]
    fn of_several_causes_the_nearest_counts_and_all_of_one_operation_are_named() {
        // A rank that only waits is left out where others do not.
        let reported = [(1, wait("dp", 3, &[4]))];
        assert_eq!(root(wait("sp", 7, &[1, 2, 5]), &reported), wait("sp", 7, &[2, 5]));
        let reported = [(1, wait("b", 2, &[3])), (2, wait("c", 3, &[4, 5])), (3, wait("d", 4, &[5]))];
        assert_eq!(root(wait("a", 1, &[1, 2]), &reported), wait("c", 3, &[4, 5]));
    }

    #[test]
    fn a_wait_is_told_in_words_and_in_json() {
        let [wait, complete] = [&[2, 3][..], &[]].map(|missing| wait("dp", 24, missing));
        assert_eq!(
            complete.to_string(),
            "waits in all_reduce #24 of \"dp\" for its completion: all have come"
        );
        assert_eq!(line(0, &wait), "\n  rank 0 waits in all_reduce #24 of \"dp\" for rank(s) [2, 3]");
        let json = serde_json::to_string(&wait).unwrap();
        assert_eq!(serde_json::from_str::<Wait>(&json).unwrap(), wait);
    }
}
