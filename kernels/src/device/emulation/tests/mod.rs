//! Kernels of `cuda/tests/`: faults that must be found, and the models of tensor-core instructions.

mod sanitizers;
mod tensor_cores;
mod tma;
mod warpgroups;

use crate::device::kernel::Source;
use crate::device::{Address, Arg, DeviceError, Grid, Kernel, Launcher};
use candle_core::{Device, Tensor};
use std::cell::Cell;
use std::ffi::CString;

/// The emulation knows kernels by name, so the text does not matter.
static TESTS: Source = Source { name: "tests", text: "", only_for: None };

// SAFETY: functions of `cuda/emulation/emulation.cpp`.
unsafe extern "C" {
    fn ulysses_emulation_set_seed(seed: u64);
    fn ulysses_emulation_bank_conflicts() -> u64;
}

/// Sets the order of blocks and threads of this thread's launches.
pub(crate) fn set_seed(seed: u64) {
    // SAFETY: it sets two variables of this thread.
    unsafe { ulysses_emulation_set_seed(seed) }
}

thread_local! {
    static FAULT: Cell<&'static str> = const { Cell::new("") };
}

/// Calls `run` with a fault of `cuda/tests/attention_faults.rs` in the kernels that this thread launches.
pub(crate) fn with_fault<R>(fault: &'static str, run: impl FnOnce() -> R) -> R {
    FAULT.set(fault);
    let result = run();
    FAULT.set("");
    result
}

/// The kernel with the fault of this thread, if it has one, or the right one.
pub(super) fn entry_point(name: &str) -> String {
    let faulty = format!("{}_{name}", FAULT.get());
    let is_kernel = CString::new(faulty.as_str()).is_ok_and(|name| {
        // SAFETY: `name` ends in a nul.
        !unsafe { super::ulysses_emulation_signature(name.as_ptr()) }.is_null()
    });
    if is_kernel { faulty } else { name.to_owned() }
}

/// Bank conflicts of this thread's launches since the last call.
pub(crate) fn bank_conflicts() -> u64 {
    // SAFETY: it reads and resets a variable of this thread.
    unsafe { ulysses_emulation_bank_conflicts() }
}

/// Launches `blocks` of `threads` of the test kernel `name` with the output, the inputs and `scalars`.
fn launch(
    name: &'static str,
    [blocks, threads, shared_bytes]: [usize; 3],
    output: &Tensor,
    inputs: &[&Tensor],
    scalars: &[u32],
) -> Result<(), DeviceError> {
    let grid = Grid { shared_bytes, ..Grid::blocks(blocks).of_threads(threads as u32) };
    Launcher::Emulated.open_slices(&[output], inputs, |addresses: &[Address]| {
        let scalars = scalars.iter().map(|scalar| Arg::from(*scalar));
        let args: Vec<_> = addresses.iter().map(|address| Arg::from(*address)).chain(scalars).collect();
        // SAFETY: the parameters are compared with the kernel's, and the emulation checks every access.
        unsafe { Launcher::Emulated.launch(&Kernel::new(&TESTS, name), grid, &args) }
    })
}

/// The message of a failed launch.
#[track_caller]
fn failure(result: Result<(), DeviceError>) -> String {
    result.expect_err("the fault is found").to_string()
}

fn floats(len: usize) -> Tensor {
    let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
    Tensor::from_vec(values, len, &Device::Cpu).unwrap()
}

fn words(values: Vec<u32>) -> Tensor {
    let len = values.len();
    Tensor::from_vec(values, len, &Device::Cpu).unwrap()
}
