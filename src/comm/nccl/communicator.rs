//! NCCL calls on one communicator. None of them blocks inside NCCL.
//!
//! NCCL requires serialized calls on a communicator, from any thread. Each call is made under a lock, which
//! is never held while waiting, neither for NCCL to accept a call nor for the GPU. So a communicator can be aborted
//! whatever its rank's thread is waiting for, and the wait ends with an error.

use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys;
use parking_lot::Mutex;
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// `NCCL_CONFIG_UNDEF_INT` and `NCCL_API_MAGIC` of `nccl.h`.
const UNDEFINED: c_int = c_int::MIN;
const MAGIC: u32 = 0xcafe_beef;
/// The NCCL version of the `ncclConfig_t` in the bindings. It must not be the library's version: a later NCCL reads a
/// new field where this struct has padding, if the caller claims that version.
const CONFIG_VERSION: u32 = 23_000;
/// `NCCL_SPLIT_NOCOLOR` of `nccl.h`.
const NO_COLOR: c_int = -1;

/// Interval between polls of a call that has not ended.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Time limit for finalizing a communicator.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// A communicator's unique id.
pub(super) type Id = [u8; ID_BYTES];
pub(super) const ID_BYTES: usize = 128;

/// One rank's end of a communicator; `None` inside once it was aborted.
#[derive(Debug)]
pub(super) struct Communicator {
    raw: Mutex<Option<Raw>>,
    /// All operations have ended. Otherwise the communicator is aborted on drop.
    is_finalized: AtomicBool,
    _handle_slot: Slot,
}

/// A handle of NCCL: a valid communicator, or null.
#[derive(Debug, Clone, Copy)]
struct Raw(sys::ncclComm_t);

// SAFETY: NCCL allows the handle on any thread; the mutex around it serializes the calls.
unsafe impl Send for Raw {}

/// The null handle, for calls without a communicator.
const NULL: Raw = Raw(std::ptr::null_mut());

/// The memory into which NCCL writes the handle of a communicator that it creates.
///
/// NCCL writes from its own thread, when the creation has ended or was aborted. So the memory is on the heap, and
/// is leaked if the creation is abandoned before that.
#[derive(Debug)]
struct Slot(NonNull<sys::ncclComm_t>);

// SAFETY: owns heap memory; the handle in it is plain data outside of NCCL.
unsafe impl Send for Slot {}
// SAFETY: as above; only `Slot::handle` reads it through a shared reference, after NCCL has finished.
unsafe impl Sync for Slot {}

impl Slot {
    fn new() -> Self {
        Self(NonNull::from(Box::leak(Box::new(std::ptr::null_mut()))))
    }

    /// Returns the written handle, or null before that.
    fn handle(&self) -> Raw {
        // SAFETY: valid until `drop`. NCCL writes before it reports the end of the creation, which callers wait for,
        // or within the call that starts it.
        Raw(unsafe { self.0.as_ptr().read_volatile() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: created by `Box::leak` in `new`, and freed only here.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// The result of a call on a communicator.
pub(super) type CallResult = Result<NcclStatus, NcclError>;

/// Returns NCCL's version; 2.30.4 is 23004.
pub(super) fn version() -> Result<i32, String> {
    result::get_nccl_version().map_err(|error| NULL.describe(error.0))
}

/// Returns a new id, or the id for the address in `NCCL_COMM_ID` if that is set.
pub(super) fn unique_id() -> Result<Id, String> {
    let id = result::get_uniqueid().map_err(|error| NULL.describe(error.0))?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// Aborts all operations on some communicators and frees them, so that the GPU's streams continue.
///
/// The aborts are one NCCL group (NCCL 2.22 and later). One after another they may hang: to free the first, NCCL
/// waits for the GPU, where a kernel of the second may be waiting for a rank that has ended.
pub(super) fn abort(communicators: &[Arc<Communicator>]) {
    let taken = communicators.iter().filter_map(|communicator| communicator.raw.lock().take());
    let mut handles: Vec<Raw> = taken.collect();
    if handles.is_empty() {
        return;
    }
    // An abort first waits for a call that NCCL is still accepting, and that call may wait for the GPU. Such
    // communicators come last, after the kernels of all others were told to stop.
    handles.sort_by_cached_key(|raw| raw.state() == sys::ncclResult_t::ncclInProgress);
    // Errors of these calls cannot be handled.
    let _ = result::group_start();
    for raw in handles {
        // SAFETY: taken out of the communicator, so it has no other user.
        let _ = unsafe { result::comm_abort(raw.0) };
    }
    let _ = result::group_end();
}

impl Communicator {
    fn new(raw: Option<Raw>, slot: Slot) -> Self {
        Self { raw: Mutex::new(raw), is_finalized: AtomicBool::new(false), _handle_slot: slot }
    }

    /// Starts to connect to the other ranks with the same id; [`wait_ready`](Self::wait_ready) waits for them. The rank's
    /// GPU is the current one of this thread.
    pub(super) fn join(id: &Id, rank: usize, ranks: usize) -> Result<Arc<Self>, String> {
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) };
        let (mut config, slot) = (config(), Slot::new());
        // SAFETY: the slot outlives the creation: it belongs to the communicator, which finalizes or aborts it first. NCCL
        // copies the other arguments.
        let started = unsafe {
            result::comm_init_rank_config(slot.0.as_ptr(), ranks as c_int, id, rank as c_int, &raw mut config)
        };
        let raw = slot.handle();
        let created = Self::new((!raw.0.is_null()).then_some(raw), slot);
        // A partly created communicator is freed with it.
        started.map_err(|error| raw.describe(error.0))?;
        Ok(Arc::new(created))
    }

    /// Splits the communicator, collectively; ranks of one color are ordered by `(key, rank)`.
    pub(super) fn split(
        &self,
        color: Option<usize>,
        key: usize,
        deadline: Instant,
    ) -> Result<Option<Arc<Self>>, String> {
        let color = color.map_or(Ok(NO_COLOR), c_int::try_from).map_err(|_| "color above 2³¹".to_owned())?;
        let key = c_int::try_from(key).map_err(|_| "key above 2³¹".to_owned())?;
        let mut config = config();
        // Leaked on errors, unless the creation has ended.
        let slot = std::mem::ManuallyDrop::new(Slot::new());
        self.call(deadline, |raw| {
            // SAFETY: `raw` is valid under its lock; the slot is leaked on failure. NCCL copies the other arguments.
            unsafe { sys::ncclCommSplit(raw, color, key, slot.0.as_ptr(), &raw mut config) }.result()
        })?;
        let slot = std::mem::ManuallyDrop::into_inner(slot);
        let child = slot.handle();
        if child.0.is_null() {
            return Ok(None);
        }
        Ok(Some(Arc::new(Self::new(Some(child), slot))))
    }

    /// Makes a call and waits until NCCL has accepted it (not until the GPU has completed it).
    pub(super) fn call(
        &self,
        deadline: Instant,
        call: impl FnOnce(sys::ncclComm_t) -> CallResult,
    ) -> Result<(), String> {
        self.with(|raw| call(raw.0).map_err(|error| raw.describe(error.0)))??;
        self.wait_ready(deadline)
    }

    /// Waits until NCCL has accepted the last call. NCCL is polled whatever the call has returned: `ncclCommSplit`
    /// returns success while the child is still being created.
    pub(super) fn wait_ready(&self, deadline: Instant) -> Result<(), String> {
        loop {
            match self.with(Raw::state)? {
                sys::ncclResult_t::ncclSuccess => return Ok(()),
                sys::ncclResult_t::ncclInProgress if Instant::now() < deadline => {
                    std::thread::sleep(POLL_INTERVAL)
                }
                sys::ncclResult_t::ncclInProgress => {
                    return Err(
                        "NCCL did not accept the call in time; a rank did not make the same call".to_owned()
                    );
                }
                failure => return Err(self.with(|raw| raw.describe(failure))?),
            }
        }
    }

    /// Waits until the GPU has completed all operations, while `may_complete` says that it can.
    pub(super) fn finalize(&self, may_complete: impl Fn() -> bool) {
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        // SAFETY: the handle is valid under its lock.
        let started = self.with(|raw| unsafe { result::comm_finalize(raw.0) });
        if !matches!(started, Ok(Ok(_))) {
            return;
        }
        while may_complete() && Instant::now() < deadline {
            match self.with(Raw::state) {
                Ok(sys::ncclResult_t::ncclInProgress) => std::thread::sleep(POLL_INTERVAL),
                Ok(sys::ncclResult_t::ncclSuccess) => {
                    return self.is_finalized.store(true, Ordering::Relaxed);
                }
                _ => return,
            }
        }
    }

    /// Returns the asynchronous error of a valid communicator.
    pub(super) fn fault(&self) -> Option<String> {
        let reported = self.with(|raw| match raw.state() {
            sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress => None,
            failure => Some(raw.describe(failure)),
        });
        reported.ok().flatten()
    }

    /// Runs a poll or a call on the handle, under the lock.
    fn with<R>(&self, run: impl FnOnce(Raw) -> R) -> Result<R, String> {
        let raw = self.raw.lock();
        raw.map(run).ok_or_else(|| "the communicator was aborted".to_owned())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let Some(raw) = self.raw.get_mut().take() else { return };
        // SAFETY: no other code has the handle; it is destroyed or aborted once.
        unsafe {
            let _ = if *self.is_finalized.get_mut() {
                result::comm_destroy(raw.0)
            } else {
                result::comm_abort(raw.0)
            };
        }
    }
}

/// Returns the default configuration with nonblocking calls.
fn config() -> sys::ncclConfig_t {
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: MAGIC,
        version: CONFIG_VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

impl Raw {
    fn state(self) -> sys::ncclResult_t {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: a valid handle, or null, which NCCL rejects; `state` outlives the call.
        match unsafe { sys::ncclCommGetAsyncError(self.0, &raw mut state) } {
            sys::ncclResult_t::ncclSuccess => state,
            failure => failure,
        }
    }

    /// Returns NCCL's error text for a failure, with its last message.
    fn describe(self, failure: sys::ncclResult_t) -> String {
        // SAFETY: accepts any value, and returns a static text.
        let kind = unsafe { text(sys::ncclGetErrorString(failure)) };
        // SAFETY: a valid handle, or null; the text is valid until the next call on it.
        let last = unsafe { text(sys::ncclGetLastError(self.0)) };
        let kind = kind.unwrap_or_else(|| format!("{failure:?}"));
        match last.filter(|last| !last.is_empty()) {
            Some(last) => format!("{kind}: {}", last.trim()),
            None => kind,
        }
    }
}

/// # Safety
/// `pointer` is null or a nul-terminated text that is valid during the call.
unsafe fn text(pointer: *const std::ffi::c_char) -> Option<String> {
    // SAFETY: guaranteed by the caller.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}
