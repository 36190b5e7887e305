//! What a rank hears of the others outside of NCCL, and tells them: failures, ends, and, when an operation does not
//! complete, what every rank has called last.

use crate::comm::CommError;
use crate::comm::diagnostics::{ControlMessage, EntryReport, HangReport, Wait};
use crate::comm::store::{ControlChannel, NO_RANK, Received};
use std::time::{Duration, Instant};

/// How long a rank may take to report. Those that live do so within two looks, whatever they wait for.
const GRACE: Duration = Duration::from_secs(2);
/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// What a rank knows of the others, and has told of itself.
#[derive(Debug)]
pub(super) struct ControlPlane {
    rank: usize,
    ranks: usize,
    channel: ControlChannel,
    /// For whom the ranks wait follows from the calls of all: a rank alone does not know.
    report: HangReport,
    has_reported: bool,
    /// Another rank has failed, and all know it.
    has_heard_failure: bool,
    /// Nothing is said at the end: the last word was said, or is not to be.
    is_silent: bool,
}

/// The operation that does not complete, and for how long.
#[derive(Debug, Clone)]
pub(super) struct Stall {
    pub(super) wait: Wait,
    pub(super) waited: Duration,
}

impl ControlPlane {
    pub(super) fn new(rank: usize, ranks: usize, channel: ControlChannel) -> Self {
        let (has_reported, has_heard_failure, is_silent) = (false, false, false);
        Self {
            rank,
            ranks,
            channel,
            report: HangReport::default(),
            has_reported,
            has_heard_failure,
            is_silent,
        }
    }

    /// Hears what has come, and reports what this rank has called, and what of it keeps it, when another one asks by
    /// reporting its own.
    ///
    /// # Errors
    /// The failure of another rank.
    pub(super) fn listen(
        &mut self,
        called: impl FnOnce() -> (Vec<EntryReport>, Option<Wait>),
    ) -> Result<(), CommError> {
        let received = self.receive();
        if self.report.len() > 0 {
            self.report_calls(called);
        }
        received
    }

    fn receive(&mut self) -> Result<(), CommError> {
        let mut failure = None;
        for (rank, received) in self.channel.poll() {
            match received {
                Received::Message(ControlMessage::CallReport { calls, wait }) => {
                    self.report.note(rank, calls, wait)
                }
                Received::Message(ControlMessage::Failed(error)) => {
                    self.has_heard_failure = true;
                    failure = failure.or(Some(error));
                }
                Received::Message(ControlMessage::Ended) => {}
                // Its watchdog asks the ranks to save and end, for which they need one another.
                Received::Gone if rank == NO_RANK => tracing::warn!(
                    "the launcher, which hosts the ranks' store, has ended: rank {} hears of no failures any more",
                    self.rank
                ),
                Received::Gone => {
                    // The host has told all, or is gone itself, which all see.
                    self.has_heard_failure = true;
                    let reason = "its process has ended without a word".to_owned();
                    failure = failure.or(Some(CommError::PeerFailed { rank, reason }));
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Lets all ranks report what they have called, and finds out who keeps them waiting: this one, or the one that it
    /// waits for. `None` where all have come and called the same: then the ranks do not know either. Where the rank that
    /// hosts the store does not answer it is the one that is known to be missing: what the others report goes through it.
    /// Where a launcher hosts it and nothing comes, it may be the one that does not answer, and no rank is blamed.
    pub(super) fn find_missing(&mut self, stall: &Stall, called: Vec<EntryReport>) -> Option<CommError> {
        let own = (called, Some(stall.wait.clone()));
        self.report_calls(|| own.clone());
        let deadline = Instant::now() + GRACE;
        while self.report.len() < self.ranks && Instant::now() < deadline {
            if let Err(failure) = self.receive() {
                return Some(failure);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        // It may have reported before it came to this.
        self.report.note(self.rank, own.0, own.1);
        let host = self.channel.host();
        if host == NO_RANK && self.ranks > 1 && self.report.len() == 1 {
            return None;
        }
        if host != NO_RANK && !self.report.has(host) {
            return Some(Wait { missing: vec![host], ..stall.wait.clone() }.timed_out(stall.waited));
        }
        self.report.infer_missing();
        self.report.failure(self.rank, stall.waited)
    }

    /// What the first rank that is not missing has to say of a failure, if the ranks have reported what they called.
    pub(super) fn first_divergence(&mut self, error: &CommError) -> Option<String> {
        let missing = match error {
            CommError::Timeout { missing, .. } => missing.as_slice(),
            CommError::Desync { .. } => &[],
            _ => return None,
        };
        self.report.infer_missing();
        self.report.first_divergence(self.rank, missing).filter(|_| self.has_reported)
    }

    /// Tells the others of this rank's failure, unless it is what they have told.
    pub(super) fn announce_failure(&mut self, error: &CommError) {
        if self.has_heard_failure {
            // What was passed on must go out before this process ends.
            self.channel.flush();
        } else {
            self.channel.send(&ControlMessage::failed(self.rank, error));
        }
    }

    /// Tells the others, once, that this rank issues nothing any more, and lets that arrive.
    pub(super) fn announce_shutdown(&mut self) {
        if !std::mem::replace(&mut self.is_silent, true) {
            self.channel.close();
        }
    }

    /// Lets the connections end without a word, as they do when the process is killed: the rank has failed, and
    /// nobody has told why.
    pub(super) fn skip_shutdown_notice(&mut self) {
        self.is_silent = true;
    }

    fn report_calls(&mut self, called: impl FnOnce() -> (Vec<EntryReport>, Option<Wait>)) {
        if !std::mem::replace(&mut self.has_reported, true) {
            let (calls, wait) = called();
            self.report.note(self.rank, calls.clone(), wait.clone());
            self.channel.send(&ControlMessage::CallReport { calls, wait });
        }
    }
}

impl Drop for ControlPlane {
    /// A rank that is done with its groups has ended well, unless it panics: then its end is a failure.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.announce_shutdown();
        }
    }
}

#[cfg(test)]
mod tests;
