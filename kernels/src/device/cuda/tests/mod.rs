//! Kernels of `cuda/tests/`: the instructions of tensor cores, and faults that the fake driver must find.

mod on_a_gpu;
mod on_the_fake_driver;

use crate::device::kernel::Source;
use crate::device::{Address, Arg, DeviceError, Grid, Kernel, Launcher, Target};
use crate::testing::device;
use candle_core::Tensor;

fn launcher() -> Launcher {
    match Target::of(&device()) {
        Ok(Target::Kernels(launcher)) => launcher,
        _ => panic!("the tests' device is a GPU"),
    }
}

/// Launches `blocks` of `threads` of a test kernel with the output, the inputs and `scalars`.
fn launch(
    (source, name): (&'static Source, &'static str),
    [blocks, threads, shared_bytes]: [usize; 3],
    output: &Tensor,
    inputs: &[&Tensor],
    scalars: &[u32],
) -> Result<(), DeviceError> {
    let grid = Grid { shared_bytes, ..Grid::blocks(blocks).of_threads(threads as u32) };
    let launcher = launcher();
    launcher.open_slices(&[output], inputs, |addresses: &[Address]| {
        let scalars = scalars.iter().map(|scalar| Arg::from(*scalar));
        let args: Vec<_> = addresses.iter().map(|address| Arg::from(*address)).chain(scalars).collect();
        // SAFETY: the parameters of the kernel. Kernels with faults run on the fake driver only, which checks accesses.
        unsafe { launcher.launch(&Kernel::new(source, name), grid, &args) }
    })
}

fn floats(len: usize) -> Tensor {
    let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
    Tensor::from_vec(values, len, &device()).unwrap()
}

fn words(values: Vec<u32>) -> Tensor {
    let len = values.len();
    Tensor::from_vec(values, len, &device()).unwrap()
}
