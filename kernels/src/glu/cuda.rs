//! The launches of `cuda/swiglu.cu`.

use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::SWIGLU};
use candle_core::{DType, Tensor};

pub(super) fn forward(
    launcher: &Launcher,
    dtype: DType,
    [gate, up, y]: [&Tensor; 3],
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&SWIGLU, "swiglu_forward", dtype)?;
    let size = y.elem_count();
    launcher.open([y], [gate, up], |[y], [gate, up]| {
        let args = [y.into(), gate.into(), up.into(), (size as u64).into()];
        // SAFETY: all three tensors have `size` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(size), &args) }
    })
}

pub(super) fn backward(
    launcher: &Launcher,
    dtype: DType,
    [dy, gate, up]: [&Tensor; 3],
    [dgate, dup]: [&Tensor; 2],
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&SWIGLU, "swiglu_backward", dtype)?;
    let size = dy.elem_count();
    launcher.open([dgate, dup], [dy, gate, up], |[dgate, dup], [dy, gate, up]| {
        let size_arg = (size as u64).into();
        let args = [dgate.into(), dup.into(), dy.into(), gate.into(), up.into(), size_arg];
        // SAFETY: all five tensors have `size` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(size), &args) }
    })
}
