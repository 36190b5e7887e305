//! The device under test, from `ULYSSES_TEST_DEVICE`: `cpu` (default), `cuda` (feature `cuda`; the
//! ranks share the first GPU) or `nccl` (feature `nccl`; a GPU per rank).

use anyhow::Result;
use candle_core::Device;
use std::cell::{Cell, RefCell};
use ulysses::comm::thread::{self, LaunchError, LaunchOptions};
use ulysses::comm::{MeshGroups, RankContext};
use ulysses::mesh::DeviceMesh;

thread_local! {
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };

    /// Whether the ranks that this thread launches run on the CPU.
    static LAUNCHES_ON_CPU: Cell<bool> = const { Cell::new(false) };
}

/// Runs every rank of a mesh on the device under test.
pub fn launch<T: Send>(
    mesh: &DeviceMesh,
    options: &LaunchOptions,
    run: impl Fn(usize, MeshGroups) -> Result<T> + Sync,
) -> Result<Vec<T>, LaunchError> {
    let on_rank = |rank: RankContext| run(rank.rank, MeshGroups::new(mesh, rank.group)?);
    if LAUNCHES_ON_CPU.get() {
        return thread::launch(mesh.world_size(), options, on_rank);
    }
    #[cfg(feature = "nccl")]
    if choice() == "nccl" {
        let gpus: Vec<usize> = (0..mesh.world_size()).collect();
        return ulysses::comm::nccl::launch(&gpus, options, |rank| {
            DEVICE.set(rank.group.value_device());
            on_rank(rank)
        });
    }
    thread::launch(mesh.world_size(), options, |rank| on_test_device(|| on_rank(rank)))
}

/// Calls `run`, which launches its ranks on the CPU: for expected values that candle's ops compute, of which simulated
/// GPUs have few.
pub fn with_ranks_on_cpu<R>(run: impl FnOnce() -> R) -> R {
    LAUNCHES_ON_CPU.set(true);
    let result = run();
    LAUNCHES_ON_CPU.set(false);
    result
}

/// Runs one rank of a test on the device under test.
pub fn on_test_device<R>(run: impl FnOnce() -> R) -> R {
    match choice().as_str() {
        "cpu" => run(),
        "cuda" => {
            let device = ulysses::device::DeviceKind::Cuda.open();
            DEVICE.set(device.expect("a GPU, as ULYSSES_TEST_DEVICE asks for"));
            run()
        }
        other => panic!("ULYSSES_TEST_DEVICE={other}: this build supports no such device"),
    }
}

fn choice() -> String {
    std::env::var("ULYSSES_TEST_DEVICE").unwrap_or_else(|_| "cpu".to_owned())
}

/// Returns whether the device under test is the CPU.
pub fn is_cpu() -> bool {
    choice() == "cpu"
}

/// Returns the place to offload to from the device under test: a file for the CPU, host memory for kernels.
pub fn offload_target() -> &'static str {
    if is_cpu() { "nvme" } else { "cpu" }
}

/// Returns the device of this thread's rank.
pub fn test_device() -> Device {
    DEVICE.with_borrow(Device::clone)
}
