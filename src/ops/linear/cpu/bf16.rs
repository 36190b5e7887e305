//! The products on bf16 slices, by a [`Kernel`] of the processor.

use crate::ops::OpError;
use crate::ops::gemm::bf16::{Kernel, Lines, multiply};
use half::bf16;

pub(in crate::ops::linear) fn forward(
    kernel: Kernel,
    [x, weight]: [&[bf16]; 2],
    y: &mut [bf16],
    [n, inputs, outputs]: [usize; 3],
    accumulate: bool,
) -> Result<(), OpError> {
    let (x, weight) = (Lines::contiguous(x, n, inputs)?, Lines::contiguous(weight, outputs, inputs)?);
    multiply(kernel, x, weight, y, accumulate);
    Ok(())
}

pub(in crate::ops::linear) fn backward_input(
    kernel: Kernel,
    [dy, weight]: [&[bf16]; 2],
    dx: &mut [bf16],
    [n, inputs, outputs]: [usize; 3],
    accumulate: bool,
) -> Result<(), OpError> {
    let (dy, weight) = (Lines::contiguous(dy, n, outputs)?, Lines::interleaved(weight, inputs, outputs)?);
    multiply(kernel, dy, weight, dx, accumulate);
    Ok(())
}

pub(in crate::ops::linear) fn backward_weight(
    kernel: Kernel,
    [dy, x]: [&[bf16]; 2],
    dweight: &mut [f32],
    [n, inputs, outputs]: [usize; 3],
) -> Result<(), OpError> {
    let (dy, x) = (Lines::interleaved(dy, outputs, n)?, Lines::interleaved(x, inputs, n)?);
    multiply(kernel, dy, x, dweight, true);
    Ok(())
}
