//! Gated linear units (arXiv 2002.05202): y = activation(gate) · up.

mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use super::OpError;
use super::arg_check::ArgCheck;
use super::cast::with_element_type;
use crate::device::Target;
use candle_core::Tensor;

/// The activation of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// g · σ(g), as in SwiGLU.
    Silu,
    /// g · (1 + tanh(√(2/π) · (g + 0.044715 g³))) / 2, as in Gemma's GeGLU: PyTorch's `gelu(approximate="tanh")`.
    GeluTanh,
    /// g · Φ(g) with the normal distribution's Φ (arXiv 1606.08415): PyTorch's `gelu`.
    Gelu,
    /// max(g, 0)² (arXiv 2109.08668).
    SquaredRelu,
    /// σ(g), as in the first GLU (arXiv 1612.08083) and in gated attention.
    Sigmoid,
    /// g: the bilinear layer of the paper, and the gates of short convolutions.
    Identity,
}

/// y = activation(gate) · up.
///
/// # Shapes
/// `gate, up, y: [n, f]`
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, or an output that shares storage with an input.
pub fn forward(activation: Activation, gate: &Tensor, up: &Tensor, y: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("glu::forward");
    let rows = call.rows(("gate", gate))?;
    call.expect(("up", up), &rows.dims())?;
    call.expect(("y", y), &rows.dims())?;
    let target = call.elementwise(&[("y", y)], &[("gate", gate), ("up", up)])?;
    let dtype = call.element_type(&[("gate", gate), ("up", up), ("y", y)], &[])?;
    match target {
        Target::Cpu => with_element_type!(dtype, T => {
            call.on_cpu([gate, up], [y], |[gate, up], [y]| cpu::forward::<T>(activation, gate, up, y))
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::forward(&launcher, activation, gate, up, y)),
    }
}

/// Gradients of [`forward`], both overwritten.
///
/// # Shapes
/// `dy, gate, up, dgate, dup: [n, f]`
///
/// # Errors
/// As [`forward`].
pub fn backward(
    activation: Activation,
    dy: &Tensor,
    gate: &Tensor,
    up: &Tensor,
    dgate: &Tensor,
    dup: &Tensor,
) -> Result<(), OpError> {
    let call = ArgCheck::new("glu::backward");
    let rows = call.rows(("gate", gate))?;
    let (outputs, inputs) = ([("dgate", dgate), ("dup", dup)], [("dy", dy), ("gate", gate), ("up", up)]);
    for argument in inputs.into_iter().chain(outputs) {
        call.expect(argument, &rows.dims())?;
    }
    let target = call.elementwise(&outputs, &inputs)?;
    let elements: Vec<_> = inputs.into_iter().chain(outputs).collect();
    let dtype = call.element_type(&elements, &[])?;
    match target {
        Target::Cpu => with_element_type!(dtype, T => {
            call.on_cpu([dy, gate, up], [dgate, dup], |[dy, gate, up], [dgate, dup]| {
                cpu::backward::<T>(activation, dy, gate, up, dgate, dup);
            })
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => {
            call.kernels(cuda::backward(&launcher, activation, dy, gate, up, dgate, dup))
        }
    }
}
