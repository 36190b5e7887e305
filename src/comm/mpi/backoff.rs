//! What a rank does between two looks at its messages.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Looks that follow each other at once: a peer on another core is often there in a microsecond.
const SPINS: u32 = 50;
/// How long the core is offered to other ranks after that, before the rank sleeps.
const YIELD_FOR: Duration = Duration::from_millis(2);
const SLEEP: Duration = Duration::from_micros(50);
/// A core that was offered and comes back later than this is wanted by others than ranks.
const LATE: Duration = Duration::from_millis(1);
/// How long that is taken to last.
const CONTENTION_WINDOW: Duration = Duration::from_secs(1);

/// Whether others want this rank's core. Then it sleeps at once: the system lets one that has slept in before those that
/// compute, but one that has yielded after them.
#[derive(Debug, Default)]
pub(super) struct CpuContention {
    until: Mutex<Option<Instant>>,
}

/// One wait of a rank.
pub(super) struct Backoff<'a> {
    contention: &'a CpuContention,
    looks: u32,
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

    /// Notes how long an offer of the core has lasted.
    fn observe(&self, now: Instant, offered_for: Duration) {
        if offered_for > LATE {
            *self.until.lock() = Some(now + CONTENTION_WINDOW);
        }
    }
}

impl<'a> Backoff<'a> {
    pub(super) fn new(contention: &'a CpuContention) -> Self {
        Self { contention, looks: 0, since: Instant::now() }
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
        self.looks = self.looks.saturating_add(1);
        let has_yielded = now.saturating_duration_since(self.since) >= YIELD_FOR;
        match self.looks {
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
    fn where_others_want_the_core_it_sleeps_at_once_for_a_while() {
        let contention = CpuContention::default();
        let mut backoff = Backoff::new(&contention);
        let start = backoff.since;
        backoff.looks = SPINS;
        contention.observe(start, LATE);
        assert_eq!(backoff.rest(start), Rest::Yield, "it came back in time");
        contention.observe(start, 3 * LATE);
        assert_eq!(backoff.rest(start), Rest::Sleep);
        let mut later = Backoff { contention: &contention, looks: SPINS, since: start + CONTENTION_WINDOW };
        assert_eq!(later.rest(start + CONTENTION_WINDOW), Rest::Yield, "it is tried again");
    }
}
