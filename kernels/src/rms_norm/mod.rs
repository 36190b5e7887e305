//! RMS normalization: y = gain · x / √(mean(x²) + ε) over the last dimension (Zhang & Sennrich 2019). The
//! position of ε and the order of operations are those of Hugging Face's `LlamaRMSNorm`. [Centered](Gain::centered), it is
//! LayerNorm without a bias (Ba et al. 2016).

mod cpu;
mod cuda;
mod parts;
pub mod reference;
#[cfg(test)]
mod tests;

pub use parts::{backward_part, forward_part, products, squares};

use super::OpError;
use super::arg_check::{ArgCheck, Argument};
use super::cast::with_element_type;
use crate::device::Target;
use candle_core::Tensor;
use std::borrow::Cow;

/// The factor of every element: `offset + weight`, summed in f32. Gemma's norms have an offset of 1.
#[derive(Debug, Clone, Copy)]
pub struct Gain<'a> {
    /// The parameter, `[d]`.
    pub weight: &'a Tensor,
    /// Added to it.
    pub offset: f32,
    /// Whether the mean of each row is subtracted first: LayerNorm.
    pub centered: bool,
}

impl<'a> From<&'a Tensor> for Gain<'a> {
    fn from(weight: &'a Tensor) -> Self {
        Self { weight, offset: 0.0, centered: false }
    }
}

impl Gain<'_> {
    /// The sums, for the values of `weight`.
    fn values<'a>(&self, weight: &'a [f32]) -> Cow<'a, [f32]> {
        match self.offset {
            0.0 => Cow::Borrowed(weight),
            offset => weight.iter().map(|weight| weight + offset).collect(),
        }
    }
}

/// The whole rows that the rows of a tensor are parts of.
#[derive(Debug, Clone, Copy)]
pub struct WholeRows<'a> {
    /// Elements of a whole row.
    pub width: usize,
    /// Sums over whole rows, `[n]` in f32: of [`squares`] for the forward pass, of [`products`] for the backward pass.
    pub sums: &'a Tensor,
}

impl<'a> WholeRows<'a> {
    /// Checks the sums, if there are any, for `n` parts of `d` elements, and returns them as an argument.
    fn check(
        whole: Option<Self>,
        call: ArgCheck,
        (n, d): (usize, usize),
        gain: Gain<'_>,
    ) -> Result<Option<Argument<'a>>, OpError> {
        let Some(Self { width, sums }) = whole else { return Ok(None) };
        call.expect(("sums", sums), &[n])?;
        call.expect_value("width", width as f64, width >= d, "at least the elements of a part")?;
        call.expect_value("gain.centered", 1.0, !gain.centered, "0: the mean of a whole row is not known")?;
        Ok(Some(("sums", sums)))
    }
}

/// Normalizes each row and writes 1/√(mean(x²) + ε), of the centered row if it is, to `rstd` for [`backward`].
///
/// # Shapes
/// `x, y: [n, d], gain: [d], rstd: [n]`
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, or an output that shares storage with another
/// argument.
pub fn forward<'a>(
    x: &Tensor,
    gain: impl Into<Gain<'a>>,
    eps: f64,
    y: &Tensor,
    rstd: &Tensor,
) -> Result<(), OpError> {
    run_forward(ArgCheck::new("rms_norm::forward"), x, gain.into(), (eps, None), [y, rstd])
}

/// [`forward`] of whole rows, or [`forward_part`].
fn run_forward(
    call: ArgCheck,
    x: &Tensor,
    gain: Gain<'_>,
    (eps, whole): (f64, Option<WholeRows<'_>>),
    [y, rstd]: [&Tensor; 2],
) -> Result<(), OpError> {
    let Gain { weight, centered, .. } = gain;
    let (n, d) = call.rows(("x", x))?;
    call.expect(("weight", weight), &[d])?;
    call.expect(("y", y), &[n, d])?;
    call.expect(("rstd", rstd), &[n])?;
    let sums = WholeRows::check(whole, call, (n, d), gain)?;
    let inputs: Vec<_> = [("x", x), ("weight", weight)].into_iter().chain(sums).collect();
    let target = call.elementwise(&[("y", y), ("rstd", rstd)], &inputs)?;
    let f32s: Vec<_> = [("rstd", rstd)].into_iter().chain(sums).collect();
    let dtype = call.element_type(&[("x", x), ("weight", weight), ("y", y)], &f32s)?;
    match target {
        Target::Cpu => {
            let weight = call.read(weight)?;
            let gain = gain.values(&weight);
            let sums = whole.map(|whole| call.read(whole.sums)).transpose()?;
            let whole = whole.zip(sums.as_ref()).map(|(whole, sums)| (&**sums, whole.width));
            call.write(rstd, |rstd| {
                let roots = match whole {
                    Some((sums, width)) => {
                        cpu::roots(sums, width, eps, rstd);
                        cpu::Roots::Given
                    }
                    None => cpu::Roots::Computed { eps, centered },
                };
                with_element_type!(dtype, T => {
                    call.on_cpu([x], [y], |[x], [y]| cpu::forward::<T>(x, &gain, roots, y, rstd))
                })
            })
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => {
            call.kernels(cuda::forward(&launcher, dtype, gain, [x, y, rstd], (eps, whole), (n, d)))
        }
    }
}

/// Gradients of [`forward`]: dx is overwritten, or added to with `accumulate_dx`; dweight, if there is one,
/// is added to.
///
/// The rows are summed into dweight in an order that depends only on their number, so the result is the same
/// for any number of threads.
///
/// # Shapes
/// `dy, x, dx: [n, d], gain, dweight: [d], rstd: [n]`
///
/// # Errors
/// As [`forward`].
pub fn backward<'a, 'b>(
    dy: &Tensor,
    x: &Tensor,
    gain: impl Into<Gain<'b>>,
    rstd: &Tensor,
    dx: &Tensor,
    accumulate_dx: bool,
    dweight: impl Into<Option<&'a Tensor>>,
) -> Result<(), OpError> {
    let call = ArgCheck::new("rms_norm::backward");
    run_backward(call, [dy, x, rstd], (gain.into(), None), (dx, accumulate_dx), dweight.into())
}

/// [`backward`] of whole rows, or [`backward_part`].
fn run_backward(
    call: ArgCheck,
    [dy, x, rstd]: [&Tensor; 3],
    (gain, whole): (Gain<'_>, Option<WholeRows<'_>>),
    (dx, accumulate_dx): (&Tensor, bool),
    dweight: Option<&Tensor>,
) -> Result<(), OpError> {
    let Gain { weight, centered, .. } = gain;
    let (n, d) = call.rows(("x", x))?;
    call.expect(("dy", dy), &[n, d])?;
    call.expect(("weight", weight), &[d])?;
    call.expect(("rstd", rstd), &[n])?;
    call.expect(("dx", dx), &[n, d])?;
    let dweight_argument = dweight.map(|dweight| ("dweight", dweight));
    dweight_argument.map_or(Ok(()), |argument| call.expect(argument, &[d]))?;
    let with_dweight = |argument| -> Vec<_> { [argument].into_iter().chain(dweight_argument).collect() };
    let sums = WholeRows::check(whole, call, (n, d), gain)?;
    let inputs = [("dy", dy), ("x", x), ("weight", weight), ("rstd", rstd)];
    let inputs: Vec<_> = inputs.into_iter().chain(sums).collect();
    let target = call.elementwise(&with_dweight(("dx", dx)), &inputs)?;
    let elements = [("x", x), ("dy", dy), ("weight", weight), ("dx", dx)];
    let f32s: Vec<_> = with_dweight(("rstd", rstd)).into_iter().chain(sums).collect();
    let dtype = call.element_type(&elements, &f32s)?;
    match target {
        Target::Cpu => {
            let (weight, rstd) = (call.read(weight)?, call.read(rstd)?);
            let gain = gain.values(&weight);
            let sums = whole.map(|whole| call.read(whole.sums)).transpose()?;
            let whole = whole.zip(sums.as_ref()).map(|(whole, sums)| (&**sums, whole.width));
            let mut partials = Vec::new();
            with_element_type!(dtype, T => call.on_cpu([dy, x], [dx], |[dy, x], [dx]| {
                let inputs = cpu::BackwardInputs::<T> { dy, x, gain: &gain, rstd: &rstd, centered, whole };
                partials = cpu::backward(inputs, dx, accumulate_dx);
            }))?;
            dweight.map_or(Ok(()), |dweight| {
                call.write(dweight, |dweight| {
                    cpu::add_partials(&partials, dweight);
                    Ok(())
                })
            })
        }
        Target::Dry(cpu) => {
            cpu.alloc_temporary(cpu::backward_scratch_bytes(n, d));
            Ok(())
        }
        Target::Kernels(launcher) => {
            let tensors = cuda::Backward { dy, x, gain, rstd, whole, dx, dweight };
            call.kernels(cuda::backward(&launcher, dtype, &tensors, accumulate_dx, (n, d)))
        }
    }
}
