//! The products on slices. `[n, inputs, outputs]` are tokens and the weight's two dimensions.

pub(super) mod bf16;

use crate::ops::OpError;
use crate::ops::gemm::{MatrixMut, MatrixRef, Threads, gemm};

pub(super) fn forward(
    x: &[f32],
    weight: &[f32],
    y: &mut [f32],
    [n, inputs, outputs]: [usize; 3],
    accumulate: bool,
) -> Result<(), OpError> {
    let x = MatrixRef::new(x, n, inputs)?;
    let weight = MatrixRef::new(weight, outputs, inputs)?;
    gemm(1.0, x, weight.transposed(), beta(accumulate), MatrixMut::new(y, n, outputs)?, Threads::Pool)
}

pub(super) fn backward_input(
    dy: &[f32],
    weight: &[f32],
    dx: &mut [f32],
    [n, inputs, outputs]: [usize; 3],
    accumulate: bool,
) -> Result<(), OpError> {
    let dy = MatrixRef::new(dy, n, outputs)?;
    let weight = MatrixRef::new(weight, outputs, inputs)?;
    gemm(1.0, dy, weight, beta(accumulate), MatrixMut::new(dx, n, inputs)?, Threads::Pool)
}

pub(super) fn backward_weight(
    dy: &[f32],
    x: &[f32],
    dweight: &mut [f32],
    [n, inputs, outputs]: [usize; 3],
) -> Result<(), OpError> {
    let dy = MatrixRef::new(dy, n, outputs)?;
    let x = MatrixRef::new(x, n, inputs)?;
    gemm(1.0, dy.transposed(), x, 1.0, MatrixMut::new(dweight, outputs, inputs)?, Threads::Pool)
}

fn beta(accumulate: bool) -> f32 {
    if accumulate { 1.0 } else { 0.0 }
}
