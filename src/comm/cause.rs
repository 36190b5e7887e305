//! Who keeps the ranks waiting. The rank whose time is up first knows for whom it waits itself, but that one may wait in
//! turn: the wait at the end of this chain is what a timeout tells of.

use super::history::Label;
use super::{CollectiveOp, CommError};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What a rank waits for. What is merely under way, while the rank computes, is no wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wait {
    #[serde(with = "shared")]
    pub(super) group: Arc<Label>,
    pub(super) op: CollectiveOp,
    /// Within the group or, of a message, within the pair of ranks.
    pub(super) sequence: u64,
    /// The global ranks that have yet to come.
    pub(super) missing: Vec<usize>,
}

impl Wait {
    /// That it has lasted too long.
    pub(super) fn timed_out(self, waited: Duration) -> CommError {
        let Self { group, op, sequence, missing } = self;
        let waited_ms = waited.as_millis() as u64;
        CommError::Timeout { group: group.name.clone(), op, sequence, waited_ms, missing }
    }

    /// That it can never end, because this rank has returned.
    pub(super) fn left_by(self, rank: usize) -> CommError {
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

/// A line for each rank that waits.
pub(super) fn lines<'a>(waits: impl IntoIterator<Item = &'a (usize, Wait)>) -> String {
    waits.into_iter().map(|(rank, wait)| format!("\n  rank {rank} {wait}")).collect()
}

/// The wait that `wait` comes down to: the nearest one for ranks that wait for nobody themselves, as far as they have
/// told. Those are all that it then misses. Where ranks wait in a circle none is to blame more than another, and it is
/// `wait`.
pub(super) fn cause(wait: Wait, told: &[(usize, Wait)]) -> Wait {
    let of = |rank: usize| told.iter().find(|(other, wait)| *other == rank && !wait.missing.is_empty());
    let (mut seen, mut next) = (BTreeSet::new(), VecDeque::from([&wait]));
    while let Some(current) = next.pop_front() {
        let (waiting, stuck): (Vec<usize>, Vec<usize>) =
            current.missing.iter().partition(|rank| of(**rank).is_some());
        if !stuck.is_empty() {
            return Wait { missing: stuck, ..current.clone() };
        }
        let unseen = waiting.into_iter().filter(|&rank| seen.insert(rank));
        next.extend(unseen.filter_map(of).map(|(_, wait)| wait));
    }
    wait
}

/// A shared label is written as the label itself.
mod shared {
    use super::{Arc, Deserialize, Label, Serialize};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(label: &Arc<Label>, serializer: S) -> Result<S::Ok, S::Error> {
        (**label).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<Label>, D::Error> {
        Label::deserialize(deserializer).map(Arc::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wait in an all_reduce of a group of all ranks.
    fn wait(group: &str, sequence: u64, missing: &[usize]) -> Wait {
        let group = Arc::new(Label { name: group.into(), members: vec![0, 1, 2, 3, 4, 5] });
        Wait { group, op: CollectiveOp::AllReduce, sequence, missing: missing.to_vec() }
    }

    #[test]
    fn ranks_that_wait_for_nobody_are_the_cause() {
        let own = wait("sp", 5, &[1, 3]);
        assert_eq!(cause(own.clone(), &[]), own, "they have told nothing");
        // The reporter's own wait may be among what was told, and so may be those of ranks that matter to nobody.
        let told = [(0, own.clone()), (2, wait("sp", 5, &[3])), (3, wait("dp", 1, &[]))];
        assert_eq!(cause(own.clone(), &told), own, "a wait for nobody is none");
    }

    #[test]
    fn a_chain_of_waits_leads_to_its_end() {
        // A mesh dp 2 × sp 2 with ranks 2 and 3 cut off.
        let told = [(1, wait("sp", 68, &[0])), (0, wait("dp", 24, &[2]))];
        assert_eq!(cause(wait("sp", 68, &[0]), &told), wait("dp", 24, &[2]));
        let told = [(1, wait("b", 2, &[2])), (3, wait("d", 4, &[4])), (2, wait("c", 3, &[3]))];
        assert_eq!(cause(wait("a", 1, &[1]), &told), wait("d", 4, &[4]));
    }

    #[test]
    fn ranks_that_wait_in_a_circle_are_no_cause_and_those_outside_of_it_are() {
        let own = wait("sp", 7, &[1]);
        let circle = [(0, own.clone()), (1, wait("dp", 3, &[2])), (2, wait("sp", 7, &[0, 1]))];
        assert_eq!(cause(own.clone(), &circle), own);
        let mut broken = circle;
        broken[2].1.missing.push(3);
        assert_eq!(cause(own, &broken), wait("sp", 7, &[3]));
    }

    #[test]
    fn of_several_causes_the_nearest_counts_and_all_of_one_operation_are_named() {
        // A rank that only waits is left out where others do not.
        let told = [(1, wait("dp", 3, &[4]))];
        assert_eq!(cause(wait("sp", 7, &[1, 2, 5]), &told), wait("sp", 7, &[2, 5]));
        let told = [(1, wait("b", 2, &[3])), (2, wait("c", 3, &[4, 5])), (3, wait("d", 4, &[5]))];
        assert_eq!(cause(wait("a", 1, &[1, 2]), &told), wait("c", 3, &[4, 5]));
    }

    #[test]
    fn a_wait_is_told_in_words_and_in_json() {
        let [wait, complete] = [&[2, 3][..], &[]].map(|missing| wait("dp", 24, missing));
        assert_eq!(
            complete.to_string(),
            "waits in all_reduce #24 of \"dp\" for its completion: all have come"
        );
        assert_eq!(
            lines(&[(0, wait.clone())]),
            "\n  rank 0 waits in all_reduce #24 of \"dp\" for rank(s) [2, 3]"
        );
        let json = serde_json::to_string(&wait).unwrap();
        assert_eq!(serde_json::from_str::<Wait>(&json).unwrap(), wait);
    }
}
