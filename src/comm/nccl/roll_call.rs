//! Who is missing when an operation does not complete: every rank tells what it has called last.

use super::notices::{Heard, Notices};
use crate::comm::history::{Label, Told, absent, another_operation, first_to_tell, where_they_part};
use crate::comm::notice::Notice;
use crate::comm::{CollectiveOp, CommError};
use std::time::{Duration, Instant};

/// How long a rank may take to tell. Those that live do so within two looks, whatever they wait for.
const GRACE: Duration = Duration::from_secs(2);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// What a rank knows of the others.
#[derive(Debug)]
pub(super) struct RollCall {
    rank: usize,
    ranks: usize,
    notices: Notices,
    histories: Vec<(usize, Vec<Told>)>,
    has_told: bool,
    /// Another rank has failed, and all know it.
    has_heard_failure: bool,
    /// Nothing is said at the end: the last word was said, or is not to be.
    is_silent: bool,
}

/// The operation that does not complete.
#[derive(Debug, Clone)]
pub(super) struct Stuck {
    pub(super) group: Label,
    pub(super) op: CollectiveOp,
    pub(super) sequence: u64,
    pub(super) waited: Duration,
}

impl RollCall {
    pub(super) fn new(rank: usize, ranks: usize, notices: Notices) -> Self {
        let (has_told, has_heard_failure, is_silent) = (false, false, false);
        Self { rank, ranks, notices, histories: Vec::new(), has_told, has_heard_failure, is_silent }
    }

    /// Hears what has come, and tells what this rank has called when another one asks by telling its own.
    ///
    /// # Errors
    /// The failure of another rank.
    pub(super) fn listen(&mut self, called: impl FnOnce() -> Vec<Told>) -> Result<(), CommError> {
        let mut failure = None;
        for (rank, heard) in self.notices.poll() {
            match heard {
                Heard::Notice(Notice::Called(called)) => self.histories.push((rank, called)),
                Heard::Notice(Notice::Failed(error)) => {
                    // The others have heard it too; that a process is gone only those who had a line to it know.
                    self.has_heard_failure = true;
                    failure = failure.or(Some(error));
                }
                Heard::Notice(Notice::Ended) => {}
                Heard::Gone => {
                    let reason = "its process has ended without a word".to_owned();
                    failure = failure.or(Some(CommError::PeerFailed { rank, reason }));
                }
            }
        }
        if !self.histories.is_empty() {
            self.tell_called(called);
        }
        failure.map_or(Ok(()), Err)
    }

    /// Lets all ranks tell what they have called, and finds out who keeps this one waiting. `None` where all have come
    /// and called the same: then the ranks do not know either. Where rank 0 does not answer it is the one that is
    /// known to be missing: what the others tell goes through it.
    pub(super) fn find_missing(&mut self, stuck: &Stuck, called: Vec<Told>) -> Option<CommError> {
        self.tell_called(|| called.clone());
        let deadline = Instant::now() + GRACE;
        while self.histories.len() + 1 < self.ranks && Instant::now() < deadline {
            if let Err(failure) = self.listen(Vec::new) {
                return Some(failure);
            }
            std::thread::sleep(PAUSE);
        }
        self.add_own(called);
        let Stuck { group: label, op, sequence, waited } = stuck.clone();
        let root_answers = self.histories.iter().any(|(rank, _)| *rank == 0);
        let missing = if root_answers { absent(&self.histories, &label, sequence) } else { vec![0] };
        if !missing.is_empty() {
            let waited_ms = waited.as_millis() as u64;
            return Some(CommError::Timeout { group: label.name, op, sequence, waited_ms, missing });
        }
        let (rank, called, others, others_called) = another_operation(&self.histories, &label, sequence)?;
        Some(CommError::Desync { group: label.name, sequence, rank, called, others, others_called })
    }

    /// What the first rank that is not missing has to say of a failure, if the ranks have told what they called.
    pub(super) fn parting(&mut self, error: &CommError, called: Vec<Told>) -> Option<String> {
        let missing = match error {
            CommError::Timeout { missing, .. } => missing.as_slice(),
            CommError::Desync { .. } => &[],
            _ => return None,
        };
        if !self.has_told || first_to_tell(missing) != self.rank {
            return None;
        }
        self.add_own(called);
        Some(where_they_part(std::mem::take(&mut self.histories), missing))
    }

    fn add_own(&mut self, called: Vec<Told>) {
        if self.histories.iter().all(|(rank, _)| *rank != self.rank) {
            self.histories.push((self.rank, called));
            self.histories.sort_by_key(|(rank, _)| *rank);
        }
    }

    /// Tells the others of this rank's failure, unless it is what they have told.
    pub(super) fn tell_failure(&mut self, error: &CommError) {
        if self.has_heard_failure {
            // What was passed on must go out before this process ends.
            self.notices.settle();
        } else {
            self.notices.tell(&Notice::failed(self.rank, error));
        }
    }

    /// Tells the others, once, that this rank issues nothing any more.
    pub(super) fn tell_end(&mut self) {
        if !std::mem::replace(&mut self.is_silent, true) {
            self.notices.tell(&Notice::Ended);
        }
    }

    /// Lets the connections end without a word, as they do when the process is killed: the rank has failed, and
    /// nobody has told why.
    pub(super) fn forgo_end(&mut self) {
        self.is_silent = true;
    }

    fn tell_called(&mut self, called: impl FnOnce() -> Vec<Told>) {
        if !std::mem::replace(&mut self.has_told, true) {
            self.notices.tell(&Notice::Called(called()));
        }
    }
}

impl Drop for RollCall {
    /// A rank that is done with its groups has ended well, unless it panics: then its end is a failure.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.tell_end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::notices::tests::connected;
    use super::*;
    use crate::comm::history::{History, Record};
    use std::sync::Arc;

    fn label() -> Label {
        Label { name: "world".into(), members: vec![0, 1, 2] }
    }

    fn called(calls: &[&'static str]) -> Vec<Told> {
        let mut history = History::default();
        for (sequence, call) in (0..).zip(calls.iter().copied()) {
            let group = Arc::new(label());
            history.add(Record { id: sequence, group, sequence, is_collective: true, call });
        }
        history.tell()
    }

    fn stuck_at(sequence: u64) -> Stuck {
        let waited = Duration::from_millis(1500);
        Stuck { group: label(), op: CollectiveOp::AllReduce, sequence, waited }
    }

    /// Rank 0 finds itself stuck; ranks 1 and 2 have called these, and answer.
    fn roll(calls: [&[&'static str]; 3], stuck: &Stuck) -> (Option<CommError>, Option<String>) {
        let mut ends = connected(3).into_iter();
        let roll_call = |rank| RollCall::new(rank, 3, ends.next().unwrap());
        let [mut first, others @ ..] = [0, 1, 2].map(roll_call);
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let done = &done;
            for (mut other, calls) in others.into_iter().zip(&calls[1..]) {
                scope.spawn(move || {
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        other.listen(|| called(calls)).unwrap();
                        std::thread::sleep(PAUSE);
                    }
                });
            }
            let found = first.find_missing(stuck, called(calls[0]));
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            let parting = found.as_ref().and_then(|error| first.parting(error, called(calls[0])));
            (found, parting)
        })
    }

    #[test]
    fn the_ranks_that_have_not_come_are_named_and_where_they_part_is_told() {
        let (all, one) = (&["barrier", "all_reduce"][..], &["barrier"][..]);
        let (found, parting) = roll([all, all, one], &stuck_at(1));
        let Some(CommError::Timeout { group, op, sequence, waited_ms, missing }) = found else {
            panic!("{found:?}")
        };
        assert_eq!((group.as_str(), op, sequence, waited_ms), ("world", CollectiveOp::AllReduce, 1, 1500));
        assert_eq!(missing, [2]);
        let parting = parting.unwrap();
        assert!(parting.contains("rank(s) [0, 1] called all_reduce"), "{parting}");
        assert!(parting.contains("rank 2 has not come to it"), "{parting}");
    }

    #[test]
    fn the_rank_with_another_call_is_named() {
        let (usual, other) = (&["barrier", "all_reduce(3)"][..], &["barrier", "broadcast(3)"][..]);
        let (found, _) = roll([usual, other, usual], &stuck_at(1));
        let Some(CommError::Desync { rank, called, others, others_called, .. }) = found else {
            panic!("{found:?}")
        };
        assert_eq!((rank, called.as_str(), others_called.as_str()), (1, "broadcast(3)", "all_reduce(3)"));
        assert_eq!(others, [0, 2]);
    }

    #[test]
    fn ranks_that_all_have_come_are_not_blamed() {
        let calls = &["barrier", "all_reduce"][..];
        assert_eq!(roll([calls; 3], &stuck_at(1)), (None, None));
    }

    #[test]
    fn the_rank_that_sees_a_process_end_tells_those_who_cannot() {
        let mut ends = connected(3);
        let mut last = RollCall::new(2, 3, ends.pop().unwrap());
        // Below the roll call, which would say goodbye.
        drop(ends.pop());
        let mut first = RollCall::new(0, 3, ends.pop().unwrap());
        let deadline = Instant::now() + Duration::from_secs(20);
        let failure_at = |roll_call: &mut RollCall| loop {
            match roll_call.listen(Vec::new) {
                Err(CommError::PeerFailed { rank, .. }) => break rank,
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
        };
        assert_eq!(failure_at(&mut first), 1);
        first.tell_failure(&CommError::PeerFailed { rank: 1, reason: "gone".into() });
        assert_eq!(failure_at(&mut last), 1);
    }

    #[test]
    fn who_does_not_answer_is_missing_and_who_failed_is_the_reason() {
        let mut ends = connected(3);
        let mut silent = ends.pop().unwrap();
        let mut first = RollCall::new(0, 3, ends.remove(0));
        let error = CommError::PeerFailed { rank: 1, reason: "out of memory".into() };
        // Rank 2 never looks; rank 1 has not failed yet.
        let history = &["barrier", "all_reduce"];
        ends[0].tell(&Notice::Called(called(history)));
        let found = first.find_missing(&stuck_at(1), called(history));
        assert!(matches!(&found, Some(CommError::Timeout { missing, .. }) if *missing == [2]), "{found:?}");
        ends[0].tell(&Notice::Failed(error.clone()));
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut outcome = Ok(());
        while outcome.is_ok() && Instant::now() < deadline {
            outcome = first.listen(Vec::new);
        }
        assert_eq!(outcome, Err(error));
        assert!(silent.poll().len() >= 2, "it was told all the while");
    }

    #[test]
    fn where_rank_0_does_not_answer_it_alone_is_blamed() {
        let mut ends = connected(3);
        let mut last = RollCall::new(2, 3, ends.pop().unwrap());
        // Rank 1 answers, to rank 0, which lives but never looks: it passes nothing on.
        let history = &["barrier", "all_reduce"];
        ends[1].tell(&Notice::Called(called(history)));
        let found = last.find_missing(&stuck_at(1), called(history));
        assert!(matches!(&found, Some(CommError::Timeout { missing, .. }) if *missing == [0]), "{found:?}");
        let parting = last.parting(found.as_ref().unwrap(), called(history));
        assert_eq!(parting, None, "rank 1 would say where the ranks part, as far as it knows");
    }

    /// What rank 0 hears of rank 1, which ends in some way.
    fn heard_of(end: impl FnOnce(RollCall) + Send) -> Result<(), CommError> {
        let mut ends = connected(2);
        let other = RollCall::new(1, 2, ends.pop().unwrap());
        let mut first = RollCall::new(0, 2, ends.pop().unwrap());
        std::thread::scope(|scope| drop(scope.spawn(|| end(other)).join()));
        // The line goes when all of it was heard.
        let deadline = Instant::now() + Duration::from_secs(20);
        while first.notices.has_lines() && Instant::now() < deadline {
            first.listen(Vec::new)?;
        }
        assert!(!first.notices.has_lines());
        Ok(())
    }

    #[test]
    fn the_end_of_a_rank_is_no_failure_to_others_unless_it_is_one() {
        assert_eq!(heard_of(drop), Ok(()), "done with its groups");
        let silent = |end: Result<(), CommError>| matches!(end, Err(CommError::PeerFailed { rank: 1, .. }));
        assert!(silent(heard_of(|_roll_call| panic!("as a rank may"))));
        let elsewhere = |mut roll_call: RollCall| roll_call.forgo_end();
        assert!(
            silent(heard_of(elsewhere)),
            "the rank's thread has panicked, and another one drops the rest"
        );
        let twice = |mut roll_call: RollCall| roll_call.tell_end();
        assert_eq!(heard_of(twice), Ok(()));
    }
}
