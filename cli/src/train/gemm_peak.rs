//! What the ranks reach together in matrix products: what a step's arithmetic is measured by.

use candle_core::{DType, Device, Tensor};
use std::time::{Duration, Instant};
use ulysses::comm::{ProcessGroup, ProcessGroupExt, ReduceOp};
use ulysses::kernels::linear;

/// Rows and columns of the product: large enough to be near the best rate, at 3 MiB for each rank.
const SIZE: usize = 512;

/// How long a rank multiplies at least.
const DURATION: Duration = Duration::from_millis(20);

/// Floating-point operations per second, in products of `dtype`, of all ranks at the same time; none on a GPU, where the host cannot
/// tell. Collective.
pub(super) fn measure(all: &dyn ProcessGroup, device: &Device, dtype: DType) -> anyhow::Result<Option<f64>> {
    if !device.is_cpu() {
        return Ok(None);
    }
    let matrix = || Tensor::ones((SIZE, SIZE), dtype, device);
    let (x, weight, y) = (matrix()?, matrix()?, matrix()?);
    linear::forward(&x, &weight, &y, false)?;
    all.barrier()?;
    let (begun, mut products) = (Instant::now(), 0_u32);
    while begun.elapsed() < DURATION {
        linear::forward(&x, &weight, &y, false)?;
        products += 1;
    }
    let flops = f64::from(products) * 2.0 * (SIZE as f64).powi(3);
    let rate = flops / begun.elapsed().as_secs_f64();
    Ok(Some(all.all_reduce_values(&[rate], ReduceOp::Sum)?[0]))
}
