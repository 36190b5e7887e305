//! Control messages of a rank outside of NCCL: failures, shutdowns and, when an operation hangs,
//! the last calls of every rank.

use crate::comm::CommError;
use crate::comm::diagnostics::{CallReport, ControlMessage, EntryReport, HangReport, Wait};
use crate::comm::store::{ControlChannel, NO_RANK, Received};
use std::time::{Duration, Instant};

/// Time limit for ranks to report. A live rank does so within two polls, whatever it waits for.
const GRACE: Duration = Duration::from_secs(2);
/// Interval between polls.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The control messages that a rank has received from the others and has sent to them.
#[derive(Debug)]
pub(super) struct ControlPlane {
    rank: usize,
    ranks: usize,
    channel: ControlChannel,
    /// The reports of all ranks. A rank alone does not know for whom it waits; that is inferred from all calls.
    report: HangReport,
    has_reported: bool,
    /// Another rank has failed, and all ranks know it.
    has_received_failure: bool,
    /// No message is sent on shutdown: it was already sent, or must not be.
    skips_shutdown_notice: bool,
}

/// The operation that hangs, and for how long.
#[derive(Debug, Clone)]
pub(super) struct Stall {
    pub(super) wait: Wait,
    pub(super) waited: Duration,
}

impl ControlPlane {
    pub(super) fn new(rank: usize, ranks: usize, channel: ControlChannel) -> Self {
        let report = HangReport::default();
        let (has_reported, has_received_failure, skips_shutdown_notice) = (false, false, false);
        Self { rank, ranks, channel, report, has_reported, has_received_failure, skips_shutdown_notice }
    }

    /// Receives control messages. When another rank reports its calls, this rank reports its own calls and what blocks
    /// it.
    ///
    /// # Errors
    /// The failure of another rank.
    pub(super) fn listen(&mut self, called: impl FnOnce() -> CallReport) -> Result<(), CommError> {
        let received = self.receive();
        if self.report.len() > 0 {
            self.report_calls(called);
        }
        received
    }

    fn receive(&mut self) -> Result<(), CommError> {
        let mut failure = None;
        for Received { from: rank, message } in self.channel.poll() {
            match message {
                Some(ControlMessage::CallReport(report)) => self.report.note(rank, report),
                Some(ControlMessage::Failed(error)) => {
                    self.has_received_failure = true;
                    failure = failure.or(Some(error));
                }
                Some(ControlMessage::Ended) => {}
                // Not a failure: the launcher's watchdog asks the ranks to save and end, for which they need each other.
                None if rank == NO_RANK => tracing::warn!(
                    "the launcher, which hosts the store, has ended; rank {} no longer receives failures of other ranks",
                    self.rank
                ),
                None => {
                    // The host has forwarded everything, or has ended itself, which all ranks see.
                    self.has_received_failure = true;
                    let reason = "its process ended unexpectedly".to_owned();
                    failure = failure.or(Some(CommError::PeerFailed { rank, reason }));
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Lets all ranks report their calls and determines which rank blocks the others: a missing one, or one that a missing
    /// one waits for. Returns `None` if all have joined with the same call: then the cause is unknown. If the rank that
    /// hosts the store does not answer, it is the missing one, since all reports go through it. If the launcher hosts the
    /// store and no report arrives, the launcher may be the cause, and no rank is blamed.
    pub(super) fn find_missing(&mut self, stall: &Stall, calls: Vec<EntryReport>) -> Option<CommError> {
        let own = CallReport { calls, wait: Some(stall.wait.clone()) };
        self.report_calls(|| own.clone());
        let deadline = Instant::now() + GRACE;
        while self.report.len() < self.ranks && Instant::now() < deadline {
            if let Err(failure) = self.receive() {
                return Some(failure);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        // This rank may have reported before the stall.
        self.report.note(self.rank, own);
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

    /// Returns the divergence that the first rank that is not missing logs, if the ranks have reported their calls.
    pub(super) fn first_divergence(&mut self, error: &CommError) -> Option<String> {
        let missing = match error {
            CommError::Timeout { missing, .. } => missing.as_slice(),
            CommError::Desync { .. } => &[],
            _ => return None,
        };
        self.report.infer_missing();
        self.report.first_divergence(self.rank, missing).filter(|_| self.has_reported)
    }

    /// Sends this rank's failure to the others, unless it was received from them.
    pub(super) fn announce_failure(&mut self, error: &CommError) {
        if self.has_received_failure {
            // Forwarded messages must be sent before this process ends.
            self.channel.flush();
        } else {
            self.channel.send(&ControlMessage::failed(self.rank, error));
        }
    }

    /// Announces, once, that this rank issues no more operations, and waits until that has arrived.
    pub(super) fn announce_shutdown(&mut self) {
        if !std::mem::replace(&mut self.skips_shutdown_notice, true) {
            self.channel.close();
        }
    }

    /// Ends the connections without announcement, as when the process is killed: the rank has panicked. A failure that
    /// it has announced still arrives.
    pub(super) fn skip_shutdown_notice(&mut self) {
        if !std::mem::replace(&mut self.skips_shutdown_notice, true) {
            self.channel.disconnect();
        }
    }

    fn report_calls(&mut self, called: impl FnOnce() -> CallReport) {
        if !std::mem::replace(&mut self.has_reported, true) {
            let report = called();
            self.report.note(self.rank, report.clone());
            self.channel.send(&ControlMessage::CallReport(report));
        }
    }
}

impl Drop for ControlPlane {
    /// A rank that drops its groups has ended normally, unless it panics: then its end is a failure.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.skip_shutdown_notice();
        } else {
            self.announce_shutdown();
        }
    }
}

#[cfg(test)]
mod tests;
