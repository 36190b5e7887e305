//! The matmuls on a device, with its matrix library. `[n, inputs, outputs]` are tokens and the weight's two
//! dimensions.

use crate::device::{DeviceError, Launcher, Matmul, MatrixAt};
use candle_core::Tensor;

pub(super) fn forward(
    launcher: &Launcher,
    [x, weight, y]: [&Tensor; 3],
    [n, inputs, outputs]: [usize; 3],
    accumulate: bool,
) -> Result<(), DeviceError> {
    launcher.open([y], [x, weight], |[y], [x, weight]| {
        let x = MatrixAt::row_major(x, n, inputs, inputs);
        let weight = MatrixAt::row_major(weight, outputs, inputs, inputs);
        let y = MatrixAt::row_major(y, n, outputs, outputs);
        // SAFETY: three dense matrices of the shapes that `linear::forward` checked.
        unsafe { launcher.gemm(&matmul(x, weight.transposed(), accumulate, y)) }
    })
}

pub(super) fn backward_input(
    launcher: &Launcher,
    [dy, weight, dx]: [&Tensor; 3],
    [n, inputs, outputs]: [usize; 3],
    accumulate: bool,
) -> Result<(), DeviceError> {
    launcher.open([dx], [dy, weight], |[dx], [dy, weight]| {
        let dy = MatrixAt::row_major(dy, n, outputs, outputs);
        let weight = MatrixAt::row_major(weight, outputs, inputs, inputs);
        let dx = MatrixAt::row_major(dx, n, inputs, inputs);
        // SAFETY: three dense matrices of the shapes that `linear::backward_input` checked.
        unsafe { launcher.gemm(&matmul(dy, weight, accumulate, dx)) }
    })
}

pub(super) fn backward_weight(
    launcher: &Launcher,
    [dy, x, dweight]: [&Tensor; 3],
    [n, inputs, outputs]: [usize; 3],
) -> Result<(), DeviceError> {
    launcher.open([dweight], [dy, x], |[dweight], [dy, x]| {
        let dy = MatrixAt::row_major(dy, n, outputs, outputs);
        let x = MatrixAt::row_major(x, n, inputs, inputs);
        let dweight = MatrixAt::row_major(dweight, outputs, inputs, inputs);
        // SAFETY: three dense matrices of the shapes that `linear::backward_weight` checked.
        unsafe { launcher.gemm(&matmul(dy.transposed(), x, true, dweight)) }
    })
}

fn matmul(a: MatrixAt, b: MatrixAt, accumulate: bool, c: MatrixAt) -> Matmul {
    Matmul { alpha: 1.0, a, b, beta: if accumulate { 1.0 } else { 0.0 }, c, batch: 1 }
}
