//! The hang report: the last calls of each rank, what it waits for, and which rank blocks all others. A rank that times
//! out may wait for a rank that waits itself. The report follows this chain of waits, and the timeout error names the
//! wait at its end.

use super::divergence::{Calls, divergence, mismatched_op, not_arrived, reporting_rank};
use super::flight_recorder::{EntryReport, lines};
use super::op_label::OpLabel;
use crate::comm::CommError;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

/// An operation that a rank waits for. An operation in progress while the rank computes is not a wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) struct Wait {
    pub(in crate::comm) label: OpLabel,
    /// The global ranks that have not joined yet.
    pub(in crate::comm) missing: Vec<usize>,
}

impl Wait {
    /// Returns the error for a wait that timed out.
    pub(in crate::comm) fn timed_out(self, waited: Duration) -> CommError {
        let Self { label: OpLabel { group, op, sequence }, missing } = self;
        let waited_ms = waited.as_millis() as u64;
        CommError::Timeout { group: group.name.clone(), op, sequence, waited_ms, missing }
    }

    /// Returns the error for a wait that can never end, because `rank` has returned.
    pub(in crate::comm) fn left_by(self, rank: usize) -> CommError {
        let OpLabel { group, op, sequence } = self.label;
        CommError::PeerLeft { group: group.name.clone(), op, sequence, rank }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpLabel { group, op, sequence } = &self.label;
        write!(f, "waits in {op} #{sequence} of \"{}\" for ", group.name)?;
        match &self.missing[..] {
            [] => f.write_str("its completion: all ranks have joined"),
            missing => write!(f, "rank(s) {missing:?}"),
        }
    }
}

/// The last operations of a rank, oldest first, and what it waits for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) struct CallReport {
    pub(in crate::comm) calls: Vec<EntryReport>,
    pub(in crate::comm) wait: Option<Wait>,
}

/// The reports of the ranks since one of them timed out, including this rank's own.
#[derive(Debug, Default)]
pub(in crate::comm) struct HangReport {
    calls: Calls,
    waits: BTreeMap<usize, Wait>,
}

impl HangReport {
    /// Stores the report of a rank, replacing an earlier one.
    pub(in crate::comm) fn note(&mut self, rank: usize, report: CallReport) {
        let CallReport { calls, wait } = report;
        self.calls.insert(rank, calls);
        match wait {
            Some(wait) => self.waits.insert(rank, wait),
            None => self.waits.remove(&rank),
        };
    }

    pub(in crate::comm) fn has(&self, rank: usize) -> bool {
        self.calls.contains_key(&rank)
    }

    /// Number of ranks that have reported.
    pub(in crate::comm) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Follows the chain of waits that starts at `wait`. Returns the nearest wait for ranks that wait for no other rank, as far as
    /// they have reported; only those ranks are listed as missing. If the ranks wait in a cycle, no rank is to blame more
    /// than another, and `wait` itself is returned.
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

    /// Logs the last operations of every rank, the divergence, and who waits for whom.
    pub(in crate::comm) fn log(&self, error: &CommError) {
        for (rank, calls) in &self.calls {
            tracing::error!("last operations of rank {rank}:{}", lines(calls));
        }
        tracing::error!("{error}; first divergence of the ranks:{}{}", divergence(&self.calls), self.waits());
    }

    /// Returns what the first rank that is not missing logs after a timeout: the divergence of the ranks, and what they wait
    /// for. Nothing is known about missing ranks without a report.
    #[cfg_attr(
        not(any(feature = "mpi", feature = "nccl")),
        allow(dead_code, reason = "threads see the calls of all ranks")
    )]
    pub(in crate::comm) fn first_divergence(&mut self, rank: usize, missing: &[usize]) -> Option<String> {
        if reporting_rank(missing) != rank {
            return None;
        }
        for silent in missing {
            self.calls.entry(*silent).or_default();
        }
        Some(divergence(&self.calls) + &self.waits())
    }

    /// Formats one line per waiting rank.
    fn waits(&self) -> String {
        self.waits.iter().map(|(rank, wait)| line(*rank, wait)).collect()
    }
}

/// For ranks that do not know for whom they wait: it is inferred from the reports of all.
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "in other backends every message has a sender"))]
impl HangReport {
    /// Infers for whom each rank waits.
    pub(in crate::comm) fn infer_missing(&mut self) {
        for wait in self.waits.values_mut() {
            wait.missing = not_arrived(&self.calls, &wait.label);
        }
    }

    /// Returns the failure of the world after `rank` has waited for so long, or nothing if all ranks joined with the same
    /// call. Call [`infer_missing`](Self::infer_missing) first.
    pub(in crate::comm) fn failure(&self, rank: usize, waited: Duration) -> Option<CommError> {
        let own = self.waits.get(&rank)?;
        let desync = |wait: &Wait| Some(mismatched_op(&self.calls, &wait.label)?.into_error(&wait.label));
        let of_all = std::iter::once(own).chain(self.waits.values());
        // If all ranks have joined this wait, a mismatched operation is the only possible cause.
        let desync = of_all.filter(|wait| wait.missing.is_empty()).find_map(desync);
        desync.or_else(|| (!own.missing.is_empty()).then(|| self.root_blocker(own.clone()).timed_out(waited)))
    }
}

fn line(rank: usize, wait: &Wait) -> String {
    format!("\n  rank {rank} {wait}")
}

#[cfg(test)]
mod tests {
    use super::super::tests::label;
    use super::*;
    use crate::comm::CollectiveOp;

    /// The root blocker of `wait`, given the reported waits of other ranks.
    fn root(wait: Wait, waits: &[(usize, Wait)]) -> Wait {
        let mut report = HangReport::default();
        waits.iter().for_each(|(rank, wait)| {
            report.note(*rank, CallReport { calls: Vec::new(), wait: Some(wait.clone()) })
        });
        report.root_blocker(wait)
    }

    /// A wait in an all_reduce of a group of all ranks.
    fn wait(group: &str, sequence: u64, missing: &[usize]) -> Wait {
        let label =
            OpLabel { group: label(group, &[0, 1, 2, 3, 4, 5]), op: CollectiveOp::AllReduce, sequence };
        Wait { label, missing: missing.to_vec() }
    }

    #[test]
    fn ranks_that_wait_for_no_other_rank_are_the_root() {
        let own = wait("sp", 5, &[1, 3]);
        assert_eq!(root(own.clone(), &[]), own, "no reports");
        // The reports may include the reporter's own wait, and those of unrelated ranks.
        let reported = [(0, own.clone()), (2, wait("sp", 5, &[3])), (3, wait("dp", 1, &[]))];
        assert_eq!(root(own.clone(), &reported), own, "a wait for no other rank does not count");
    }

    #[test]
    fn a_chain_of_waits_leads_to_its_end() {
        // A mesh dp 2 × sp 2 where ranks 2 and 3 are disconnected.
        let reported = [(1, wait("sp", 68, &[0])), (0, wait("dp", 24, &[2]))];
        assert_eq!(root(wait("sp", 68, &[0]), &reported), wait("dp", 24, &[2]));
        let reported = [(1, wait("b", 2, &[2])), (3, wait("d", 4, &[4])), (2, wait("c", 3, &[3]))];
        assert_eq!(root(wait("a", 1, &[1]), &reported), wait("d", 4, &[4]));
    }

    #[test]
    fn ranks_in_a_cycle_of_waits_are_not_the_root_and_ranks_outside_are() {
        let own = wait("sp", 7, &[1]);
        let circle = [(0, own.clone()), (1, wait("dp", 3, &[2])), (2, wait("sp", 7, &[0, 1]))];
        assert_eq!(root(own.clone(), &circle), own);
        let mut broken = circle;
        broken[2].1.missing.push(3);
        assert_eq!(root(own, &broken), wait("sp", 7, &[3]));
    }

    #[test]
    fn the_nearest_root_counts_and_all_its_ranks_are_named() {
        // A rank that waits itself is left out if others do not wait.
        let reported = [(1, wait("dp", 3, &[4]))];
        assert_eq!(root(wait("sp", 7, &[1, 2, 5]), &reported), wait("sp", 7, &[2, 5]));
        let reported = [(1, wait("b", 2, &[3])), (2, wait("c", 3, &[4, 5])), (3, wait("d", 4, &[5]))];
        assert_eq!(root(wait("a", 1, &[1, 2]), &reported), wait("c", 3, &[4, 5]));
    }

    #[test]
    fn a_wait_is_formatted_as_text_and_json() {
        let [wait, complete] = [&[2, 3][..], &[]].map(|missing| wait("dp", 24, missing));
        assert_eq!(
            complete.to_string(),
            "waits in all_reduce #24 of \"dp\" for its completion: all ranks have joined"
        );
        assert_eq!(line(0, &wait), "\n  rank 0 waits in all_reduce #24 of \"dp\" for rank(s) [2, 3]");
        let json = serde_json::to_string(&wait).unwrap();
        assert_eq!(serde_json::from_str::<Wait>(&json).unwrap(), wait);
    }
}
