//! The signals that `launch` receives.

use super::watchdog::FORWARDED_SIGNALS;
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Received signals that are to be forwarded.
pub(super) struct Signals {
    pending: Vec<(Signal, Arc<AtomicBool>)>,
}

impl Signals {
    pub(super) fn watch() -> std::io::Result<Self> {
        let watch = |signal: Signal| {
            let is_pending = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(signal.as_raw(), is_pending.clone())?;
            Ok((signal, is_pending))
        };
        let pending = FORWARDED_SIGNALS.into_iter().map(watch);
        Ok(Self { pending: pending.collect::<std::io::Result<_>>()? })
    }

    /// Returns the signals received since the last call.
    pub(super) fn take(&self) -> Vec<Signal> {
        let sent = self.pending.iter().filter(|(_, is_pending)| is_pending.swap(false, Ordering::Relaxed));
        sent.map(|(signal, _)| *signal).collect()
    }
}
