//! What the groups of one rank share: its GPU, what is in progress there, the failure.

use super::communicator::{Communicator, abort};
use super::control_plane::{ControlPlane, Stall};
use super::recorder::{GpuOp, Recorder};
use super::watch::{Probe, Watched, inspect};
use crate::comm::call_signature::CallSignature;
use crate::comm::diagnostics::{CallLog, EntryReport, GroupLabel, Wait, lines};
use crate::comm::{CommError, ProcessGroup};
use candle_core::{Device, Tensor};
use cudarc::driver::{CudaEvent, CudaStream, DriverError};
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Between two looks at what is in progress: how soon a failure is noticed.
const WATCH_EVERY: Duration = Duration::from_millis(20);

/// One rank.
///
/// The fields are dropped in this order: what is in progress before the streams that it runs on, those before the device.
#[derive(Debug)]
pub(super) struct NcclRank {
    under_way: Mutex<Vec<Watched<UnderWay>>>,
    communicators: Mutex<Vec<Weak<Communicator>>>,
    /// What failed operations may still read or write.
    kept: Mutex<Vec<Tensor>>,
    /// The stream of all its communication: operations of several groups run in the order of issue, on all ranks.
    pub(super) communication: Arc<CudaStream>,
    /// The stream of the device's tensors.
    pub(super) compute: Arc<CudaStream>,
    pub(super) device: Device,
    /// The group of the same ranks that they met through, if they are threads of one process. It hears of their
    /// failures, and tells.
    bootstrap: Option<Arc<dyn ProcessGroup>>,
    /// What this rank hears of the others, if they are processes that have a connection. It goes with the last of the
    /// rank's groups, and says goodbye.
    control: Mutex<Option<ControlPlane>>,
    failure: OnceLock<CommError>,
    recorder: Mutex<Recorder>,
    pub(super) rank: usize,
    timeout: Mutex<Duration>,
    thread: ThreadId,
}

/// An operation on the GPU.
#[derive(Debug)]
pub(super) struct UnderWay {
    pub(super) done: Arc<CudaEvent>,
    /// Its group's: whoever drops the group ends the communicator, and not the thread that watches.
    pub(super) communicator: Weak<Communicator>,
}

impl Probe for UnderWay {
    fn is_done(&self) -> Result<bool, String> {
        self.done.try_is_complete().map_err(|error| error.to_string())
    }

    fn fault(&self) -> Option<String> {
        self.communicator.upgrade()?.fault()
    }
}

impl NcclRank {
    /// The rank whose thread calls. `device` is its GPU.
    pub(super) fn new(
        rank: usize,
        device: &Device,
        timeout: Duration,
        bootstrap: Option<Arc<dyn ProcessGroup>>,
    ) -> Result<Arc<Self>, CommError> {
        let refuse = |reason: String| CommError::Start { library: "NCCL", rank: Some(rank), reason };
        let Device::Cuda(cuda) = device else {
            return Err(refuse(format!("a rank needs a CUDA device, got {:?}", device.location())));
        };
        let compute = cuda.cuda_stream();
        let driver = |error: DriverError| refuse(error.to_string());
        let communication = compute.context().new_stream().map_err(driver)?;
        compute.context().bind_to_thread().map_err(driver)?;
        let own = Arc::new(Self {
            under_way: Mutex::default(),
            communicators: Mutex::default(),
            kept: Mutex::default(),
            communication,
            compute,
            device: device.clone(),
            bootstrap,
            control: Mutex::default(),
            failure: OnceLock::new(),
            recorder: Mutex::default(),
            rank,
            timeout: Mutex::new(timeout),
            thread: std::thread::current().id(),
        });
        let watched = Arc::downgrade(&own);
        let watcher = std::thread::Builder::new().name(format!("nccl-watch-{rank}"));
        watcher
            .spawn(move || watch(&watched))
            .map_err(|error| refuse(format!("cannot start a thread: {error}")))?;
        Ok(own)
    }

    /// By when NCCL must have taken a call that is made now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + *self.timeout.lock()
    }

    /// From now on operations may take so long.
    pub(super) fn set_timeout(&self, timeout: Duration) {
        *self.timeout.lock() = timeout;
    }

    /// From now on the rank hears of the others, and they of it.
    pub(super) fn set_control(&self, control: ControlPlane) {
        *self.control.lock() = Some(control);
    }

    /// From now on calls are compared, and remembered by who compares them.
    pub(super) fn set_checked(&self) {
        self.recorder.lock().set_checked();
    }

    /// Tells the others that this rank issues nothing any more.
    pub(super) fn end(&self) {
        if let Some(control) = &mut *self.control.lock() {
            control.announce_shutdown();
        }
    }

    /// Lets the rank end without a word: it has panicked.
    pub(super) fn skip_shutdown_notice(&self) {
        if let Some(control) = &mut *self.control.lock() {
            control.skip_shutdown_notice();
        }
    }

    /// Whether this is the thread of the rank: NCCL wants the calls of all ranks in one order.
    pub(super) fn is_own_thread(&self) -> bool {
        std::thread::current().id() == self.thread
    }

    /// Lets a failure of the rank abort the communicator too.
    ///
    /// # Errors
    /// That failure, if it came first.
    pub(super) fn adopt(&self, communicator: &Arc<Communicator>) -> Result<(), CommError> {
        self.communicators.lock().push(Arc::downgrade(communicator));
        if let Some(failure) = self.failure.get() {
            self.abort();
            return Err(failure.clone());
        }
        Ok(())
    }

    /// Looks after an operation of a group from now on: a collective, or messages.
    pub(super) fn watch(
        &self,
        operation: Watched<UnderWay>,
        group: &Arc<GroupLabel>,
        calls: impl IntoIterator<Item = CallSignature>,
    ) {
        let mut recorder = self.recorder.lock();
        calls.into_iter().for_each(|call| recorder.issued(group, operation.sequence, call));
        drop(recorder);
        self.under_way.lock().push(operation);
    }

    /// Keeps tensors to its own end: of operations that failed, whose memory a straggler may still use.
    pub(super) fn retain(&self, tensors: Vec<Tensor>) {
        self.kept.lock().extend(tensors);
    }

    /// The error that counts, once there is one.
    pub(super) fn check(&self) -> Result<(), CommError> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        self.bootstrap.as_ref().map_or(Ok(()), |bootstrap| bootstrap.check())
    }

    /// Fails the rank, unless it has failed before; returns the error that counts. NCCL's kernels end, so that
    /// nobody waits for the GPU for ever, and what they have written is worth nothing.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        let is_first = self.failure.set(error.clone()).is_ok();
        let failure = self.failure.get().cloned().unwrap_or(error);
        // The others first: what follows may have to wait for them to abort theirs.
        if let Some(bootstrap) = &self.bootstrap {
            bootstrap.abort(&failure.to_string());
        }
        if let Some(control) = self.control.lock().as_mut().filter(|_| is_first) {
            control.announce_failure(&failure);
        }
        self.abort();
        failure
    }

    fn abort(&self) {
        let adopted: Vec<_> = self.communicators.lock().drain(..).collect();
        abort(&adopted.iter().filter_map(Weak::upgrade).collect::<Vec<_>>());
    }

    /// What the rank has called last, and what of it keeps the rank.
    fn last_calls(&self) -> (Vec<EntryReport>, Option<Wait>) {
        let (on_gpu, recorder) = (self.on_gpu(), self.recorder.lock());
        (recorder.report(&on_gpu), recorder.wait(&on_gpu))
    }

    fn on_gpu(&self) -> Vec<GpuOp> {
        let gpu_op =
            |operation: &Watched<UnderWay>| (operation.group.clone(), operation.op, operation.sequence);
        self.under_way.lock().iter().map(gpu_op).collect()
    }

    /// For how long the rank is kept, if that is longer than an operation may take.
    fn waited(&self) -> Option<Duration> {
        let (now, timeout) = (Instant::now(), *self.timeout.lock());
        let waited = self.under_way.lock().iter().map(|operation| operation.waited(now)).max()?;
        (waited >= timeout).then_some(waited)
    }

    /// Logs what the rank has called last and, when others keep it waiting, asks which. Returns what is known then.
    fn explain(&self, error: CommError) -> CommError {
        let (called, wait) = self.last_calls();
        tracing::error!("{error}; last operations of rank {}:{}", self.rank, lines(&called));
        let mut control = self.control.lock();
        let Some(control) = control.as_mut() else { return error };
        let stall = wait.zip(self.waited()).filter(|_| self.failure.get().is_none());
        let found = stall.and_then(|(wait, waited)| control.find_missing(&Stall { wait, waited }, called));
        let error = found.unwrap_or(error);
        if let Some(first_divergence) = control.first_divergence(&error) {
            tracing::error!("first divergence of the ranks:{first_divergence}");
        }
        error
    }

    /// Hears of the others.
    fn listen(&self) -> Result<(), CommError> {
        self.control.lock().as_mut().map_or(Ok(()), |control| control.listen(|| self.last_calls()))
    }

    /// Looks at what is in progress. It is taken out meanwhile, so that the rank's thread never waits for this.
    fn inspect(&self) -> Result<(), CommError> {
        let mut under_way = std::mem::take(&mut *self.under_way.lock());
        let outcome = inspect(&mut under_way, Instant::now(), *self.timeout.lock());
        let mut issued_since = self.under_way.lock();
        under_way.append(&mut issued_since);
        *issued_since = under_way;
        outcome
    }
}

/// Looks after a rank until it has failed or is gone.
fn watch(own: &Weak<NcclRank>) {
    loop {
        std::thread::sleep(WATCH_EVERY);
        let Some(own) = own.upgrade() else { return };
        let bound = own.compute.context().bind_to_thread();
        let outcome = bound.map_err(|error| CommError::Tensor(error.to_string())).and_then(|()| {
            own.check()?;
            own.listen()?;
            own.inspect()
        });
        if let Err(error) = outcome {
            let error = own.explain(error);
            own.fail(error);
            return;
        }
    }
}

impl CallLog for NcclRank {
    fn called(&self, group: &Arc<GroupLabel>, sequence: u64, call: &CallSignature) {
        self.recorder.lock().comparing(group, sequence, call.clone());
    }

    fn agreed(&self) {
        self.recorder.lock().agreed();
    }
}
