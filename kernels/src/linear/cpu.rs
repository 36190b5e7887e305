//! The matmuls on slices. `[n, inputs, outputs]` are tokens and the weight's two dimensions.

use crate::OpError;
use crate::gemm::bf16::Stored;
use crate::gemm::dispatch::multiply;
use crate::gemm::operand::MatmulOperand;

pub(super) fn forward<T: Stored>(
    [x, weight]: [&[T]; 2],
    y: &mut [T],
    [n, inputs, outputs]: [usize; 3],
    accumulate: bool,
) -> Result<(), OpError> {
    multiply(
        MatmulOperand::contiguous(x, n, inputs)?,
        MatmulOperand::contiguous(weight, outputs, inputs)?,
        y,
        accumulate,
    )
}

pub(super) fn backward_input<T: Stored>(
    [dy, weight]: [&[T]; 2],
    dx: &mut [T],
    [n, inputs, outputs]: [usize; 3],
    accumulate: bool,
) -> Result<(), OpError> {
    multiply(
        MatmulOperand::contiguous(dy, n, outputs)?,
        MatmulOperand::interleaved(weight, inputs, outputs)?,
        dx,
        accumulate,
    )
}

pub(super) fn backward_weight<T: Stored>(
    [dy, x]: [&[T]; 2],
    dweight: &mut [f32],
    [n, inputs, outputs]: [usize; 3],
) -> Result<(), OpError> {
    multiply(
        MatmulOperand::interleaved(dy, outputs, n)?,
        MatmulOperand::interleaved(x, inputs, n)?,
        dweight,
        true,
    )
}
