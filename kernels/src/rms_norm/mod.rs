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
use super::arg_check::{ArgCheck, Argument, RowSizes};
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

/// Where the gradients go.
#[derive(Debug, Clone, Copy)]
pub struct Gradients<'a> {
    /// Gradient of `x`, `[n, d]`.
    pub dx: &'a Tensor,
    /// Whether it is added to what is there.
    pub accumulate_dx: bool,
    /// Gradient of the weight, `[d]` in f32, added to; `None` if it is frozen.
    pub dweight: Option<&'a Tensor>,
}

/// Inputs of both directions.
#[derive(Clone, Copy)]
struct Operands<'a> {
    x: &'a Tensor,
    gain: Gain<'a>,
    /// If the rows are parts.
    whole: Option<WholeRows<'a>>,
}

impl<'a> Operands<'a> {
    /// Checks them against each other, and returns the shape of `x`.
    fn check(&self, call: ArgCheck) -> Result<RowSizes, OpError> {
        let rows = call.rows(("x", self.x))?;
        call.expect(("weight", self.gain.weight), &[rows.width])?;
        if let Some(WholeRows { width, sums }) = self.whole {
            call.expect(("sums", sums), &[rows.count])?;
            call.expect_value("width", width as f64, width >= rows.width, "at least the elements of a part")?;
            let expected = "0: the mean of a whole row is not known";
            call.expect_value("gain.centered", 1.0, !self.gain.centered, expected)?;
        }
        Ok(rows)
    }

    fn sums(&self) -> Option<Argument<'a>> {
        self.whole.map(|whole| ("sums", whole.sums))
    }

    fn named(&self) -> Vec<Argument<'a>> {
        [("x", self.x), ("weight", self.gain.weight)].into_iter().chain(self.sums()).collect()
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
    let operands = Operands { x, gain: gain.into(), whole: None };
    run_forward(ArgCheck::new("rms_norm::forward"), &operands, eps, y, rstd)
}

/// [`forward`] of whole rows, or [`forward_part`].
fn run_forward(
    call: ArgCheck,
    operands: &Operands<'_>,
    eps: f64,
    y: &Tensor,
    rstd: &Tensor,
) -> Result<(), OpError> {
    let Operands { x, gain, whole } = *operands;
    let rows = operands.check(call)?;
    call.expect(("y", y), &rows.dims())?;
    call.expect(("rstd", rstd), &[rows.count])?;
    let target = call.elementwise(&[("y", y), ("rstd", rstd)], &operands.named())?;
    let f32s: Vec<_> = [("rstd", rstd)].into_iter().chain(operands.sums()).collect();
    let dtype = call.element_type(&[("x", x), ("weight", gain.weight), ("y", y)], &f32s)?;
    match target {
        Target::Cpu => {
            let weight = call.read(gain.weight)?;
            let factors = gain.values(&weight);
            let sums = whole.map(|whole| call.read(whole.sums)).transpose()?;
            call.write(rstd, |rstd| {
                let roots = match whole.zip(sums.as_ref()) {
                    Some((whole, sums)) => {
                        cpu::roots(sums, whole.width, eps, rstd);
                        cpu::Roots::Given
                    }
                    None => cpu::Roots::Computed { eps, centered: gain.centered },
                };
                with_element_type!(dtype, T => {
                    call.on_cpu([x], [y], |[x], [y]| cpu::forward::<T>(x, &factors, roots, y, rstd))
                })
            })
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::forward(&launcher, rows, operands, eps, y, rstd)),
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
    let operands = Operands { x, gain: gain.into(), whole: None };
    let gradients = Gradients { dx, accumulate_dx, dweight: dweight.into() };
    run_backward(ArgCheck::new("rms_norm::backward"), &operands, dy, rstd, &gradients)
}

/// [`backward`] of whole rows, or [`backward_part`].
fn run_backward(
    call: ArgCheck,
    operands: &Operands<'_>,
    dy: &Tensor,
    rstd: &Tensor,
    gradients: &Gradients<'_>,
) -> Result<(), OpError> {
    let Operands { x, gain, whole } = *operands;
    let Gradients { dx, accumulate_dx, dweight } = *gradients;
    let rows = operands.check(call)?;
    call.expect(("dy", dy), &rows.dims())?;
    call.expect(("rstd", rstd), &[rows.count])?;
    call.expect(("dx", dx), &rows.dims())?;
    let dweight_argument = dweight.map(|dweight| ("dweight", dweight));
    dweight_argument.map_or(Ok(()), |argument| call.expect(argument, &[rows.width]))?;
    let with_dweight = |argument| -> Vec<_> { [argument].into_iter().chain(dweight_argument).collect() };
    let inputs = [&operands.named()[..], &[("dy", dy), ("rstd", rstd)]].concat();
    let target = call.elementwise(&with_dweight(("dx", dx)), &inputs)?;
    let elements = [("x", x), ("dy", dy), ("weight", gain.weight), ("dx", dx)];
    let f32s: Vec<_> = with_dweight(("rstd", rstd)).into_iter().chain(operands.sums()).collect();
    let dtype = call.element_type(&elements, &f32s)?;
    match target {
        Target::Cpu => {
            let (weight, rstd) = (call.read(gain.weight)?, call.read(rstd)?);
            let (factors, centered) = (gain.values(&weight), gain.centered);
            let sums = whole.map(|whole| call.read(whole.sums)).transpose()?;
            let whole = whole.zip(sums.as_ref());
            let whole = whole.map(|(whole, sums)| cpu::WholeSums { sums, width: whole.width });
            let mut partials = Vec::new();
            with_element_type!(dtype, T => call.on_cpu([dy, x], [dx], |[dy, x], [dx]| {
                let inputs = cpu::BackwardInputs::<T> { dy, x, gain: &factors, rstd: &rstd, centered, whole };
                partials = cpu::backward(inputs, dx, accumulate_dx);
            }))?;
            dweight
                .map_or(Ok(()), |dweight| call.add_sums(dweight, &cpu::sum_partials(&partials, rows.width)))
        }
        Target::Dry(cpu) => {
            cpu.alloc_temporary(cpu::backward_scratch_bytes(rows));
            Ok(())
        }
        Target::Kernels(launcher) => {
            call.kernels(cuda::backward(&launcher, rows, operands, dy, rstd, gradients))
        }
    }
}
