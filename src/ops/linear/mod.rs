//! Linear layer without bias: y = x·Wᵀ, and the two products of its backward.
//!
//! Each is one matrix product over strided views of the caller's tensors: no transpose is materialised, and
//! a weight gradient is accumulated where it belongs, inside the flat gradient buffer.

mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use super::OpError;
use super::call::Call;
use super::gemm::bf16::{Kernel, kernel_for, packed_bytes_of_threads};
use crate::device::Target;
use crate::tensor::Element;
use candle_core::{DType, Tensor};
use half::bf16;

/// y = x·weightᵀ, or y += x·weightᵀ with `accumulate`.
///
/// # Shapes
/// `x: [n, in], weight: [out, in], y: [n, out]`
///
/// # Errors
/// When shapes, dtypes, devices or layouts do not fit, or the output shares storage with an input.
pub fn forward(x: &Tensor, weight: &Tensor, y: &Tensor, accumulate: bool) -> Result<(), OpError> {
    let call = Call::new("linear::forward");
    let (n, inputs) = call.rows(("x", x))?;
    let (outputs, _) = call.rows(("weight", weight))?;
    call.expect(("weight", weight), &[outputs, inputs])?;
    call.expect(("y", y), &[n, outputs])?;
    let target = call.target(&[("y", y)], &[("x", x), ("weight", weight)])?;
    let dtype = call.element_type(&[("x", x), ("weight", weight), ("y", y)], &[])?;
    match target {
        Target::Cpu => {
            let sizes = [n, inputs, outputs];
            if let Some(kernel) = bf16_kernel(dtype, sizes) {
                return call.bf16_product([x, weight], y, |operands, y| {
                    cpu::bf16::forward(kernel, operands, y, sizes, accumulate)
                });
            }
            let (x, weight) = (call.read(x)?, call.read(weight)?);
            call.write(y, |y| cpu::forward(&x, &weight, y, [n, inputs, outputs], accumulate))
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
    let call = Call::new("linear::backward_input");
    let (n, outputs) = call.rows(("dy", dy))?;
    let (_, inputs) = call.rows(("weight", weight))?;
    call.expect(("weight", weight), &[outputs, inputs])?;
    call.expect(("dx", dx), &[n, inputs])?;
    let target = call.target(&[("dx", dx)], &[("dy", dy), ("weight", weight)])?;
    let dtype = call.element_type(&[("dy", dy), ("weight", weight), ("dx", dx)], &[])?;
    match target {
        Target::Cpu => {
            let sizes = [n, inputs, outputs];
            if let Some(kernel) = bf16_kernel(dtype, sizes) {
                return call.bf16_product([dy, weight], dx, |operands, dx| {
                    cpu::bf16::backward_input(kernel, operands, dx, sizes, accumulate)
                });
            }
            let (dy, weight) = (call.read(dy)?, call.read(weight)?);
            call.write(dx, |dx| cpu::backward_input(&dy, &weight, dx, [n, inputs, outputs], accumulate))
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
    let call = Call::new("linear::backward_weight");
    let (n, inputs) = call.rows(("x", x))?;
    let (_, outputs) = call.rows(("dy", dy))?;
    call.expect(("dy", dy), &[n, outputs])?;
    call.expect(("dweight", dweight), &[outputs, inputs])?;
    let target = call.target(&[("dweight", dweight)], &[("dy", dy), ("x", x)])?;
    let dtype = call.element_type(&[("dy", dy), ("x", x)], &[("dweight", dweight)])?;
    match target {
        Target::Cpu => {
            let sizes = [n, inputs, outputs];
            if let Some(kernel) = bf16_kernel(dtype, sizes) {
                return call.bf16_product([dy, x], dweight, |operands, dweight| {
                    cpu::bf16::backward_weight(kernel, operands, dweight, sizes)
                });
            }
            let (dy, x) = (call.read(dy)?, call.read(x)?);
            call.write(dweight, |dweight| cpu::backward_weight(&dy, &x, dweight, [n, inputs, outputs]))
        }
        Target::Kernels(launcher) => {
            let tensors = [dy, x, dweight];
            call.kernels(cuda::backward_weight(&launcher, tensors, [n, inputs, outputs]))
        }
    }
}

/// What multiplies large bf16 matrices on this CPU; without it they are widened, and bf16 is slower than f32.
#[must_use]
pub fn bf16_products() -> Option<&'static str> {
    Kernel::detect().map(Kernel::name)
}

/// What a product on a CPU needs in memory beside its operands and its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductMemory {
    /// Copies of all of them in f32, while it runs, if they have 16 bits.
    Widened,
    /// So many bytes of panels, which the threads keep.
    Packed(usize),
}

/// The memory of [`forward`] with `n` tokens, and of [`backward_input`] with what goes in and out exchanged.
#[must_use]
pub fn product_memory(dtype: DType, [n, inputs, outputs]: [usize; 3], threads: usize) -> ProductMemory {
    memory_of(dtype, [n, outputs, inputs], false, threads)
}

/// The memory of [`backward_weight`].
#[must_use]
pub fn weight_product_memory(
    dtype: DType,
    [n, inputs, outputs]: [usize; 3],
    threads: usize,
) -> ProductMemory {
    memory_of(dtype, [outputs, inputs, n], true, threads)
}

fn memory_of(dtype: DType, sizes: [usize; 3], into_f32: bool, threads: usize) -> ProductMemory {
    match bf16_kernel(dtype, sizes) {
        Some(_) => ProductMemory::Packed(packed_bytes_of_threads(sizes, into_f32, threads)),
        None => ProductMemory::Widened,
    }
}

/// What computes the products of these sizes on a CPU, if they are not widened to f32.
fn bf16_kernel(dtype: DType, sizes: [usize; 3]) -> Option<Kernel> {
    if dtype == DType::BF16 { kernel_for(sizes) } else { None }
}

impl Call {
    /// Calls `multiply` with the elements of two bf16 tensors and, to write, of a third of any type.
    fn bf16_product<T: Element>(
        &self,
        operands: [&Tensor; 2],
        result: &Tensor,
        multiply: impl FnOnce([&[bf16]; 2], &mut [T]) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        self.on_cpu(operands, [], |operands, []| {
            self.on_cpu([], [result], |[], [result]| multiply(operands, result))
        })??
    }
}
