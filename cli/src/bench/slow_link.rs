//! A link that is slowed on purpose.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use ulysses::comm::{Call, CallSignature, CommError, GroupWrapper, Pending, ProcessGroup, Traffic};

/// A group whose exchanges take as long as over one link of a chosen rate per rank. The link transfers one exchange
/// after the other from their start on, whatever the rank does: a wait ends no earlier than the transfer.
#[derive(Clone, Debug)]
pub(super) struct SlowLink {
    inner: Arc<dyn ProcessGroup>,
    /// Whether transfers are awaited as soon as they start.
    is_awaited: bool,
    state: Arc<Mutex<LinkState>>,
}

#[derive(Debug)]
struct LinkState {
    bytes_per_second: f64,
    /// The end of the last transfer.
    free: Instant,
    sent_bytes: u64,
    exposed: Duration,
}

impl SlowLink {
    /// Wraps `inner` in a link that takes no time until its rate is set.
    pub(super) fn new(inner: Arc<dyn ProcessGroup>) -> Self {
        let (free, exposed) = (Instant::now(), Duration::ZERO);
        let state = LinkState { bytes_per_second: f64::INFINITY, free, sent_bytes: 0, exposed };
        Self { inner, is_awaited: false, state: Arc::new(Mutex::new(state)) }
    }

    /// Returns the same link, whose transfers are awaited as soon as they start.
    pub(super) fn awaited(&self) -> Self {
        Self { is_awaited: true, ..self.clone() }
    }

    pub(super) fn set_rate(&self, bytes_per_second: f64) {
        self.state.lock().bytes_per_second = bytes_per_second;
    }

    /// Bytes that the rank has sent to others.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.state.lock().sent_bytes
    }

    /// Seconds that transfers still needed when the rank began to wait for them.
    pub(super) fn exposed_seconds(&self) -> f64 {
        self.state.lock().exposed.as_secs_f64()
    }

    /// Queues a transfer. Returns its end.
    fn transfer(&self, bytes: u64) -> Instant {
        let mut state = self.state.lock();
        state.sent_bytes += bytes;
        let seconds = Duration::from_secs_f64(bytes as f64 / state.bytes_per_second);
        state.free = state.free.max(Instant::now()) + seconds;
        state.free
    }
}

impl GroupWrapper for SlowLink {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        let CallSignature::AllToAllStrided { dtype, .. } = *call.signature() else {
            return self.inner.start(call);
        };
        let traffic = Traffic::new(call.signature(), self.inner.rank(), self.inner.world_size());
        let pending = self.inner.start(call)?;
        let (arrives, state) = (self.transfer(traffic.stats(dtype).bytes_sent), self.state.clone());
        let left = move || arrives.saturating_duration_since(Instant::now());
        let pending = pending.around(move |complete| {
            state.lock().exposed += left();
            complete()?;
            std::thread::sleep(left());
            Ok(())
        });
        if self.is_awaited {
            pending.wait()?;
            return Ok(Pending::ready());
        }
        Ok(pending)
    }
}
