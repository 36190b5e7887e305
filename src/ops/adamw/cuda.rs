//! The launch of `kernels/adamw.cu`.

use super::{AdamParams, Factors};
use crate::device::{Arg, DeviceError, Grid, Kernel, Launcher, sources::ADAMW};
use candle_core::Tensor;

pub(super) fn step(
    launcher: &Launcher,
    [param, grad, exp_avg, exp_avg_sq]: [&Tensor; 4],
    params: &AdamParams,
) -> Result<(), DeviceError> {
    let kernel = Kernel::new(&ADAMW, "adamw_step");
    let len = param.elem_count();
    launcher.open([param, exp_avg, exp_avg_sq], [grad], |[param, exp_avg, exp_avg_sq], [grad]| {
        let tensors = [param, exp_avg, exp_avg_sq, grad].map(Arg::from);
        let factors = Factors::new(params).in_order().map(Arg::from);
        let args = [&tensors[..], &[(len as u64).into()], &factors].concat();
        // SAFETY: all four tensors have `len` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(len), &args) }
    })
}

impl Factors {
    /// As the kernel takes them.
    fn in_order(self) -> [f32; 9] {
        [
            self.grad_scale,
            self.coupled_decay,
            self.decoupled_decay,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.step_size,
            self.root_scale,
            self.eps,
        ]
    }
}
