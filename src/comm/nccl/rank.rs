//! State shared by the groups of one rank: its GPU, its operations in progress, its failure.

use super::communicator::{Communicator, abort};
use super::control_plane::{ControlPlane, Stall};
use super::recorder::Recorder;
use super::watch::{Probe, Watched, inspect};
use crate::comm::diagnostics::{CallLog, CallReport, OpLabel, lines};
use crate::comm::{CallSignature, CommError, ProcessGroup};
use candle_core::{Device, Tensor};
use cudarc::driver::{CudaEvent, CudaStream, DriverError};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};
use ulysses_kernels::device::load_library_kernels;

/// Time for the watching thread to find out why NCCL does not accept a call, before the call ends by itself.
const EXPLANATION: Duration = Duration::from_secs(5);
/// Interval between polls of the operations in progress; it bounds how late a failure is noticed.
const WATCH_EVERY: Duration = Duration::from_millis(20);

/// The state of one rank.
///
/// The fields are dropped in this order: operations before their streams, streams before the device.
#[derive(Debug)]
pub(super) struct NcclRank {
    in_progress: Mutex<Vec<Watched<InProgress>>>,
    communicators: Mutex<Vec<Weak<Communicator>>>,
    /// Tensors of failed operations, which the GPU may still access.
    retained: Mutex<Vec<Tensor>>,
    /// The stream of all its communication. Operations of several groups run in issue order, on all ranks.
    pub(super) communication: Arc<CudaStream>,
    /// The stream of the device's tensors.
    pub(super) compute: Arc<CudaStream>,
    pub(super) device: Device,
    /// For threads of one process, the group of the same ranks that was used to start NCCL. It carries
    /// failures in both directions.
    bootstrap: Option<Arc<dyn ProcessGroup>>,
    /// For processes connected by a store, the control messages of this rank. It is closed with the last of the
    /// rank's groups, and then announces the shutdown.
    control: Mutex<Option<ControlPlane>>,
    failure: OnceLock<CommError>,
    recorder: Mutex<Recorder>,
    pub(super) rank: usize,
    timeout: Mutex<Duration>,
    thread: ThreadId,
}

/// An operation that NCCL or the GPU has not completed.
#[derive(Debug)]
pub(super) struct InProgress {
    pub(super) position: Position,
    /// Weak, so that the communicator is freed by whoever drops the group, not by the watching thread.
    pub(super) communicator: Weak<Communicator>,
}

/// How far an operation has come.
#[derive(Debug)]
pub(super) enum Position {
    /// NCCL accepts the call, for which ranks that connect wait for each other. The flag is set when it has ended.
    Accepting(Arc<AtomicBool>),
    /// On the stream, between two events.
    Enqueued { reached: CudaEvent, done: Arc<CudaEvent> },
}

impl Probe for InProgress {
    fn has_started(&self) -> Result<bool, String> {
        match &self.position {
            Position::Accepting(_) => Ok(true),
            Position::Enqueued { reached, .. } => {
                reached.try_is_complete().map_err(|error| error.to_string())
            }
        }
    }

    fn is_done(&self) -> Result<bool, String> {
        match &self.position {
            Position::Accepting(has_ended) => Ok(has_ended.load(Ordering::Relaxed)),
            Position::Enqueued { done, .. } => done.try_is_complete().map_err(|error| error.to_string()),
        }
    }

    fn fault(&self) -> Option<String> {
        self.communicator.upgrade()?.fault()
    }
}

impl NcclRank {
    /// Creates the rank of the calling thread. `device` is its GPU.
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
        compute.context().bind_to_thread().map_err(driver)?;
        // Otherwise the blocks of attention that are queued on all multiprocessors delay a transfer that overlaps.
        let (_, highest) = cudarc::driver::result::stream::get_priority_range().map_err(driver)?;
        let communication = compute.context().new_stream_with_priority(highest).map_err(driver)?;
        load_library_kernels(device).map_err(|error| refuse(error.to_string()))?;
        let own = Arc::new(Self {
            in_progress: Mutex::default(),
            communicators: Mutex::default(),
            retained: Mutex::default(),
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

    /// Deadline for NCCL to accept a call made now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + *self.timeout.lock()
    }

    /// Sets the timeout of operations.
    pub(super) fn set_timeout(&self, timeout: Duration) {
        *self.timeout.lock() = timeout;
    }

    /// Sets the control messages of this rank.
    pub(super) fn set_control(&self, control: ControlPlane) {
        *self.control.lock() = Some(control);
    }

    /// Records that calls are compared, and logged by the desync check.
    pub(super) fn set_checked(&self) {
        self.recorder.lock().set_checked();
    }

    /// Announces that this rank issues no more operations.
    pub(super) fn end(&self) {
        if let Some(control) = &mut *self.control.lock() {
            control.announce_shutdown();
        }
    }

    /// Ends without a shutdown notice, because the rank has panicked.
    pub(super) fn skip_shutdown_notice(&self) {
        if let Some(control) = &mut *self.control.lock() {
            control.skip_shutdown_notice();
        }
    }

    /// Returns whether this is the rank's thread: NCCL requires the same order of calls on all ranks.
    pub(super) fn is_own_thread(&self) -> bool {
        std::thread::current().id() == self.thread
    }

    /// Registers a communicator, to be aborted if the rank fails.
    ///
    /// # Errors
    /// The failure, if the rank has failed already.
    pub(super) fn adopt(&self, communicator: &Arc<Communicator>) -> Result<(), CommError> {
        self.communicators.lock().push(Arc::downgrade(communicator));
        if let Some(failure) = self.failure.get() {
            self.abort_communicators();
            return Err(failure.clone());
        }
        Ok(())
    }

    /// Deadline for NCCL to accept a watched operation.
    pub(super) fn watched_deadline(&self) -> Instant {
        self.deadline() + EXPLANATION
    }

    /// Records an operation of a group: a collective, or messages.
    pub(super) fn record(&self, label: &OpLabel, calls: impl IntoIterator<Item = CallSignature>) {
        let mut recorder = self.recorder.lock();
        for call in calls {
            recorder.issued(OpLabel { op: call.op(), ..label.clone() }, call);
        }
    }

    /// Starts to watch an operation.
    pub(super) fn watch(&self, operation: Watched<InProgress>) {
        self.in_progress.lock().push(operation);
    }

    /// Keeps tensors of failed operations until the rank is dropped: a straggler may still use their memory.
    pub(super) fn retain(&self, tensors: Vec<Tensor>) {
        self.retained.lock().extend(tensors);
    }

    /// Returns the first error of the rank, if there is one.
    pub(super) fn check(&self) -> Result<(), CommError> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        self.bootstrap.as_ref().map_or(Ok(()), |bootstrap| bootstrap.check())
    }

    /// Fails the rank, unless it has failed before. Returns the first error. NCCL's kernels end, so that
    /// no wait for the GPU hangs, and the data that they have written is invalid.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        let is_first = self.failure.set(error.clone()).is_ok();
        let failure = self.failure.get().cloned().unwrap_or(error);
        // Notify the other ranks first: later steps may have to wait until they abort their communicators.
        if let Some(bootstrap) = &self.bootstrap {
            bootstrap.abort(&match &failure {
                CommError::PeerFailed { rank, reason } if *rank == self.rank => reason.clone(),
                other => other.to_string(),
            });
        }
        if let Some(control) = self.control.lock().as_mut().filter(|_| is_first) {
            control.announce_failure(&failure);
        }
        self.abort_communicators();
        failure
    }

    /// Fails the rank because of its own failure.
    pub(super) fn abort(&self, reason: String) {
        self.fail(CommError::PeerFailed { rank: self.rank, reason });
    }

    /// Aborts all communicators.
    pub(super) fn abort_communicators(&self) {
        let adopted: Vec<_> = self.communicators.lock().drain(..).collect();
        abort(&adopted.iter().filter_map(Weak::upgrade).collect::<Vec<_>>());
    }

    /// Returns the last calls of the rank, and the operation that blocks it.
    fn last_calls(&self) -> CallReport {
        let on_gpu: Vec<OpLabel> =
            self.in_progress.lock().iter().map(|operation| operation.label.clone()).collect();
        self.recorder.lock().report(&on_gpu)
    }

    /// Returns how long the rank has been blocked, if that exceeds the timeout.
    fn waited(&self) -> Option<Duration> {
        let (now, timeout) = (Instant::now(), *self.timeout.lock());
        let waited = self.in_progress.lock().iter().map(|operation| operation.waited(now)).max()?;
        (waited >= timeout).then_some(waited)
    }

    /// Logs the last calls of the rank. If other ranks block it, determines which, and returns the resulting error.
    fn explain(&self, error: CommError) -> CommError {
        let CallReport { calls: called, wait } = self.last_calls();
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

    /// Receives control messages.
    fn listen(&self) -> Result<(), CommError> {
        self.control.lock().as_mut().map_or(Ok(()), |control| control.listen(|| self.last_calls()))
    }

    /// Checks the operations in progress. They are taken out meanwhile, so that the rank's thread never waits for this.
    fn inspect(&self) -> Result<(), CommError> {
        let mut in_progress = std::mem::take(&mut *self.in_progress.lock());
        let outcome = inspect(&mut in_progress, Instant::now(), *self.timeout.lock());
        let mut issued_since = self.in_progress.lock();
        in_progress.append(&mut issued_since);
        *issued_since = in_progress;
        outcome
    }
}

/// Watches a rank until it has failed or was dropped.
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
    fn called(&self, label: OpLabel, call: &CallSignature) {
        self.recorder.lock().comparing(label, call.clone());
    }

    fn agreed(&self) {
        self.recorder.lock().agreed();
    }
}
