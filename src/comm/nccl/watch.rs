//! Operations in progress on a GPU, and detection of their failure.

use crate::comm::CommError;
use crate::comm::diagnostics::OpLabel;
use std::time::{Duration, Instant};

/// The state of an operation, from the driver and from NCCL.
pub(super) trait Probe {
    /// Returns whether the GPU has reached it: earlier operations, and the compute that it waits for, are done.
    fn has_started(&self) -> Result<bool, String>;

    /// Returns whether the GPU has completed it.
    fn is_done(&self) -> Result<bool, String>;

    /// Returns the error of its communicator, if any.
    fn fault(&self) -> Option<String>;
}

/// An operation in progress.
#[derive(Debug)]
pub(super) struct Watched<P> {
    pub(super) label: OpLabel,
    /// The global rank.
    pub(super) rank: usize,
    /// Start of its time limit: when the GPU was seen to have reached it.
    pub(super) started: Option<Instant>,
    pub(super) probe: P,
}

impl<P> Watched<P> {
    /// Returns how long it has taken so far, without the time before the GPU reached it.
    pub(super) fn waited(&self, now: Instant) -> Duration {
        self.started.map_or(Duration::ZERO, |started| now.saturating_duration_since(started))
    }
}

impl<P: Probe> Watched<P> {
    /// Returns `Ok(true)` when it is complete, `Ok(false)` while it is in progress.
    fn inspect(&mut self, now: Instant, timeout: Duration) -> Result<bool, CommError> {
        if let Some(fault) = self.probe.fault() {
            return Err(self.failed(fault));
        }
        if self.probe.is_done().map_err(|fault| self.failed(fault))? {
            return Ok(true);
        }
        if self.started.is_none() && self.probe.has_started().map_err(|fault| self.failed(fault))? {
            self.started = Some(now);
        }
        let waited = self.waited(now);
        if waited >= timeout {
            let waited_ms = waited.as_millis();
            return Err(self.failed(format!(
                "not complete after {waited_ms} ms; a rank did not join, or is slower than the timeout"
            )));
        }
        Ok(false)
    }

    fn failed(&self, reason: String) -> CommError {
        self.label.failed_in("NCCL", self.rank, reason)
    }
}

/// Removes completed operations. The host issues many ahead, so the time limit of one starts when the GPU reaches it.
///
/// # Errors
/// The first failure, in issue order.
pub(super) fn inspect<P: Probe>(
    in_progress: &mut Vec<Watched<P>>,
    now: Instant,
    timeout: Duration,
) -> Result<(), CommError> {
    let mut failure = None;
    in_progress.retain_mut(|operation| match operation.inspect(now, timeout) {
        Ok(is_done) => !is_done,
        Err(error) => {
            failure.get_or_insert(error);
            true
        }
    });
    failure.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::CollectiveOp;
    use crate::comm::diagnostics::tests::label;

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fake {
        /// Behind compute, or an earlier operation.
        Queued,
        Waits,
        Done,
        Faulty,
    }

    impl Probe for Fake {
        fn has_started(&self) -> Result<bool, String> {
            Ok(*self != Fake::Queued)
        }

        fn is_done(&self) -> Result<bool, String> {
            Ok(*self == Fake::Done)
        }

        fn fault(&self) -> Option<String> {
            (*self == Fake::Faulty).then(|| "unhandled system error".to_owned())
        }
    }

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn operations(probes: &[Fake]) -> Vec<Watched<Fake>> {
        let watched = |(index, probe): (usize, &Fake)| Watched {
            label: OpLabel { group: label("sp", &[5]), op: CollectiveOp::AllToAll, sequence: index as u64 },
            rank: 5,
            started: None,
            probe: *probe,
        };
        probes.iter().enumerate().map(watched).collect()
    }

    fn sequences(in_progress: &[Watched<Fake>]) -> Vec<u64> {
        in_progress.iter().map(|operation| operation.label.sequence).collect()
    }

    #[test]
    fn completed_operations_are_removed_and_others_stay() {
        let mut in_progress = operations(&[Fake::Done, Fake::Waits, Fake::Done, Fake::Waits]);
        inspect(&mut in_progress, Instant::now(), TIMEOUT).unwrap();
        assert_eq!(sequences(&in_progress), [1, 3]);
    }

    #[test]
    fn a_timed_out_operation_is_named_with_rank_and_sequence_number() {
        let started = Instant::now();
        let mut in_progress = operations(&[Fake::Done, Fake::Waits]);
        inspect(&mut in_progress, started, TIMEOUT).unwrap();
        let error = inspect(&mut in_progress, started + TIMEOUT, TIMEOUT).unwrap_err();
        let CommError::Library { group, op, sequence, rank, reason, .. } = &error else { panic!("{error}") };
        assert_eq!((group.as_str(), *op, *sequence, *rank), ("sp", CollectiveOp::AllToAll, 1, 5));
        assert!(reason.contains("not complete after 10000 ms"), "{reason}");
    }

    #[test]
    fn compute_and_earlier_operations_do_not_count_toward_the_time_limit() {
        let issued = Instant::now();
        let mut in_progress = operations(&[Fake::Queued, Fake::Queued]);
        inspect(&mut in_progress, issued, TIMEOUT).unwrap();
        inspect(&mut in_progress, issued + TIMEOUT * 5, TIMEOUT).unwrap();
        in_progress[0].probe = Fake::Waits;
        let reached = issued + TIMEOUT * 6;
        inspect(&mut in_progress, reached, TIMEOUT).unwrap();
        let waited: Vec<_> =
            in_progress.iter().map(|operation| operation.waited(reached + TIMEOUT / 2)).collect();
        assert_eq!(waited, [TIMEOUT / 2, Duration::ZERO]);
        in_progress[0].probe = Fake::Done;
        in_progress[1].probe = Fake::Waits;
        let reached = reached + TIMEOUT * 5 / 4;
        inspect(&mut in_progress, reached, TIMEOUT).unwrap();
        inspect(&mut in_progress, reached + TIMEOUT * 3 / 4, TIMEOUT).unwrap();
        let error = inspect(&mut in_progress, reached + TIMEOUT, TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("not complete after 10000 ms"), "{error}");
        assert_eq!(sequences(&in_progress), [1]);
    }

    #[test]
    fn a_fault_is_reported_at_once_and_the_first_of_several_counts() {
        let mut in_progress = operations(&[Fake::Queued, Fake::Faulty, Fake::Faulty]);
        let error = inspect(&mut in_progress, Instant::now(), TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("all_to_all #1 of group \"sp\" on rank 5"), "{error}");
        assert!(error.to_string().contains("unhandled system error"), "{error}");
    }
}
