//! The launch of `kernels/lion.cu`.

use super::{Factors, LionParams};
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::LION};
use candle_core::Tensor;

pub(super) fn step(
    launcher: &Launcher,
    [param, grad, exp_avg]: [&Tensor; 3],
    params: &LionParams,
) -> Result<(), DeviceError> {
    let kernel = Kernel::new(&LION, "lion_step");
    let len = param.elem_count();
    let factors = Factors::new(params);
    launcher.open([param, exp_avg], [grad], |[param, exp_avg], [grad]| {
        let args = [
            param.into(),
            exp_avg.into(),
            grad.into(),
            (len as u64).into(),
            factors.grad_scale.into(),
            factors.one_minus_beta1.into(),
            factors.one_minus_beta2.into(),
            factors.lr.into(),
            factors.decay.into(),
        ];
        // SAFETY: all three tensors have `len` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(len), &args) }
    })
}
