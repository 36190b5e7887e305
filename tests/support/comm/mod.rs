//! The conformance suite of `ProcessGroup`: one file per kind of operation, each case
//! a function over a [`Backend`], so that every backend runs the same cases.

pub(crate) mod cases;
pub(crate) mod counters;
pub(crate) mod exchange;
pub(crate) mod failures;
pub(crate) mod gather;
pub(crate) mod groups;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
pub(crate) mod pending;
pub(crate) mod point_to_point;
pub(crate) mod reduce;
pub(crate) mod whole;
pub(crate) mod wire;

use candle_core::{Device, Tensor};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use ulysses::comm::{
    Call, CallSignature, CommError, GroupStats, LaunchError, LaunchOptions, Membership, Pending,
    ProcessGroup, launch, pack_exchange_unpack,
};
#[cfg(feature = "cuda")]
use ulysses::device::DeviceKind;
use ulysses::tensor::{Element, to_vec};
pub(crate) use wire::Wire;

pub(crate) type Group = Arc<dyn ProcessGroup>;

/// An element type that ranks can return.
pub(crate) trait Value: Element + Wire {}
impl<T: Element + Wire> Value for T {}

/// The function that a rank runs. It returns its result serialized.
type Work<'a> = &'a (dyn Fn(Group) -> Result<Vec<u8>, CommError> + Sync);

/// The serialized results of all ranks, in rank order.
type Results = Result<Vec<Vec<u8>>, LaunchError>;

/// A backend that can start ranks. Results are serialized, so that it works as a trait object, and each case is compiled once for all
/// backends.
pub(crate) trait Backend {
    fn run_bytes(&self, world_size: usize, timeout: Duration, work: Work<'_>) -> Results;

    /// Runs `work`, which must fail. Returns the error of the launch and of each rank (`None` for a rank that
    /// panicked or succeeded).
    fn fail_for(
        &self,
        world_size: usize,
        timeout: Duration,
        work: &(dyn Fn(&Group) -> Result<(), CommError> + Sync),
    ) -> (LaunchError, Vec<Option<CommError>>) {
        let errors = Mutex::new(vec![None; world_size]);
        let launched = self.run_bytes(world_size, timeout, &|group| {
            let result = work(&group);
            errors.lock().unwrap()[group.rank()] = result.as_ref().err().cloned();
            result.map(|()| Vec::new())
        });
        (launched.unwrap_err(), errors.into_inner().unwrap())
    }
}

impl dyn Backend + '_ {
    pub(crate) fn run_for<T: Wire>(
        &self,
        world_size: usize,
        timeout: Duration,
        run: impl Fn(Group) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, LaunchError> {
        let results = self.run_bytes(world_size, timeout, &|group| Ok(run(group)?.to_bytes()))?;
        Ok(results.iter().map(|bytes| T::read(&mut bytes.as_slice())).collect())
    }

    /// Runs `work`, which must succeed. The timeout only prevents a hang of a broken backend.
    pub(crate) fn run<T: Wire>(
        &self,
        world_size: usize,
        run: impl Fn(Group) -> Result<T, CommError> + Sync,
    ) -> Vec<T> {
        self.run_for(world_size, Duration::from_secs(20), run).unwrap()
    }
}

/// The thread backend.
pub(crate) struct Threads {
    pub(crate) threads_per_rank: usize,
}

impl Backend for Threads {
    fn run_bytes(&self, world_size: usize, timeout: Duration, work: Work<'_>) -> Results {
        let options =
            LaunchOptions { threads_per_rank: self.threads_per_rank, timeout, ..Default::default() };
        launch(world_size, &options, |context| work(context.group))
    }
}

thread_local! {
    /// Device of this thread's test tensors.
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

fn device() -> Device {
    DEVICE.with_borrow(Clone::clone)
}

/// Runs a rank with its tensors on `device`.
#[cfg(feature = "cuda")]
fn on<R>(device: Device, run: impl FnOnce() -> R) -> R {
    DEVICE.set(device);
    run()
}

/// A backend whose ranks share the first GPU, each with its own stream.
#[cfg(feature = "cuda")]
pub(crate) struct OnOneGpu<B>(pub(crate) B);

#[cfg(feature = "cuda")]
impl<B: Backend> Backend for OnOneGpu<B> {
    fn run_bytes(&self, world_size: usize, timeout: Duration, work: Work<'_>) -> Results {
        self.0.run_bytes(world_size, timeout, &|group| on(DeviceKind::Cuda.open()?, || work(group)))
    }
}

/// The NCCL backend with one GPU per rank, if there are enough.
#[cfg(feature = "nccl")]
pub(crate) struct Nccl;

/// Returns the number of ranks in `ULYSSES_TEST_NCCL_RANKS`.
#[cfg(feature = "nccl")]
pub(crate) fn nccl_ranks() -> usize {
    let ranks = std::env::var("ULYSSES_TEST_NCCL_RANKS");
    ranks.map_or(1, |ranks| ranks.parse().expect("ULYSSES_TEST_NCCL_RANKS is a number of ranks"))
}

#[cfg(feature = "nccl")]
impl Backend for Nccl {
    fn run_bytes(&self, world_size: usize, timeout: Duration, work: Work<'_>) -> Results {
        let there_are = candle_core::cuda::cudarc::driver::CudaContext::device_count().unwrap_or(1).max(1);
        let gpus: Vec<usize> = (0..world_size).map(|rank| rank % there_are as usize).collect();
        let options = LaunchOptions { timeout, ..Default::default() };
        ulysses::comm::nccl::launch(&gpus, &options, |context| {
            on(context.group.value_device(), || work(context.group))
        })
    }
}

/// The thread backend behind [`DefaultsOnly`].
pub(crate) struct Defaults;

impl Backend for Defaults {
    fn run_bytes(&self, world_size: usize, timeout: Duration, work: Work<'_>) -> Results {
        Threads { threads_per_rank: 1 }
            .run_bytes(world_size, timeout, &|group| work(Arc::new(DefaultsOnly(group))))
    }
}

/// A group that implements only the required methods, so that the default methods are tested.
#[derive(Debug)]
struct DefaultsOnly(Group);

impl ProcessGroup for DefaultsOnly {
    fn membership(&self) -> &Membership {
        self.0.membership()
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        match call.signature() {
            CallSignature::AllToAllStrided { plan, .. } => {
                pack_exchange_unpack(self, call.inputs(), call.outputs(), plan)
            }
            _ => self.0.start(call),
        }
    }

    fn split(&self, name: &str, color: Option<usize>, key: usize) -> Result<Option<Group>, CommError> {
        Ok(self.0.split(name, color, key)?.map(|group| Arc::new(DefaultsOnly(group)) as Group))
    }

    fn stats(&self) -> GroupStats {
        self.0.stats()
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

/// Returns a flat tensor of `count` elements computed from their indices.
pub(crate) fn tensor<T: Element>(count: usize, element: impl Fn(usize) -> T) -> Tensor {
    Tensor::from_vec((0..count).map(element).collect::<Vec<T>>(), count, &device()).unwrap()
}

pub(crate) fn zeros<T: Element>(count: usize) -> Tensor {
    Tensor::zeros(count, T::DTYPE, &device()).unwrap()
}

pub(crate) fn values<T: Element>(tensor: &Tensor) -> Vec<T> {
    to_vec(tensor).unwrap()
}

/// Returns values that are exact in every dtype, as are their sums over eight ranks.
pub(crate) fn code<T: Element>(rank: usize, index: usize) -> T {
    T::from_f64((rank * 5 + index % 11) as f64)
}

/// Returns irregular values, whose sum depends on the order.
pub(crate) fn irregular(rank: usize, index: usize) -> f32 {
    ((index * 2_654_435_761 + rank * 40_503) % 100_003) as f32 * 1.7e-3 - 80.0
}

/// Calls a generic case with every dtype that collectives support.
macro_rules! for_each_dtype {
    ($case:ident($($argument:expr),*)) => {
        $case::<f32>($($argument),*);
        $case::<f64>($($argument),*);
        $case::<half::bf16>($($argument),*);
        $case::<half::f16>($($argument),*);
        $case::<i64>($($argument),*);
        $case::<u32>($($argument),*);
        $case::<u8>($($argument),*);
    };
}
pub(crate) use for_each_dtype;
