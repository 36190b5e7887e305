//! Backoff of a rank between polls of its messages.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Number of polls without a pause; a peer on another core often answers within a microsecond.
const SPINS: u32 = 50;
/// Time for which the core is then yielded to other ranks, before the rank sleeps.
const YIELD_FOR: Duration = Duration::from_millis(2);
const SLEEP: Duration = Duration::from_micros(50);
/// A yield that takes longer than this means that processes other than ranks use the core.
const LATE: Duration = Duration::from_millis(1);
/// Assumed duration of the contention.
const CONTENTION_WINDOW: Duration = Duration::from_secs(1);

/// Whether other processes compete for this rank's core. If so, a rank sleeps at once: the scheduler prefers a process
/// that has slept over busy ones, but one that has yielded comes after them.
#[derive(Debug, Default)]
pub(super) struct CpuContention {
    until: Mutex<Option<Instant>>,
}

/// One wait of a rank.
pub(super) struct Backoff<'a> {
    contention: &'a CpuContention,
    polls: u32,
    since: Instant,
}

#[derive(Debug, PartialEq, Eq)]
enum Rest {
    Spin,
    Yield,
    Sleep,
}

impl CpuContention {
    fn is_active(&self, now: Instant) -> bool {
        self.until.lock().is_some_and(|until| now < until)
    }

    /// Records how long a yield took.
    fn observe(&self, now: Instant, offered_for: Duration) {
        if offered_for > LATE {
            *self.until.lock() = Some(now + CONTENTION_WINDOW);
        }
    }
}

impl<'a> Backoff<'a> {
    pub(super) fn new(contention: &'a CpuContention) -> Self {
        Self { contention, polls: 0, since: Instant::now() }
    }

    pub(super) fn wait(&mut self) {
        let before = Instant::now();
        match self.rest(before) {
            Rest::Spin => std::hint::spin_loop(),
            Rest::Yield => {
                std::thread::yield_now();
                let now = Instant::now();
                self.contention.observe(now, now.saturating_duration_since(before));
            }
            Rest::Sleep => std::thread::sleep(SLEEP),
        }
    }

    fn rest(&mut self, now: Instant) -> Rest {
        self.polls = self.polls.saturating_add(1);
        let has_yielded = now.saturating_duration_since(self.since) >= YIELD_FOR;
        match self.polls {
            ..=SPINS => Rest::Spin,
            _ if has_yielded || self.contention.is_active(now) => Rest::Sleep,
            _ => Rest::Yield,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_spins_then_yields_then_sleeps() {
        let contention = CpuContention::default();
        let mut backoff = Backoff::new(&contention);
        let start = backoff.since;
        assert!((0..SPINS).all(|_| backoff.rest(start) == Rest::Spin));
        assert_eq!(backoff.rest(start), Rest::Yield);
        assert_eq!(backoff.rest(start + YIELD_FOR / 2), Rest::Yield);
        assert_eq!(backoff.rest(start + YIELD_FOR), Rest::Sleep);
    }

    #[test]
    fn under_contention_it_sleeps_at_once_for_a_while() {
        let contention = CpuContention::default();
        let mut backoff = Backoff::new(&contention);
        let start = backoff.since;
        backoff.polls = SPINS;
        contention.observe(start, LATE);
        assert_eq!(backoff.rest(start), Rest::Yield, "the yield was short");
        contention.observe(start, 3 * LATE);
        assert_eq!(backoff.rest(start), Rest::Sleep);
        let mut later = Backoff { contention: &contention, polls: SPINS, since: start + CONTENTION_WINDOW };
        assert_eq!(later.rest(start + CONTENTION_WINDOW), Rest::Yield, "yielding is tried again");
    }
}
