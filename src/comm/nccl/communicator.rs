//! NCCL's calls on one communicator, none of which blocks in NCCL.
//!
//! NCCL wants the calls on a communicator one at a time, from whatever thread. So each is made under a lock, which
//! nobody holds while he waits: not for a call to be taken, not for the GPU. Hence a communicator can be aborted
//! whatever its rank's thread is waiting for, and the wait ends with an error.

use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys;
use parking_lot::Mutex;
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// `NCCL_CONFIG_UNDEF_INT` and `NCCL_API_MAGIC` of `nccl.h`.
const UNDEFINED: c_int = c_int::MIN;
const MAGIC: u32 = 0xcafe_beef;
/// The NCCL that the bindings' `ncclConfig_t` is of. Not the library's: a later one has a field where this struct has
/// padding, and reads it from a caller who claims to know it.
const CONFIG_VERSION: u32 = 23_000;
/// `NCCL_SPLIT_NOCOLOR` of `nccl.h`.
const NO_COLOR: c_int = -1;

/// Between two looks at a call that has not ended.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// How long a communicator that is no longer needed may take to end.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// A communicator's unique id.
pub(super) type Id = [u8; ID_BYTES];
pub(super) const ID_BYTES: usize = 128;

/// One rank's end of a communicator; gone once it was aborted.
#[derive(Debug)]
pub(super) struct Communicator {
    raw: Mutex<Option<Raw>>,
    _made_at: Slot,
}

/// A handle of NCCL's: of a communicator that lives, or null.
#[derive(Debug, Clone, Copy)]
struct Raw(sys::ncclComm_t);

// SAFETY: a handle that NCCL lets any thread use, one at a time, which the mutex around it sees to.
unsafe impl Send for Raw {}

/// For what concerns no communicator.
const NULL: Raw = Raw(std::ptr::null_mut());

/// Where NCCL writes the handle of a communicator that it makes.
///
/// It writes from a thread of its own, when the making has ended or was aborted. So the place is on the heap, and
/// whoever gives the making up before that leaks it.
#[derive(Debug)]
struct Slot(NonNull<sys::ncclComm_t>);

// SAFETY: the owner of a place on the heap; what is written there is a number to anyone but NCCL.
unsafe impl Send for Slot {}
// SAFETY: as above; nothing reads it through a shared reference but `Slot::handle`, when NCCL is done with it.
unsafe impl Sync for Slot {}

impl Slot {
    fn new() -> Self {
        Self(NonNull::from(Box::leak(Box::new(std::ptr::null_mut()))))
    }

    /// What was written; null before that.
    fn handle(&self) -> Raw {
        // SAFETY: alive until `drop`. NCCL writes before it reports that the making has ended, which callers await,
        // or in the very call that begins it.
        Raw(unsafe { self.0.as_ptr().read_volatile() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: made by `Box::leak` in `new`, and nobody else frees it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// What a call on a communicator returns.
pub(super) type CallResult = Result<NcclStatus, NcclError>;

/// NCCL's version, as 2.30.4 is 23004.
pub(super) fn version() -> Result<i32, String> {
    result::get_nccl_version().map_err(|error| NULL.describe(error.0))
}

/// A new id, or with `NCCL_COMM_ID` in the environment the one that stands for that address.
pub(super) fn unique_id() -> Result<Id, String> {
    let id = result::get_uniqueid().map_err(|error| NULL.describe(error.0))?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// Ends all that is in progress on some communicators and frees them: the GPU's streams go on.
///
/// As one group of calls (NCCL 2.22 and later). One after another they may wait for ever: to free the first NCCL
/// waits for the GPU, where a kernel of the second may be waiting for a rank that is gone.
pub(super) fn abort(communicators: &[Arc<Communicator>]) {
    let taken = communicators.iter().filter_map(|communicator| communicator.raw.lock().take());
    let mut handles: Vec<Raw> = taken.collect();
    if handles.is_empty() {
        return;
    }
    // An abort first lets a call end that is still being taken, and that one may wait for the GPU: it comes last,
    // when the kernels of all others have been told to end.
    handles.sort_by_cached_key(|raw| raw.state() == sys::ncclResult_t::ncclInProgress);
    // What these fail with cannot be helped.
    let _ = result::group_start();
    for raw in handles {
        // SAFETY: taken out, so nobody uses it any more.
        let _ = unsafe { result::comm_abort(raw.0) };
    }
    let _ = result::group_end();
}

impl Communicator {
    /// Begins to meet the other ranks that have the same id; [`settle`](Self::settle) waits for them. The rank's GPU
    /// is the current one of this thread.
    pub(super) fn join(id: &Id, rank: usize, ranks: usize) -> Result<Arc<Self>, String> {
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) };
        let (mut config, slot) = (config(), Slot::new());
        // SAFETY: the slot outlives the making: it goes with the communicator, which ends or aborts it before. NCCL
        // copies the rest.
        let started = unsafe {
            result::comm_init_rank_config(slot.0.as_ptr(), ranks as c_int, id, rank as c_int, &raw mut config)
        };
        let raw = slot.handle();
        let made = Self { raw: Mutex::new((!raw.0.is_null()).then_some(raw)), _made_at: slot };
        // One that is made in part is freed with it.
        started.map_err(|error| raw.describe(error.0))?;
        Ok(Arc::new(made))
    }

    /// Divides the communicator, collectively; ranks of one colour are ordered by `(key, rank)`.
    pub(super) fn split(
        &self,
        color: Option<usize>,
        key: usize,
        deadline: Instant,
    ) -> Result<Option<Arc<Self>>, String> {
        let color =
            color.map_or(Ok(NO_COLOR), c_int::try_from).map_err(|_| "a colour above 2³¹".to_owned())?;
        let key = c_int::try_from(key).map_err(|_| "a key above 2³¹".to_owned())?;
        let mut config = config();
        // Forgotten on the way out, unless the making has ended.
        let slot = std::mem::ManuallyDrop::new(Slot::new());
        self.call(deadline, |raw| {
            // SAFETY: `raw` is alive under its lock; the slot is leaked where this fails. NCCL copies the rest.
            unsafe { sys::ncclCommSplit(raw, color, key, slot.0.as_ptr(), &raw mut config) }.result()
        })?;
        let slot = std::mem::ManuallyDrop::into_inner(slot);
        let child = slot.handle();
        if child.0.is_null() {
            return Ok(None);
        }
        Ok(Some(Arc::new(Self { raw: Mutex::new(Some(child)), _made_at: slot })))
    }

    /// Makes a call and waits until NCCL has taken it (not until the GPU is done with it).
    pub(super) fn call(
        &self,
        deadline: Instant,
        call: impl FnOnce(sys::ncclComm_t) -> CallResult,
    ) -> Result<(), String> {
        self.with(|raw| call(raw.0).map_err(|error| raw.describe(error.0)))??;
        self.wait_ready(deadline)
    }

    /// Waits until NCCL has taken what was called last. It is asked whatever the call has returned: `ncclCommSplit`
    /// returns success while the child is still being made.
    pub(super) fn wait_ready(&self, deadline: Instant) -> Result<(), String> {
        loop {
            match self.with(Raw::state)? {
                sys::ncclResult_t::ncclSuccess => return Ok(()),
                sys::ncclResult_t::ncclInProgress if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
                sys::ncclResult_t::ncclInProgress => {
                    return Err("NCCL did not take the call in time; a rank did not make it".to_owned());
                }
                failure => return Err(self.with(|raw| raw.describe(failure))?),
            }
        }
    }

    /// What NCCL reports of a communicator that lives.
    pub(super) fn fault(&self) -> Option<String> {
        let reported = self.with(|raw| match raw.state() {
            sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress => None,
            failure => Some(raw.describe(failure)),
        });
        reported.ok().flatten()
    }

    /// One look or call at the handle, alone.
    fn with<R>(&self, run: impl FnOnce(Raw) -> R) -> Result<R, String> {
        let raw = self.raw.lock();
        raw.map(run).ok_or_else(|| "the communicator was aborted".to_owned())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the handle is alive under its lock.
        let finalized =
            self.call(Instant::now() + SHUTDOWN_TIMEOUT, |raw| unsafe { result::comm_finalize(raw) });
        let Some(raw) = self.raw.get_mut().take() else { return };
        // SAFETY: nobody else has the handle any more; it is destroyed or aborted, once.
        unsafe {
            let _ = if finalized.is_ok() { result::comm_destroy(raw.0) } else { result::comm_abort(raw.0) };
        }
    }
}

/// Defaults, but for calls that do not block.
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
        // SAFETY: a handle that lives, or null, which NCCL refuses; `state` outlives the call.
        match unsafe { sys::ncclCommGetAsyncError(self.0, &raw mut state) } {
            sys::ncclResult_t::ncclSuccess => state,
            failure => failure,
        }
    }

    /// NCCL's words for a failure, with its last message.
    fn describe(self, failure: sys::ncclResult_t) -> String {
        // SAFETY: takes any value, and gives a text of the program's.
        let kind = unsafe { text(sys::ncclGetErrorString(failure)) };
        // SAFETY: a handle that lives, or null; the text stays until the next call on it.
        let last = unsafe { text(sys::ncclGetLastError(self.0)) };
        let kind = kind.unwrap_or_else(|| format!("{failure:?}"));
        match last.filter(|last| !last.is_empty()) {
            Some(last) => format!("{kind}: {}", last.trim()),
            None => kind,
        }
    }
}

/// # Safety
/// `pointer` is null or a nul-terminated text that stays for the call.
unsafe fn text(pointer: *const std::ffi::c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}
