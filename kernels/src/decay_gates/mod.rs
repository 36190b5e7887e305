//! Decay and rate of linear attention from their projections, per token and head. By the gated delta rule (arXiv 2412.06464)
//! `g = −exp(a_log) · softplus(a + dt_bias)` and `beta = σ(b)`. In Mamba 2 (arXiv 2405.21060) the rate is the time step
//! `clamp(softplus(a + dt_bias))`, and the decay is `−exp(a_log)` times it. In Kimi Linear (arXiv 2510.26692) each of a head's C channels
//! has a decay, from a projection and a `dt_bias` of its own; elsewhere C is 1.

mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use super::OpError;
use super::arg_check::{ArgCheck, Argument, RowSizes};
use super::cast::{Float, with_element_type};
use crate::device::Target;
use candle_core::Tensor;

/// Inputs of both directions.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Projection for the decay, `[n, H·C]`.
    pub a: &'a Tensor,
    /// The rate.
    pub rate: Rate<'a>,
    /// Logarithm of the largest decay per unit of time, `[H]`.
    pub a_log: &'a Tensor,
    /// Added to `a`, `[H·C]`.
    pub dt_bias: &'a Tensor,
}

/// The rate of an update of the state.
#[derive(Debug, Clone, Copy)]
pub enum Rate<'a> {
    /// σ of this projection `[n, H]`.
    Projection(&'a Tensor),
    /// The time step. A head then has one.
    TimeStep {
        /// Its smallest and largest value.
        limits: [f64; 2],
    },
}

/// Outputs of the backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Gradients<'a> {
    /// Gradient of `a`, `[n, H·C]`, overwritten.
    pub da: &'a Tensor,
    /// Gradient of the rate's projection, `[n, H]`, overwritten; `None` if it is not needed.
    pub db: Option<&'a Tensor>,
    /// Gradient of `a_log`, `[H]` in f32, added to; `None` if it is frozen.
    pub da_log: Option<&'a Tensor>,
    /// Gradient of `dt_bias`, `[H·C]` in f32, added to; `None` if it is frozen.
    pub ddt_bias: Option<&'a Tensor>,
}

/// Writes the logarithm of the decay, at most 0, and the rate.
///
/// # Shapes
/// [`Operands`] to `g [n, H·C]` and `beta [n, H]` in f32.
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, an output that shares storage with another argument, or a device
/// without kernels in this build.
pub fn forward(operands: &Operands<'_>, g: &Tensor, beta: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("decay_gates::forward");
    let dims = operands.check(call)?;
    let outputs = [("g", g), ("beta", beta)];
    call.expect(("g", g), &dims.decays())?;
    call.expect(("beta", beta), &dims.rates())?;
    let target = call.elementwise(&outputs, &operands.named())?;
    let dtype = call.element_type(&operands.named(), &outputs)?;
    match target {
        Target::Cpu => {
            with_element_type!(dtype, T => operands.on_cpu(call, [], |inputs: cpu::Inputs<'_, T>, []| {
                call.on_cpu([], [g, beta], |[], [g, beta]| cpu::forward(&inputs, g, beta))
            })?)
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::forward(&launcher, dims, operands, g, beta)),
    }
}

/// Gradients of [`forward`]. Tokens are summed in an order that depends only on their number.
///
/// # Shapes
/// [`Operands`], `dg [n, H·C]` and `dbeta [n, H]` in f32 to [`Gradients`].
///
/// # Errors
/// As [`forward`].
pub fn backward(
    operands: &Operands<'_>,
    dg: &Tensor,
    dbeta: &Tensor,
    gradients: &Gradients<'_>,
) -> Result<(), OpError> {
    let call = ArgCheck::new("decay_gates::backward");
    let dims = operands.check(call)?;
    let Gradients { da, db, da_log, ddt_bias } = *gradients;
    let db = db.filter(|_| operands.b().is_some());
    let upstream = [("dg", dg), ("dbeta", dbeta)];
    let outputs: Vec<_> = [("da", da)].into_iter().chain(db.map(|db| ("db", db))).collect();
    call.expect(("dg", dg), &dims.decays())?;
    call.expect(("da", da), &dims.decays())?;
    call.expect(("dbeta", dbeta), &dims.rates())?;
    db.map_or(Ok(()), |db| call.expect(("db", db), &dims.rates()))?;
    let sums = [da_log.map(|sum| ("da_log", sum)), ddt_bias.map(|sum| ("ddt_bias", sum))];
    let inputs = [&operands.named()[..], &upstream].concat();
    let target = call.elementwise(&outputs, &inputs)?;
    // The sums may be parts of one flat gradient.
    for (sum, size) in sums.into_iter().zip([dims.heads, dims.columns()]) {
        let Some(sum) = sum else { continue };
        call.expect(sum, &[size])?;
        call.target(&[sum], &[&inputs[..], &outputs].concat())?;
    }
    let elements = [&operands.named()[..], &outputs].concat();
    let f32s: Vec<_> = upstream.into_iter().chain(sums.into_iter().flatten()).collect();
    let dtype = call.element_type(&elements, &f32s)?;
    match target {
        Target::Cpu => {
            let (dg, dbeta) = (call.read(dg)?, call.read(dbeta)?);
            let mut partials = Vec::new();
            with_element_type!(dtype, T => match db {
                Some(db) => operands.on_cpu(call, [da, db], |inputs: cpu::Inputs<'_, T>, [da, db]| {
                    partials = cpu::backward(&inputs, &dg, &dbeta, da, Some(db));
                }),
                None => operands.on_cpu(call, [da], |inputs: cpu::Inputs<'_, T>, [da]| {
                    partials = cpu::backward(&inputs, &dg, &dbeta, da, None);
                }),
            })?;
            let [of_a_log, of_dt_bias] = cpu::sum_partials(&partials, dims);
            da_log.map_or(Ok(()), |da_log| call.add_sums(da_log, &of_a_log))?;
            ddt_bias.map_or(Ok(()), |ddt_bias| call.add_sums(ddt_bias, &of_dt_bias))
        }
        Target::Dry(cpu) => {
            cpu.alloc_temporary(cpu::partials_bytes(dims));
            Ok(())
        }
        Target::Kernels(launcher) => {
            let gradients = Gradients { db, ..*gradients };
            call.kernels(cuda::backward(&launcher, dims, operands, dg, dbeta, &gradients))
        }
    }
}

impl<'a> Operands<'a> {
    fn named(&self) -> Vec<Argument<'a>> {
        let parameters = [("a_log", self.a_log), ("dt_bias", self.dt_bias)];
        [("a", self.a)].into_iter().chain(parameters).chain(self.b().map(|b| ("b", b))).collect()
    }

    fn b(&self) -> Option<&'a Tensor> {
        match self.rate {
            Rate::Projection(b) => Some(b),
            Rate::TimeStep { .. } => None,
        }
    }

    /// Calls `work` with the elements. Those of the only projection are opened twice.
    fn on_cpu<T: Float, R, const OUT: usize>(
        &self,
        call: ArgCheck,
        outputs: [&Tensor; OUT],
        work: impl FnOnce(cpu::Inputs<'_, T>, [&mut [T]; OUT]) -> R,
    ) -> Result<R, OpError> {
        let (a_log, dt_bias) = (call.read(self.a_log)?, call.read(self.dt_bias)?);
        call.on_cpu([self.a, self.b().unwrap_or(self.a)], outputs, |[a, b], outputs| {
            let (b, channels) = (self.b().map(|_| b), dt_bias.len() / a_log.len().max(1));
            let limits = self.limits();
            work(cpu::Inputs { a, b, limits, a_log: &a_log, dt_bias: &dt_bias, channels }, outputs)
        })
    }

    /// The bounds of softplus. It is at least 0.
    fn limits(&self) -> [f64; 2] {
        match self.rate {
            Rate::Projection(_) => [0.0, f64::INFINITY],
            Rate::TimeStep { limits } => limits,
        }
    }

    /// Checks the shapes against each other.
    fn check(&self, call: ArgCheck) -> Result<Dims, OpError> {
        let RowSizes { count: tokens, width: columns } = call.rows(("a", self.a))?;
        let heads = match self.b() {
            Some(b) => call.rows(("b", b))?.width,
            None => columns,
        };
        // So a difference is one of `a_log`.
        let heads = if columns > 0 && columns.is_multiple_of(heads) { heads } else { columns };
        let dims = Dims { tokens, heads, channels: columns.checked_div(heads).unwrap_or(1) };
        self.b().map_or(Ok(()), |b| call.expect(("b", b), &dims.rates()))?;
        call.expect(("a_log", self.a_log), &[heads])?;
        call.expect(("dt_bias", self.dt_bias), &[columns])?;
        Ok(dims)
    }
}

/// The sizes of a call.
#[derive(Debug, Clone, Copy)]
struct Dims {
    tokens: usize,
    heads: usize,
    /// Decays of each head.
    channels: usize,
}

impl Dims {
    /// The number of decays of a token.
    fn columns(self) -> usize {
        self.heads * self.channels
    }

    fn decays(self) -> [usize; 2] {
        [self.tokens, self.columns()]
    }

    fn rates(self) -> [usize; 2] {
        [self.tokens, self.heads]
    }
}
