//! The launches of `kernels/sgd.cu`.

use super::SgdParams;
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::SGD};
use candle_core::Tensor;

pub(super) fn step(
    launcher: &Launcher,
    [param, grad]: [&Tensor; 2],
    params: &SgdParams,
) -> Result<(), DeviceError> {
    let kernel = Kernel::new(&SGD, "sgd_step");
    let len = param.elem_count();
    launcher.open([param], [grad], |[param], [grad]| {
        let args = [
            param.into(),
            grad.into(),
            (len as u64).into(),
            (params.lr as f32).into(),
            (params.weight_decay as f32).into(),
            (params.grad_scale as f32).into(),
        ];
        // SAFETY: both tensors have `len` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(len), &args) }
    })
}

pub(super) fn step_with_momentum(
    launcher: &Launcher,
    [param, grad, buffer]: [&Tensor; 3],
    params: &SgdParams,
) -> Result<(), DeviceError> {
    let kernel = Kernel::new(&SGD, "sgd_step_with_momentum");
    let len = param.elem_count();
    launcher.open([param, buffer], [grad], |[param, buffer], [grad]| {
        let args = [
            param.into(),
            buffer.into(),
            grad.into(),
            (len as u64).into(),
            (params.lr as f32).into(),
            (params.momentum as f32).into(),
            (params.weight_decay as f32).into(),
            (params.grad_scale as f32).into(),
            params.nesterov.into(),
            (params.step == 1).into(),
        ];
        // SAFETY: all three tensors have `len` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(len), &args) }
    })
}
