//! The launches of `cuda/elementwise.cu`.

use crate::device::{Address, Arg, DeviceError, Grid, Kernel, Launcher, sources::ELEMENTWISE};
use crate::tensor::{to_vec, zeros};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// Maximum number of blocks of a reduction: as many as an H100 runs at once. A constant, because the order of
/// summation must not depend on the GPU.
const MAX_BLOCKS: usize = 1024;

/// Copies the partial sums of all tensors to the host together, with one synchronization, and adds them there
/// in order.
pub(super) fn sums_of_squares(launcher: &Launcher, tensors: &[&Tensor]) -> Result<Vec<f64>, DeviceError> {
    let blocks: Vec<usize> = tensors.iter().map(|x| blocks(x)).collect();
    let results = results(blocks.iter().sum(), DType::F64, tensors)?;
    let mut first = 0;
    for (&x, &blocks) in tensors.iter().zip(&blocks) {
        reduce_blocks(launcher, "elementwise_sum_of_squares", x, &results, first..first + blocks)?;
        first += blocks;
    }
    let mut sums = to_vec::<f64>(&results)?.into_iter();
    Ok(blocks.iter().map(|&blocks| sums.by_ref().take(blocks).sum()).collect())
}

/// Copies one flag per block to the host, and synchronizes.
pub(super) fn all_finite(launcher: &Launcher, x: &Tensor) -> Result<bool, DeviceError> {
    let blocks = blocks(x);
    let found = results(blocks, DType::F32, &[x])?;
    reduce_blocks(launcher, "elementwise_find_non_finite", x, &found, 0..blocks)?;
    Ok(to_vec::<f32>(&found)?.into_iter().all(|found| found == 0.0))
}

/// Number of blocks of a reduction over `x`.
fn blocks(x: &Tensor) -> usize {
    x.elem_count().div_ceil(Grid::TILE).min(MAX_BLOCKS)
}

/// Allocates the results of `blocks` blocks; one element if there are none, since CUDA cannot allocate zero
/// bytes.
fn results(blocks: usize, dtype: DType, tensors: &[&Tensor]) -> candle_core::Result<Tensor> {
    let device = tensors.first().map_or(&Device::Cpu, |x| x.device());
    zeros(blocks.max(1), dtype, device)
}

/// Writes the partial results of a reduction over `x`, one per block, to these elements of `results`.
fn reduce_blocks(
    launcher: &Launcher,
    kernel: &'static str,
    x: &Tensor,
    results: &Tensor,
    of_blocks: Range<usize>,
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&ELEMENTWISE, kernel, x.dtype())?;
    let size = x.elem_count();
    launcher.open([results], [x], |[results], [x]| {
        let args = [results.offset(of_blocks.start).into(), x.into(), (size as u64).into()];
        // SAFETY: `x` has `size` elements, `results` one of the kernel's type for every block.
        unsafe { launcher.launch(&kernel, Grid::blocks(of_blocks.len()), &args) }
    })
}

/// Adds the partial sums of blocks, `[blocks, …]`, in order: to `sums` their elements from `first` on, as many as it has.
pub(crate) fn add_blocks(
    launcher: &Launcher,
    sums: &Tensor,
    partial: &Tensor,
    first: usize,
) -> Result<(), DeviceError> {
    let kernel = Kernel::new(&ELEMENTWISE, "elementwise_add_blocks");
    let (size, blocks) = (sums.elem_count(), partial.dims()[0]);
    let row = partial.elem_count() / blocks.max(1);
    launcher.open([sums], [partial], |[sums], [partial]| {
        let counts = [blocks, row, size].map(|count| (count as u32).into());
        let args = [&[sums.into(), partial.offset(first).into()], &counts[..]].concat();
        // SAFETY: `sums` has `size` elements, and `partial` as many from `first` on in each of its rows.
        unsafe { launcher.launch(&kernel, Grid::threads(size), &args) }
    })
}

/// dst += src, where `dst` has the element type of `src` or is f32.
pub(super) fn accumulate(launcher: &Launcher, dst: &Tensor, src: &Tensor) -> Result<(), DeviceError> {
    let name =
        if dst.dtype() == src.dtype() { "elementwise_accumulate" } else { "elementwise_accumulate_in_f32" };
    let kernel = Kernel::of_dtype(&ELEMENTWISE, name, src.dtype())?;
    two_tensors(launcher, &kernel, dst, src)
}

fn two_tensors(launcher: &Launcher, kernel: &Kernel, dst: &Tensor, src: &Tensor) -> Result<(), DeviceError> {
    launcher.open([dst], [src], |[dst_at], [src]| {
        // SAFETY: both tensors have as many elements, and the element types of the kernel.
        unsafe { over_tiles(launcher, kernel, dst, dst_at, src.into()) }
    })
}

pub(super) fn scale(launcher: &Launcher, dst: &Tensor, factor: f32) -> Result<(), DeviceError> {
    one_tensor(launcher, "elementwise_scale", dst, factor)
}

/// dst *= factor, where `factor` has one element.
pub(super) fn scale_by(launcher: &Launcher, dst: &Tensor, factor: &Tensor) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&ELEMENTWISE, "elementwise_scale_by", dst.dtype())?;
    launcher.open([dst], [factor], |[dst_at], [factor]| {
        // SAFETY: the kernel reads the one element of `factor`, of the type of `dst`.
        unsafe { over_tiles(launcher, &kernel, dst, dst_at, factor.into()) }
    })
}

pub(super) fn softcap(launcher: &Launcher, dst: &Tensor, cap: f32) -> Result<(), DeviceError> {
    one_tensor(launcher, "elementwise_softcap", dst, cap)
}

/// Writes the same value to all elements.
pub(crate) fn fill(launcher: &Launcher, dst: &Tensor, value: f32) -> Result<(), DeviceError> {
    one_tensor(launcher, "elementwise_fill", dst, value)
}

fn one_tensor(
    launcher: &Launcher,
    kernel: &'static str,
    dst: &Tensor,
    value: f32,
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&ELEMENTWISE, kernel, dst.dtype())?;
    launcher.open([dst], [], |[dst_at], []| {
        // SAFETY: the kernel accesses the elements of `dst` only.
        unsafe { over_tiles(launcher, &kernel, dst, dst_at, value.into()) }
    })
}

/// Launches `kernel(dst, second, size)` over the tiles of `dst`, which has been opened at `dst_at`.
///
/// # Safety
/// `second` is the kernel's second parameter; an address has as many elements as the kernel reads.
unsafe fn over_tiles(
    launcher: &Launcher,
    kernel: &Kernel,
    dst: &Tensor,
    dst_at: Address,
    second: Arg<'_>,
) -> Result<(), DeviceError> {
    let size = dst.elem_count();
    let args = [dst_at.into(), second, (size as u64).into()];
    // SAFETY: by this function's contract; `dst` has `size` elements.
    unsafe { launcher.launch(kernel, Grid::tiles(size), &args) }
}
