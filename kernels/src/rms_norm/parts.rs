//! RMS normalization of rows that ranks divide: each has some elements of every row, and sums over whole rows.

use super::{Gain, WholeRows, cpu, cuda, run_backward, run_forward};
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
    sum_rows(ArgCheck::new("rms_norm::squares"), [x, x], None, sums)
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
    sum_rows(ArgCheck::new("rms_norm::products"), [dy, x], Some(gain.into()), sums)
}

fn sum_rows(
    call: ArgCheck,
    [a, b]: [&Tensor; 2],
    gain: Option<Gain<'_>>,
    sums: &Tensor,
) -> Result<(), OpError> {
    let (n, d) = call.rows(("x", b))?;
    call.expect(("dy", a), &[n, d])?;
    call.expect(("sums", sums), &[n])?;
    let weight = gain.map(|gain| ("weight", gain.weight));
    weight.map_or(Ok(()), |weight| call.expect(weight, &[d]))?;
    let inputs: Vec<_> = [("dy", a), ("x", b)].into_iter().chain(weight).collect();
    let target = call.elementwise(&[("sums", sums)], &inputs)?;
    let dtype = call.element_type(&inputs, &[("sums", sums)])?;
    match target {
        Target::Cpu => {
            let weight = weight.map(|(_, weight)| call.read(weight)).transpose()?;
            let gain = gain.zip(weight.as_ref()).map(|(gain, weight)| gain.values(weight));
            call.write(sums, |sums| {
                with_element_type!(dtype, T => {
                    call.on_cpu([a, b], [], |[a, b], []| cpu::products::<T>(a, b, gain.as_deref(), d, sums))
                })
            })
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => {
            call.kernels(cuda::products(&launcher, dtype, [a, b], gain, sums, (n, d)))
        }
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
    run_forward(call, x, gain.into(), (eps, Some(whole)), [y, rstd])
}

/// Gradients of [`forward_part`], as [`backward`](super::backward).
///
/// # Shapes
/// `dy, x, dx: [n, d], gain, dweight: [d], rstd: [n]`
///
/// # Errors
/// As [`forward_part`].
pub fn backward_part<'a, 'b>(
    [dy, x, rstd]: [&Tensor; 3],
    gain: impl Into<Gain<'b>>,
    whole: WholeRows<'_>,
    (dx, accumulate_dx): (&Tensor, bool),
    dweight: impl Into<Option<&'a Tensor>>,
) -> Result<(), OpError> {
    let call = ArgCheck::new("rms_norm::backward_part");
    run_backward(call, [dy, x, rstd], (gain.into(), Some(whole)), (dx, accumulate_dx), dweight.into())
}
