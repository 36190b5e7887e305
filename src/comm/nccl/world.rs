//! What the groups of one rank share: its GPU, what is under way there, the failure.

use super::communicator::{Communicator, abort};
use super::watch::{Probe, Watched, inspect};
use crate::comm::history::{History, Label, Record, lines};
use crate::comm::{CollectiveOp, CommError, ProcessGroup};
use candle_core::{Device, Tensor};
use cudarc::driver::{CudaEvent, CudaStream, DriverError};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Between two looks at what is under way: how soon a failure is noticed.
const WATCH_EVERY: Duration = Duration::from_millis(20);

/// One rank.
///
/// The fields are dropped in this order: what is under way before the streams that it runs on, those before the device.
#[derive(Debug)]
pub(super) struct World {
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
    failure: OnceLock<CommError>,
    history: Mutex<History<CollectiveOp>>,
    issued: AtomicU64,
    pub(super) rank: usize,
    pub(super) timeout: Duration,
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

impl World {
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
        let world = Arc::new(Self {
            under_way: Mutex::default(),
            communicators: Mutex::default(),
            kept: Mutex::default(),
            communication,
            compute,
            device: device.clone(),
            bootstrap,
            failure: OnceLock::new(),
            history: Mutex::default(),
            issued: AtomicU64::new(0),
            rank,
            timeout,
            thread: std::thread::current().id(),
        });
        let watched = Arc::downgrade(&world);
        let watcher = std::thread::Builder::new().name(format!("nccl-watch-{rank}"));
        watcher
            .spawn(move || watch(&watched))
            .map_err(|error| refuse(format!("cannot start a thread: {error}")))?;
        Ok(world)
    }

    /// By when NCCL must have taken a call that is made now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
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

    pub(super) fn watch(&self, operation: Watched<UnderWay>) {
        let Watched { group, op, sequence, .. } = &operation;
        // Who else is in the group does not matter here: ranks do not compare what they remember.
        let group = Arc::new(Label { name: group.clone(), members: Vec::new() });
        let is_collective = !matches!(op, CollectiveOp::Send | CollectiveOp::Recv);
        let id = self.issued.fetch_add(1, Ordering::Relaxed);
        self.history.lock().add(Record { id, group, sequence: *sequence, is_collective, call: *op });
        self.under_way.lock().push(operation);
    }

    /// Keeps tensors to its own end: of operations that failed, whose memory a straggler may still use.
    pub(super) fn keep(&self, tensors: Vec<Tensor>) {
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
        let failure = self.failure.get_or_init(|| error).clone();
        // The others first: what follows may have to wait for them to abort theirs.
        if let Some(bootstrap) = &self.bootstrap {
            bootstrap.abort(&failure.to_string());
        }
        self.abort();
        failure
    }

    fn abort(&self) {
        let adopted: Vec<_> = self.communicators.lock().drain(..).collect();
        abort(&adopted.iter().filter_map(Weak::upgrade).collect::<Vec<_>>());
    }

    /// Logs what the rank has called last.
    fn tell_history(&self, error: &CommError) {
        let under_way = self.under_way.lock();
        let told = self.history.lock().tell_by(|record, _| {
            under_way.iter().any(|Watched { group, op, sequence, .. }| {
                (group, op, sequence) == (&record.group.name, &record.call, &record.sequence)
            })
        });
        tracing::error!("{error}; the last operations of rank {}:{}", self.rank, lines(&told));
    }

    /// Looks at what is under way. It is taken out meanwhile, so that the rank's thread never waits for this.
    fn inspect(&self) -> Result<(), CommError> {
        let mut under_way = std::mem::take(&mut *self.under_way.lock());
        let outcome = inspect(&mut under_way, Instant::now(), self.timeout);
        let mut issued_since = self.under_way.lock();
        under_way.append(&mut issued_since);
        *issued_since = under_way;
        outcome
    }
}

/// Looks after a rank until it has failed or is gone.
fn watch(world: &Weak<World>) {
    loop {
        std::thread::sleep(WATCH_EVERY);
        let Some(world) = world.upgrade() else { return };
        let bound = world.compute.context().bind_to_thread();
        let outcome = bound.map_err(|error| CommError::Tensor(error.to_string())).and_then(|()| {
            world.check()?;
            world.inspect()
        });
        if let Err(error) = outcome {
            world.tell_history(&error);
            world.fail(error);
            return;
        }
    }
}
