//! The GEMM rate of all ranks together, the reference for a step's FLOP rate.

use candle_core::{DType, Device, Tensor};
use std::time::{Duration, Instant};
use ulysses::comm::{ProcessGroup, ProcessGroupExt, ReduceOp};
use ulysses::kernels::linear;

/// Rows and columns of the matrices: large enough for nearly the peak rate, at 3 MiB per rank.
const SIZE: usize = 512;

/// Minimum duration of the measurement.
const DURATION: Duration = Duration::from_millis(20);

/// Measures FLOP/s of `dtype` GEMMs on all ranks at the same time. `None` on a GPU, which the host cannot time.
/// Collective.
pub(super) fn measure(all: &dyn ProcessGroup, device: &Device, dtype: DType) -> anyhow::Result<Option<f64>> {
    if !device.is_cpu() {
        return Ok(None);
    }
    let matrix = || Tensor::ones((SIZE, SIZE), dtype, device);
    let (x, weight, y) = (matrix()?, matrix()?, matrix()?);
    linear::forward(&x, &weight, &y, false)?;
    all.barrier()?;
    let (start, mut num_gemms) = (Instant::now(), 0_u32);
    while start.elapsed() < DURATION {
        linear::forward(&x, &weight, &y, false)?;
        num_gemms += 1;
    }
    let flops = f64::from(num_gemms) * 2.0 * (SIZE as f64).powi(3);
    let rate = flops / start.elapsed().as_secs_f64();
    Ok(Some(all.all_reduce_values(&[rate], ReduceOp::Sum)?[0]))
}
