//! Decay and rate of the gated delta rule (arXiv 2412.06464) from their projections: `g = −exp(a_log) · softplus(a + dt_bias)`
//! and `beta = σ(b)`, per token and head. The decay is that of Mamba-2.

mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use super::OpError;
use super::arg_check::{ArgCheck, Argument};
use super::cast::with_element_type;
use crate::device::Target;
use candle_core::Tensor;

/// Inputs of both directions.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Projection for the decay, `[n, H]`.
    pub a: &'a Tensor,
    /// Projection for the rate, `[n, H]`.
    pub b: &'a Tensor,
    /// Logarithm of the largest decay per unit of time, `[H]`.
    pub a_log: &'a Tensor,
    /// Added to `a`, `[H]`.
    pub dt_bias: &'a Tensor,
}

/// Outputs of the backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Gradients<'a> {
    /// Gradient of `a`, `[n, H]`, overwritten.
    pub da: &'a Tensor,
    /// Gradient of `b`, `[n, H]`, overwritten.
    pub db: &'a Tensor,
    /// Gradient of `a_log`, `[H]` in f32, added to; `None` if it is frozen.
    pub da_log: Option<&'a Tensor>,
    /// Gradient of `dt_bias`, `[H]` in f32, added to; `None` if it is frozen.
    pub ddt_bias: Option<&'a Tensor>,
}

/// Writes the logarithm of the decay, at most 0, and the rate, from 0 to 1.
///
/// # Shapes
/// [`Operands`] to `g, beta: [n, H]` in f32.
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, an output that shares storage with another argument, or a device
/// without kernels in this build.
pub fn forward(operands: &Operands<'_>, g: &Tensor, beta: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("delta_gates::forward");
    let dims = operands.check(call)?;
    let outputs = [("g", g), ("beta", beta)];
    outputs.into_iter().try_for_each(|output| call.expect(output, &dims))?;
    let target = call.elementwise(&outputs, &operands.named())?;
    let dtype = call.element_type(&operands.named(), &outputs)?;
    match target {
        Target::Cpu => {
            let Operands { a, b, .. } = *operands;
            let (a_log, dt_bias) = (call.read(operands.a_log)?, call.read(operands.dt_bias)?);
            with_element_type!(dtype, T => call.on_cpu([a, b], [], |[a, b]: [&[T]; 2], []| {
                call.on_cpu([], [g, beta], |[], outputs| cpu::forward([a, b], [&a_log, &dt_bias], outputs))
            })?)
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => {
            call.kernels(cuda::forward(&launcher, (dtype, dims), operands, [g, beta]))
        }
    }
}

/// Gradients of [`forward`]. Tokens are summed in an order that depends only on their number.
///
/// # Shapes
/// [`Operands`] and `dg, dbeta: [n, H]` in f32 to [`Gradients`].
///
/// # Errors
/// As [`forward`].
pub fn backward(
    operands: &Operands<'_>,
    [dg, dbeta]: [&Tensor; 2],
    gradients: &Gradients<'_>,
) -> Result<(), OpError> {
    let call = ArgCheck::new("delta_gates::backward");
    let dims = operands.check(call)?;
    let Gradients { da, db, da_log, ddt_bias } = *gradients;
    for argument in [("dg", dg), ("dbeta", dbeta), ("da", da), ("db", db)] {
        call.expect(argument, &dims)?;
    }
    let sums = [da_log.map(|sum| ("da_log", sum)), ddt_bias.map(|sum| ("ddt_bias", sum))];
    let upstream = [("dg", dg), ("dbeta", dbeta)];
    let inputs = [&operands.named()[..], &upstream].concat();
    let target = call.elementwise(&[("da", da), ("db", db)], &inputs)?;
    // The sums may be parts of one flat gradient.
    for sum in sums.into_iter().flatten() {
        call.expect(sum, &[dims[1]])?;
        call.target(&[sum], &[&inputs[..], &[("da", da), ("db", db)]].concat())?;
    }
    let elements = [&operands.named()[..], &[("da", da), ("db", db)]].concat();
    let f32s: Vec<_> = upstream.into_iter().chain(sums.into_iter().flatten()).collect();
    let dtype = call.element_type(&elements, &f32s)?;
    match target {
        Target::Cpu => {
            let Operands { a, b, .. } = *operands;
            let (a_log, dt_bias) = (call.read(operands.a_log)?, call.read(operands.dt_bias)?);
            let (dg, dbeta) = (call.read(dg)?, call.read(dbeta)?);
            let parameters: [&[f32]; 2] = [&a_log, &dt_bias];
            let mut partials = Vec::new();
            with_element_type!(dtype, T => call.on_cpu([a, b], [da, db], |[a, b]: [&[T]; 2], gradients| {
                partials = cpu::backward([a, b], parameters, [&dg, &dbeta], gradients);
            }))?;
            let sums = cpu::sum_partials(&partials, dims[1]);
            for (target, sums) in [da_log, ddt_bias].into_iter().zip(sums) {
                let Some(target) = target else { continue };
                call.write(target, |target| {
                    target.iter_mut().zip(sums).for_each(|(target, sum)| *target += sum as f32);
                    Ok(())
                })?;
            }
            Ok(())
        }
        Target::Dry(cpu) => {
            cpu.alloc_temporary(cpu::partials_bytes(dims));
            Ok(())
        }
        Target::Kernels(launcher) => {
            call.kernels(cuda::backward(&launcher, (dtype, dims), operands, [dg, dbeta], gradients))
        }
    }
}

impl<'a> Operands<'a> {
    fn named(&self) -> [Argument<'a>; 4] {
        [("a", self.a), ("b", self.b), ("a_log", self.a_log), ("dt_bias", self.dt_bias)]
    }

    /// Checks the shapes against each other. Returns tokens and heads.
    fn check(&self, call: ArgCheck) -> Result<[usize; 2], OpError> {
        let (tokens, heads) = call.rows(("a", self.a))?;
        call.expect(("b", self.b), &[tokens, heads])?;
        call.expect(("a_log", self.a_log), &[heads])?;
        call.expect(("dt_bias", self.dt_bias), &[heads])?;
        Ok([tokens, heads])
    }
}
