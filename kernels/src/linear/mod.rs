//! Linear layer without bias: y = x·Wᵀ, and the two matmuls of its backward.
//!
//! Each is one matmul over strided views of the caller's tensors. No transpose is materialized, and a weight
//! gradient is accumulated in place, inside the flat gradient buffer.

mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use super::OpError;
use super::arg_check::ArgCheck;
use super::cast::with_element_type;
use super::gemm::bf16::Kernel;
use super::gemm::dispatch::{alloc_matmul_scratch, alloc_token_sum_scratch};
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
    let (n, inputs) = call.rows(("x", x))?;
    let (outputs, _) = call.rows(("weight", weight))?;
    call.expect(("weight", weight), &[outputs, inputs])?;
    call.expect(("y", y), &[n, outputs])?;
    let target = call.target(&[("y", y)], &[("x", x), ("weight", weight)])?;
    let dtype = call.element_type(&[("x", x), ("weight", weight), ("y", y)], &[])?;
    dry::report_flops(MatmulOp::Linear, false, 2.0 * n as f64 * (inputs * outputs) as f64);
    match target {
        Target::Cpu => {
            let sizes = [n, inputs, outputs];
            with_element_type!(dtype, T => call.on_cpu([x, weight], [y], |operands: [&[T]; 2], [y]| {
                cpu::forward(operands, y, sizes, accumulate)
            })?)
        }
        Target::Dry(cpu) => {
            alloc_matmul_scratch(cpu, [dtype; 3], [n, outputs, inputs]);
            Ok(())
        }
        Target::Kernels(launcher) => {
            let tensors = [x, weight, y];
            call.kernels(cuda::forward(&launcher, tensors, [n, inputs, outputs], accumulate))
        }
    }
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
    let (n, outputs) = call.rows(("dy", dy))?;
    let (_, inputs) = call.rows(("weight", weight))?;
    call.expect(("weight", weight), &[outputs, inputs])?;
    call.expect(("dx", dx), &[n, inputs])?;
    let target = call.target(&[("dx", dx)], &[("dy", dy), ("weight", weight)])?;
    let dtype = call.element_type(&[("dy", dy), ("weight", weight), ("dx", dx)], &[])?;
    dry::report_flops(MatmulOp::Linear, true, 2.0 * n as f64 * (inputs * outputs) as f64);
    match target {
        Target::Cpu => {
            let sizes = [n, inputs, outputs];
            with_element_type!(dtype, T => call.on_cpu([dy, weight], [dx], |operands: [&[T]; 2], [dx]| {
                cpu::backward_input(operands, dx, sizes, accumulate)
            })?)
        }
        Target::Dry(cpu) => {
            alloc_matmul_scratch(cpu, [dtype; 3], [n, inputs, outputs]);
            Ok(())
        }
        Target::Kernels(launcher) => {
            let tensors = [dy, weight, dx];
            call.kernels(cuda::backward_input(&launcher, tensors, [n, inputs, outputs], accumulate))
        }
    }
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
    let (n, inputs) = call.rows(("x", x))?;
    let (_, outputs) = call.rows(("dy", dy))?;
    call.expect(("dy", dy), &[n, outputs])?;
    call.expect(("dweight", dweight), &[outputs, inputs])?;
    let target = call.target(&[("dweight", dweight)], &[("dy", dy), ("x", x)])?;
    let dtype = call.element_type(&[("dy", dy), ("x", x)], &[("dweight", dweight)])?;
    dry::report_flops(MatmulOp::Linear, true, 2.0 * n as f64 * (inputs * outputs) as f64);
    match target {
        Target::Cpu => {
            let sizes = [n, inputs, outputs];
            with_element_type!(dtype, T => call.on_cpu([dy, x], [], |operands: [&[T]; 2], []| {
                call.on_cpu([], [dweight], |[], [dweight]| cpu::backward_weight(operands, dweight, sizes))
            })??)
        }
        Target::Dry(cpu) => {
            alloc_token_sum_scratch(cpu, [dtype, dtype, DType::F32], [outputs, inputs, n]);
            Ok(())
        }
        Target::Kernels(launcher) => {
            let tensors = [dy, x, dweight];
            call.kernels(cuda::backward_weight(&launcher, tensors, [n, inputs, outputs]))
        }
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
