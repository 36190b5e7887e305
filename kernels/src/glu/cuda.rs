//! The launches of `cuda/glu.cu`.

use super::Activation;
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::GLU};
use candle_core::Tensor;

/// The names of the forward and the backward kernel.
fn kernels(activation: Activation) -> [&'static str; 2] {
    match activation {
        Activation::Silu => ["swiglu_forward", "swiglu_backward"],
        Activation::GeluTanh => ["geglu_forward", "geglu_backward"],
        Activation::Gelu => ["gelu_forward", "gelu_backward"],
        Activation::SquaredRelu => ["relu2_forward", "relu2_backward"],
        Activation::Sigmoid => ["glu_forward", "glu_backward"],
        Activation::Identity => ["bilinear_forward", "bilinear_backward"],
    }
}

pub(super) fn forward(
    launcher: &Launcher,
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    y: &Tensor,
) -> Result<(), DeviceError> {
    let [name, _] = kernels(activation);
    let kernel = Kernel::of_dtype(&GLU, name, gate.dtype())?;
    let size = y.elem_count();
    launcher.open([y], [gate, up], |[y], [gate, up]| {
        let args = [y.into(), gate.into(), up.into(), (size as u64).into()];
        // SAFETY: all three tensors have `size` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(size), &args) }
    })
}

pub(super) fn backward(
    launcher: &Launcher,
    activation: Activation,
    dy: &Tensor,
    gate: &Tensor,
    up: &Tensor,
    dgate: &Tensor,
    dup: &Tensor,
) -> Result<(), DeviceError> {
    let [_, name] = kernels(activation);
    let kernel = Kernel::of_dtype(&GLU, name, gate.dtype())?;
    let size = dy.elem_count();
    launcher.open([dgate, dup], [dy, gate, up], |[dgate, dup], [dy, gate, up]| {
        let size_arg = (size as u64).into();
        let args = [dgate.into(), dup.into(), dy.into(), gate.into(), up.into(), size_arg];
        // SAFETY: all five tensors have `size` elements.
        unsafe { launcher.launch(&kernel, Grid::tiles(size), &args) }
    })
}
