//! The launch of `kernels/adagrad.cu`.

use super::{AdagradParams, Factors};
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::ADAGRAD};
use candle_core::Tensor;

pub(super) fn step(
    launcher: &Launcher,
    [param, grad, state_sum]: [&Tensor; 3],
    params: &AdagradParams,
) -> Result<(), DeviceError> {
    let kernel = Kernel::new(&ADAGRAD, "adagrad_step");
    let len = param.elem_count();
    let factors = Factors::new(params);
    launcher.open([param, state_sum], [grad], |[param, state_sum], [grad]| {
        let args = [
            param.into(),
            state_sum.into(),
            grad.into(),
            (len as u64).into(),
            factors.grad_scale.into(),
            factors.weight_decay.into(),
            factors.step_size.into(),
            factors.eps.into(),
        ];
        // SAFETY: all three tensors have `len` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(len), &args) }
    })
}
