//! The signals that `launch` receives.

use super::watchdog::FORWARDED_SIGNALS;
use anyhow::Context;
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Received signals that are to be forwarded.
pub(super) struct Signals {
    /// Whether each of [`FORWARDED_SIGNALS`] has arrived.
    are_pending: [Arc<AtomicBool>; FORWARDED_SIGNALS.len()],
}

impl Signals {
    pub(super) fn watch() -> anyhow::Result<Self> {
        let signals = Self { are_pending: Default::default() };
        for (signal, is_pending) in FORWARDED_SIGNALS.into_iter().zip(&signals.are_pending) {
            signal_hook::flag::register(signal.as_raw(), is_pending.clone())
                .context("cannot handle signals")?;
        }
        Ok(signals)
    }

    /// Returns the signals received since the last call.
    pub(super) fn take(&self) -> Vec<Signal> {
        let pending = FORWARDED_SIGNALS.into_iter().zip(&self.are_pending);
        pending
            .filter(|(_, is_pending)| is_pending.swap(false, Ordering::Relaxed))
            .map(|(signal, _)| signal)
            .collect()
    }
}
