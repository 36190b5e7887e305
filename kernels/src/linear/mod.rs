//! Linear layer without bias: y = x·Wᵀ, and the two matmuls of its backward.
//!
//! Each is one matmul over strided views of the caller's tensors. No transpose is materialized, and a weight
//! gradient is accumulated in place, inside the flat gradient buffer.

mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use super::OpError;
use super::arg_check::{ArgCheck, Argument, RowSizes};
use super::cast::{Float, with_element_type};
use super::gemm::bf16::{Kernel, Stored};
use super::gemm::dispatch::{alloc_matmul_scratch, alloc_token_sum_scratch, multiply};
use super::gemm::operand::MatmulOperand;
use crate::device::Target;
use crate::device::dry::{self, MatmulOp};
use candle_core::{DType, Tensor};

/// y = x·weightᵀ, or y += x·weightᵀ with `accumulate`.
///
/// # Shapes
/// `x: [n, in], weight: [out, in], y: [n, out]`
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, or an output that shares storage with an input.
pub fn forward(x: &Tensor, weight: &Tensor, y: &Tensor, accumulate: bool) -> Result<(), OpError> {
    let call = ArgCheck::new("linear::forward");
    let RowSizes { count: n, width: inputs } = call.rows(("x", x))?;
    let outputs = call.rows(("weight", weight))?.count;
    let a = Dense::checked(call, ("x", x), n, inputs)?;
    let b = Dense::checked(call, ("weight", weight), outputs, inputs)?.transposed();
    let c = Dense::checked(call, ("y", y), n, outputs)?;
    Product { a, b, c, accumulate, sums_tokens: false }.compute(call, false)
}

/// dx = dy·weight, or dx += dy·weight with `accumulate`.
///
/// # Shapes
/// `dy: [n, out], weight: [out, in], dx: [n, in]`
///
/// # Errors
/// As [`forward`].
pub fn backward_input(dy: &Tensor, weight: &Tensor, dx: &Tensor, accumulate: bool) -> Result<(), OpError> {
    let call = ArgCheck::new("linear::backward_input");
    let RowSizes { count: n, width: outputs } = call.rows(("dy", dy))?;
    let inputs = call.rows(("weight", weight))?.width;
    let a = Dense::checked(call, ("dy", dy), n, outputs)?;
    let b = Dense::checked(call, ("weight", weight), outputs, inputs)?;
    let c = Dense::checked(call, ("dx", dx), n, inputs)?;
    Product { a, b, c, accumulate, sums_tokens: false }.compute(call, true)
}

/// dweight += dyᵀ·x.
///
/// # Shapes
/// `dy: [n, out], x: [n, in], dweight: [out, in]`
///
/// # Errors
/// As [`forward`].
pub fn backward_weight(dy: &Tensor, x: &Tensor, dweight: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("linear::backward_weight");
    let RowSizes { count: n, width: inputs } = call.rows(("x", x))?;
    let outputs = call.rows(("dy", dy))?.width;
    let a = Dense::checked(call, ("dy", dy), n, outputs)?.transposed();
    let b = Dense::checked(call, ("x", x), n, inputs)?;
    let c = Dense::checked(call, ("dweight", dweight), outputs, inputs)?;
    Product { a, b, c, accumulate: true, sums_tokens: true }.compute(call, true)
}

/// A matrix without gaps, or its transpose.
#[derive(Clone, Copy)]
struct Dense<'a> {
    name: &'static str,
    tensor: &'a Tensor,
    /// Rows and columns of the tensor.
    rows: usize,
    cols: usize,
    is_transposed: bool,
}

impl<'a> Dense<'a> {
    fn checked(call: ArgCheck, argument: Argument<'a>, rows: usize, cols: usize) -> Result<Self, OpError> {
        call.expect(argument, &[rows, cols])?;
        let (name, tensor) = argument;
        Ok(Self { name, tensor, rows, cols, is_transposed: false })
    }

    fn transposed(self) -> Self {
        Self { is_transposed: !self.is_transposed, ..self }
    }

    fn argument(self) -> Argument<'a> {
        (self.name, self.tensor)
    }

    /// The left operand of a matmul of its elements, or the transpose of the right one.
    fn operand<T>(self, elements: &[T]) -> Result<MatmulOperand<'_, T>, OpError> {
        match self.is_transposed {
            false => MatmulOperand::contiguous(elements, self.rows, self.cols),
            true => MatmulOperand::interleaved(elements, self.cols, self.rows),
        }
    }
}

/// c = a·b, or c += a·b with `accumulate`.
#[derive(Clone, Copy)]
struct Product<'a> {
    a: Dense<'a>,
    b: Dense<'a>,
    /// In f32 if it `sums_tokens`.
    c: Dense<'a>,
    accumulate: bool,
    sums_tokens: bool,
}

impl Product<'_> {
    fn compute(self, call: ArgCheck, is_backward: bool) -> Result<(), OpError> {
        let Self { a, b, c, sums_tokens, .. } = self;
        let target = call.target(&[c.argument()], &[a.argument(), b.argument()])?;
        let elements = [a.argument(), b.argument(), c.argument()];
        let (elements, sums) = elements.split_at(if sums_tokens { 2 } else { 3 });
        let dtype = call.element_type(elements, sums)?;
        let (m, n, k) = (c.rows, c.cols, if a.is_transposed { a.rows } else { a.cols });
        dry::report_flops(MatmulOp::Linear, is_backward, 2.0 * m as f64 * (n * k) as f64);
        match target {
            Target::Cpu if sums_tokens => with_element_type!(dtype, T => self.on_cpu::<T, f32>(call)),
            Target::Cpu => with_element_type!(dtype, T => self.on_cpu::<T, T>(call)),
            Target::Dry(cpu) => {
                match sums_tokens {
                    false => alloc_matmul_scratch(cpu, [dtype; 3], [m, n, k]),
                    true => alloc_token_sum_scratch(cpu, [dtype, dtype, DType::F32], [m, n, k]),
                }
                Ok(())
            }
            Target::Kernels(launcher) => call.kernels(cuda::multiply(&launcher, self)),
        }
    }

    fn on_cpu<T: Float, C: Stored>(self, call: ArgCheck) -> Result<(), OpError> {
        let Self { a, b, c, accumulate, .. } = self;
        call.on_cpu([a.tensor, b.tensor], [], |[of_a, of_b]: [&[T]; 2], []| {
            let (a, b) = (a.operand(of_a)?, b.transposed().operand(of_b)?);
            call.on_cpu([], [c.tensor], |[], [c]: [&mut [C]; 1]| multiply(a, b, c, accumulate))?
        })?
    }
}

/// The instructions that multiply large bf16 matrices on this CPU; `None` if they are multiplied in f32, as they
/// also are with the environment variable `ULYSSES_BF16_GEMM=f32`.
///
/// # Errors
/// A value of the variable other than `f32` or `auto`.
pub fn bf16_gemm() -> Result<Option<&'static str>, OpError> {
    Ok(Kernel::checked()?.map(Kernel::name))
}

/// A note for the user, if the environment sets the variable of [`bf16_gemm`] by its former name.
pub fn bf16_gemm_deprecation() -> Option<String> {
    Kernel::deprecation()
}
