//! Operations in progress on a GPU, and when they have failed.

use crate::comm::{CollectiveOp, CommError};
use std::time::{Duration, Instant};

/// How an operation stands, as the driver and the library see it.
pub(super) trait Probe {
    /// Whether the GPU is done with it.
    fn is_done(&self) -> Result<bool, String>;

    /// What the library reports of its communicator.
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
    /// When its time began: when it was issued, or when one before it was seen to be done.
    pub(super) started: Instant,
    pub(super) probe: P,
}

impl<P> Watched<P> {
    /// How long it has taken so far.
    pub(super) fn waited(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }
}

impl<P: Probe> Watched<P> {
    /// `Ok(true)` when it is done, `Ok(false)` while there is hope.
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
                "not complete after {waited_ms} ms; a rank did not take part, or is slower than the timeout"
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

/// Removes what is done. A rank's operations run one after the other, and the host issues many at a time: so the time
/// of those that are left begins again whenever one is done.
///
/// # Errors
/// The first that has failed, in the order of issue.
pub(super) fn inspect<P: Probe>(
    under_way: &mut Vec<Watched<P>>,
    now: Instant,
    timeout: Duration,
) -> Result<(), CommError> {
    let (mut failure, issued) = (None, under_way.len());
    under_way.retain(|operation| match operation.inspect(now, timeout) {
        Ok(is_done) => !is_done,
        Err(error) => {
            failure.get_or_insert(error);
            true
        }
    });
    if under_way.len() < issued {
        under_way.iter_mut().for_each(|operation| operation.started = operation.started.max(now));
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

    fn sequences(under_way: &[Watched<Fake>]) -> Vec<u64> {
        under_way.iter().map(|operation| operation.sequence).collect()
    }

    #[test]
    fn what_is_done_is_forgotten_and_what_waits_is_kept() {
        let started = Instant::now();
        let mut under_way = operations(&[Fake::Done, Fake::Waits, Fake::Done, Fake::Waits], started);
        inspect(&mut under_way, started + TIMEOUT / 2, TIMEOUT).unwrap();
        assert_eq!(sequences(&under_way), [1, 3]);
    }

    #[test]
    fn an_operation_past_its_time_is_named_with_rank_and_place() {
        let started = Instant::now();
        let mut under_way = operations(&[Fake::Done, Fake::Waits], started);
        let error = inspect(&mut under_way, started + TIMEOUT, TIMEOUT).unwrap_err();
        let CommError::Library { group, op, sequence, rank, reason, .. } = &error else { panic!("{error}") };
        assert_eq!((group.as_str(), *op, *sequence, *rank), ("sp", CollectiveOp::AllToAll, 1, 5));
        assert!(reason.contains("not complete after 10000 ms"), "{reason}");
    }

    #[test]
    fn the_time_of_an_operation_begins_when_one_before_it_is_done() {
        let started = Instant::now();
        let mut under_way = operations(&[Fake::Done, Fake::Waits, Fake::Waits], started);
        inspect(&mut under_way, started + TIMEOUT / 2, TIMEOUT).unwrap();
        inspect(&mut under_way, started + TIMEOUT, TIMEOUT).unwrap();
        under_way[0].probe = Fake::Done;
        inspect(&mut under_way, started + TIMEOUT * 5 / 4, TIMEOUT).unwrap();
        inspect(&mut under_way, started + TIMEOUT * 2, TIMEOUT).unwrap();
        let error = inspect(&mut under_way, started + TIMEOUT * 9 / 4, TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("not complete after 10000 ms"), "{error}");
        assert_eq!(sequences(&under_way), [2]);
    }

    #[test]
    fn a_fault_is_told_at_once_and_the_first_of_several_counts() {
        let started = Instant::now();
        let mut under_way = operations(&[Fake::Waits, Fake::Faulty, Fake::Faulty], started);
        let error = inspect(&mut under_way, started, TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("all_to_all #1 of group \"sp\" on rank 5"), "{error}");
        assert!(error.to_string().contains("unhandled system error"), "{error}");
    }
}
