//! RMS normalization of rows that ranks divide: each has some elements of every row, and sums over whole rows.

use super::{Gain, Gradients, Operands, WholeRows, cpu, cuda, run_backward, run_forward};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::cast::with_element_type;
use crate::device::Target;
use candle_core::Tensor;

/// Writes the sum of the squares of each row.
///
/// # Shapes
/// `x: [n, d], sums: [n]` in f32
///
/// # Errors
/// As [`forward`](super::forward).
pub fn squares(x: &Tensor, sums: &Tensor) -> Result<(), OpError> {
    sum_rows(ArgCheck::new("rms_norm::squares"), x, x, None, sums)
}

/// Writes the sum of `dy · gain · x` of each row.
///
/// # Shapes
/// `dy, x: [n, d], gain: [d], sums: [n]` in f32
///
/// # Errors
/// As [`forward`](super::forward).
pub fn products<'a>(
    dy: &Tensor,
    x: &Tensor,
    gain: impl Into<Gain<'a>>,
    sums: &Tensor,
) -> Result<(), OpError> {
    sum_rows(ArgCheck::new("rms_norm::products"), dy, x, Some(gain.into()), sums)
}

fn sum_rows(
    call: ArgCheck,
    a: &Tensor,
    b: &Tensor,
    gain: Option<Gain<'_>>,
    sums: &Tensor,
) -> Result<(), OpError> {
    let rows = call.rows(("x", b))?;
    call.expect(("dy", a), &rows.dims())?;
    call.expect(("sums", sums), &[rows.count])?;
    let weight = gain.map(|gain| ("weight", gain.weight));
    weight.map_or(Ok(()), |weight| call.expect(weight, &[rows.width]))?;
    let inputs: Vec<_> = [("dy", a), ("x", b)].into_iter().chain(weight).collect();
    let target = call.elementwise(&[("sums", sums)], &inputs)?;
    let dtype = call.element_type(&inputs, &[("sums", sums)])?;
    match target {
        Target::Cpu => {
            let weight = weight.map(|(_, weight)| call.read(weight)).transpose()?;
            let gain = gain.zip(weight.as_ref()).map(|(gain, weight)| gain.values(weight));
            call.write(sums, |sums| {
                with_element_type!(dtype, T => {
                    call.on_cpu([a, b], [], |[a, b], []| {
                        cpu::products::<T>(a, b, gain.as_deref(), rows.width, sums);
                    })
                })
            })
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::products(&launcher, rows, a, b, gain, sums)),
    }
}

/// As [`forward`](super::forward), of parts of wider rows: `rstd` is that of these.
///
/// # Shapes
/// `x, y: [n, d], gain: [d], rstd: [n]`
///
/// # Errors
/// As [`forward`](super::forward), or a centered gain.
pub fn forward_part<'a>(
    x: &Tensor,
    gain: impl Into<Gain<'a>>,
    eps: f64,
    whole: WholeRows<'_>,
    y: &Tensor,
    rstd: &Tensor,
) -> Result<(), OpError> {
    let call = ArgCheck::new("rms_norm::forward_part");
    run_forward(call, &Operands { x, gain: gain.into(), whole: Some(whole) }, eps, y, rstd)
}

/// Gradients of [`forward_part`], as [`backward`](super::backward).
///
/// # Shapes
/// `dy, x: [n, d], gain: [d], rstd: [n]`, and those of the [`Gradients`]
///
/// # Errors
/// As [`forward_part`].
pub fn backward_part<'a>(
    dy: &Tensor,
    x: &Tensor,
    gain: impl Into<Gain<'a>>,
    rstd: &Tensor,
    whole: WholeRows<'_>,
    gradients: &Gradients<'_>,
) -> Result<(), OpError> {
    let call = ArgCheck::new("rms_norm::backward_part");
    run_backward(call, &Operands { x, gain: gain.into(), whole: Some(whole) }, dy, rstd, gradients)
}
