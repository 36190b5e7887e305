//! Who is missing when an operation does not complete: every rank tells what it has called last.

use super::notices::{Heard, Notices};
use crate::comm::CommError;
use crate::comm::cause::{Wait, cause, lines};
use crate::comm::history::{Told, absent, another_operation, first_to_tell, where_they_part};
use crate::comm::notice::Notice;
use std::time::{Duration, Instant};

/// How long a rank may take to tell. Those that live do so within two looks, whatever they wait for.
const GRACE: Duration = Duration::from_secs(2);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// What a rank knows of the others, and has told of itself.
#[derive(Debug)]
pub(super) struct RollCall {
    rank: usize,
    ranks: usize,
    notices: Notices,
    histories: Vec<(usize, Vec<Told>)>,
    /// For whom they wait follows from all histories: a rank alone does not know.
    waits: Vec<(usize, Wait)>,
    has_told: bool,
    /// Another rank has failed, and all know it.
    has_heard_failure: bool,
    /// Nothing is said at the end: the last word was said, or is not to be.
    is_silent: bool,
}

/// The operation that does not complete, and for how long.
#[derive(Debug, Clone)]
pub(super) struct Stuck {
    pub(super) wait: Wait,
    pub(super) waited: Duration,
}

impl RollCall {
    pub(super) fn new(rank: usize, ranks: usize, notices: Notices) -> Self {
        let (has_told, has_heard_failure, is_silent) = (false, false, false);
        let (histories, waits) = (Vec::new(), Vec::new());
        Self { rank, ranks, notices, histories, waits, has_told, has_heard_failure, is_silent }
    }

    /// Hears what has come, and tells what this rank has called, and what of it keeps it, when another one asks by
    /// telling its own.
    ///
    /// # Errors
    /// The failure of another rank.
    pub(super) fn listen(
        &mut self,
        called: impl FnOnce() -> (Vec<Told>, Option<Wait>),
    ) -> Result<(), CommError> {
        let heard = self.hear();
        if !self.histories.is_empty() {
            self.tell_called(called);
        }
        heard
    }

    fn hear(&mut self) -> Result<(), CommError> {
        let mut failure = None;
        for (rank, heard) in self.notices.poll() {
            match heard {
                Heard::Notice(Notice::Called { calls, wait }) => self.note(rank, calls, wait),
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
        failure.map_or(Ok(()), Err)
    }

    /// Lets all ranks tell what they have called, and finds out who keeps them waiting: this one, or the one that it
    /// waits for. `None` where all have come and called the same: then the ranks do not know either. Where rank 0 does
    /// not answer it is the one that is known to be missing: what the others tell goes through it.
    pub(super) fn find_missing(&mut self, stuck: &Stuck, called: Vec<Told>) -> Option<CommError> {
        let own = (called, Some(stuck.wait.clone()));
        self.tell_called(|| own.clone());
        let deadline = Instant::now() + GRACE;
        while self.histories.len() < self.ranks && Instant::now() < deadline {
            if let Err(failure) = self.hear() {
                return Some(failure);
            }
            std::thread::sleep(PAUSE);
        }
        // It may have told before it came to this.
        self.note(self.rank, own.0, own.1);
        if self.histories.iter().all(|(rank, _)| *rank != 0) {
            return Some(Wait { missing: vec![0], ..stuck.wait.clone() }.timed_out(stuck.waited));
        }
        let waits = self.waits();
        let own = self.with_missing(&stuck.wait);
        let of_all = std::iter::once(&own).chain(waits.iter().map(|(_, wait)| wait));
        // Where all have come and wait, nobody else is the cause.
        let desync = of_all.filter(|wait| wait.missing.is_empty()).find_map(|wait| self.desync(wait));
        desync.or_else(|| (!own.missing.is_empty()).then(|| cause(own, &waits).timed_out(stuck.waited)))
    }

    /// What the ranks wait for.
    fn waits(&self) -> Vec<(usize, Wait)> {
        self.waits.iter().map(|(rank, wait)| (*rank, self.with_missing(wait))).collect()
    }

    fn with_missing(&self, wait: &Wait) -> Wait {
        Wait { missing: absent(&self.histories, &wait.group, wait.sequence), ..wait.clone() }
    }

    fn desync(&self, wait: &Wait) -> Option<CommError> {
        let (group, sequence) = (wait.group.name.clone(), wait.sequence);
        let (rank, called, others, others_called) =
            another_operation(&self.histories, &wait.group, sequence)?;
        Some(CommError::Desync { group, sequence, rank, called, others, others_called })
    }

    /// What the first rank that is not missing has to say of a failure, if the ranks have told what they called.
    pub(super) fn parting(&mut self, error: &CommError) -> Option<String> {
        let missing = match error {
            CommError::Timeout { missing, .. } => missing.as_slice(),
            CommError::Desync { .. } => &[],
            _ => return None,
        };
        if !self.has_told || first_to_tell(missing) != self.rank {
            return None;
        }
        let waits = lines(&self.waits());
        Some(where_they_part(std::mem::take(&mut self.histories), missing) + &waits)
    }

    /// Notes what a rank has told of its calls, in place of what it may have told before.
    fn note(&mut self, rank: usize, calls: Vec<Told>, wait: Option<Wait>) {
        self.histories.retain(|(of, _)| *of != rank);
        self.histories.push((rank, calls));
        self.histories.sort_by_key(|(rank, _)| *rank);
        self.waits.retain(|(of, _)| *of != rank);
        self.waits.extend(wait.map(|wait| (rank, wait)));
        self.waits.sort_by_key(|(rank, _)| *rank);
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

    /// Tells the others, once, that this rank issues nothing any more, and lets that arrive.
    pub(super) fn tell_end(&mut self) {
        if !std::mem::replace(&mut self.is_silent, true) {
            self.notices.end();
        }
    }

    /// Lets the connections end without a word, as they do when the process is killed: the rank has failed, and
    /// nobody has told why.
    pub(super) fn forgo_end(&mut self) {
        self.is_silent = true;
    }

    fn tell_called(&mut self, called: impl FnOnce() -> (Vec<Told>, Option<Wait>)) {
        if !std::mem::replace(&mut self.has_told, true) {
            let (calls, wait) = called();
            self.note(self.rank, calls.clone(), wait.clone());
            self.notices.tell(&Notice::Called { calls, wait });
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
mod tests;
