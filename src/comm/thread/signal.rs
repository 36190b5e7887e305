//! Waiting for other ranks.

use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Iterations of busy waiting; a peer on another core often arrives within a microsecond.
const SPINS: usize = 200;
/// Time for which the core is then yielded to other ranks, which may be the ones to wait for.
const YIELD_FOR: Duration = Duration::from_micros(60);

/// An event counter that a rank sleeps on. A thread that changes state the rank
/// may wait for calls [`notify`](Self::notify) afterwards. The rank reads
/// [`epoch`](Self::epoch), checks the state, and if it has to wait
/// calls [`wait`](Self::wait) with the epoch, so a change in between is never missed.
#[derive(Debug, Default)]
pub(super) struct Signal {
    epoch: AtomicU64,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Signal {
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    pub(super) fn notify(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        // Either this thread sees the sleeper here, or the sleeper sees the new epoch before it sleeps.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock();
            self.wake.notify_all();
        }
    }

    /// Returns when the epoch is no longer `seen`, or at the deadline. `before_sleep` runs before the rank sleeps, for work
    /// that only matters for long waits.
    pub(super) fn wait(&self, seen: u64, deadline: Instant, before_sleep: impl FnOnce()) {
        for _ in 0..SPINS {
            if self.epoch() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        let started = Instant::now();
        while started.elapsed() < YIELD_FOR {
            if self.epoch() != seen {
                return;
            }
            std::thread::yield_now();
        }
        before_sleep();
        self.sleep(seen, deadline);
    }

    /// As [`wait`](Self::wait), without using the core first.
    pub(super) fn sleep(&self, seen: u64, deadline: Instant) {
        let mut guard = self.lock.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.epoch() == seen && !self.wake.wait_until(&mut guard, deadline).timed_out() {}
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_notification_wakes_a_sleeper_before_its_deadline() {
        let signal = Arc::new(Signal::default());
        let seen = signal.epoch();
        let sleeper = {
            let signal = signal.clone();
            std::thread::spawn(move || {
                let started = Instant::now();
                signal.wait(seen, started + Duration::from_secs(30), || {});
                started.elapsed()
            })
        };
        std::thread::sleep(Duration::from_millis(20));
        signal.notify();
        assert!(sleeper.join().unwrap() < Duration::from_secs(10));
        assert_ne!(signal.epoch(), seen);
    }

    #[test]
    fn a_notification_before_the_wait_is_not_missed() {
        let signal = Signal::default();
        let seen = signal.epoch();
        signal.notify();
        let started = Instant::now();
        signal.wait(seen, started + Duration::from_secs(30), || unreachable!("the thread must not sleep"));
        assert!(started.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn without_a_notification_the_wait_ends_at_the_deadline() {
        let signal = Signal::default();
        let started = Instant::now();
        let mut sleeps = false;
        signal.wait(signal.epoch(), started + Duration::from_millis(30), || sleeps = true);
        assert!(sleeps);
        assert!(started.elapsed() >= Duration::from_millis(30));
    }
}
