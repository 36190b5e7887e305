//! Operations in progress on a GPU, and detection of their failure.

use crate::comm::{CollectiveOp, CommError};
use std::time::{Duration, Instant};

/// The state of an operation, from the driver and from NCCL.
pub(super) trait Probe {
    /// Returns whether the GPU has completed it.
    fn is_done(&self) -> Result<bool, String>;

    /// Returns the error of its communicator, if any.
    fn fault(&self) -> Option<String>;
}

/// An operation in progress.
#[derive(Debug)]
pub(super) struct Watched<P> {
    pub(super) group: String,
    pub(super) op: CollectiveOp,
    pub(super) sequence: u64,
    /// The global rank.
    pub(super) rank: usize,
    /// Start of its time limit: when it was issued, or when an earlier operation was seen to complete.
    pub(super) started: Instant,
    pub(super) probe: P,
}

impl<P> Watched<P> {
    /// Returns how long it has taken so far.
    pub(super) fn waited(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }
}

impl<P: Probe> Watched<P> {
    /// Returns `Ok(true)` when it is complete, `Ok(false)` while it is in progress.
    fn inspect(&self, now: Instant, timeout: Duration) -> Result<bool, CommError> {
        if let Some(fault) = self.probe.fault() {
            return Err(self.failed(fault));
        }
        if self.probe.is_done().map_err(|fault| self.failed(fault))? {
            return Ok(true);
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
        CommError::Library {
            library: "NCCL",
            group: self.group.clone(),
            op: self.op,
            sequence: self.sequence,
            rank: self.rank,
            reason,
        }
    }
}

/// Removes completed operations. A rank's operations run in order, and the host issues many ahead. So the time limit
/// of the remaining ones restarts whenever one completes.
///
/// # Errors
/// The first failure, in issue order.
pub(super) fn inspect<P: Probe>(
    in_progress: &mut Vec<Watched<P>>,
    now: Instant,
    timeout: Duration,
) -> Result<(), CommError> {
    let (mut failure, issued) = (None, in_progress.len());
    in_progress.retain(|operation| match operation.inspect(now, timeout) {
        Ok(is_done) => !is_done,
        Err(error) => {
            failure.get_or_insert(error);
            true
        }
    });
    if in_progress.len() < issued {
        in_progress.iter_mut().for_each(|operation| operation.started = operation.started.max(now));
    }
    failure.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Fake {
        Done,
        Waits,
        Faulty,
    }

    impl Probe for Fake {
        fn is_done(&self) -> Result<bool, String> {
            Ok(matches!(self, Fake::Done))
        }

        fn fault(&self) -> Option<String> {
            matches!(self, Fake::Faulty).then(|| "unhandled system error".to_owned())
        }
    }

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn operations(probes: &[Fake], started: Instant) -> Vec<Watched<Fake>> {
        let watched = |(index, probe): (usize, &Fake)| Watched {
            group: "sp".into(),
            op: CollectiveOp::AllToAll,
            sequence: index as u64,
            rank: 5,
            started,
            probe: *probe,
        };
        probes.iter().enumerate().map(watched).collect()
    }

    fn sequences(in_progress: &[Watched<Fake>]) -> Vec<u64> {
        in_progress.iter().map(|operation| operation.sequence).collect()
    }

    #[test]
    fn completed_operations_are_removed_and_others_stay() {
        let started = Instant::now();
        let mut in_progress = operations(&[Fake::Done, Fake::Waits, Fake::Done, Fake::Waits], started);
        inspect(&mut in_progress, started + TIMEOUT / 2, TIMEOUT).unwrap();
        assert_eq!(sequences(&in_progress), [1, 3]);
    }

    #[test]
    fn a_timed_out_operation_is_named_with_rank_and_sequence_number() {
        let started = Instant::now();
        let mut in_progress = operations(&[Fake::Done, Fake::Waits], started);
        let error = inspect(&mut in_progress, started + TIMEOUT, TIMEOUT).unwrap_err();
        let CommError::Library { group, op, sequence, rank, reason, .. } = &error else { panic!("{error}") };
        assert_eq!((group.as_str(), *op, *sequence, *rank), ("sp", CollectiveOp::AllToAll, 1, 5));
        assert!(reason.contains("not complete after 10000 ms"), "{reason}");
    }

    #[test]
    fn the_time_limit_restarts_when_an_earlier_operation_completes() {
        let started = Instant::now();
        let mut in_progress = operations(&[Fake::Done, Fake::Waits, Fake::Waits], started);
        inspect(&mut in_progress, started + TIMEOUT / 2, TIMEOUT).unwrap();
        inspect(&mut in_progress, started + TIMEOUT, TIMEOUT).unwrap();
        in_progress[0].probe = Fake::Done;
        inspect(&mut in_progress, started + TIMEOUT * 5 / 4, TIMEOUT).unwrap();
        inspect(&mut in_progress, started + TIMEOUT * 2, TIMEOUT).unwrap();
        let error = inspect(&mut in_progress, started + TIMEOUT * 9 / 4, TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("not complete after 10000 ms"), "{error}");
        assert_eq!(sequences(&in_progress), [2]);
    }

    #[test]
    fn a_fault_is_reported_at_once_and_the_first_of_several_counts() {
        let started = Instant::now();
        let mut in_progress = operations(&[Fake::Waits, Fake::Faulty, Fake::Faulty], started);
        let error = inspect(&mut in_progress, started, TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("all_to_all #1 of group \"sp\" on rank 5"), "{error}");
        assert!(error.to_string().contains("unhandled system error"), "{error}");
    }
}
