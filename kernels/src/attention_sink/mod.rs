//! Attention sinks (arXiv 2309.17453, section 3.3; gpt-oss): a learned logit per query head takes part in the softmax and
//! contributes no value. Attention without them has an output and log-denominators, which these ops turn into those with
//! them.

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

/// `lse = ln(e^lse + e^sink)` and `o = o · e^(lse before − lse after)`, in place.
///
/// # Shapes
/// `sinks: [H]`, `o: [B, S, H, D]` of one element type; `lse: [B, H, S]` in f32.
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, or tensors that share storage.
pub fn forward(sinks: &Tensor, o: &Tensor, lse: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("attention_sink::forward");
    let rows = LseSizes::check(call, sinks, lse)?;
    let head_dim = o.dims().get(3).copied().unwrap_or_default();
    call.expect(("o", o), &[rows.batch, rows.tokens, rows.heads, head_dim])?;
    let target = call.elementwise(&[("o", o), ("lse", lse)], &[("sinks", sinks)])?;
    let dtype = call.element_type(&[("o", o), ("sinks", sinks)], &[("lse", lse)])?;
    match target {
        Target::Cpu => {
            let sinks = call.read(sinks)?;
            with_element_type!(dtype, T => call.on_cpu([], [o], |[], [o]: [&mut [T]; 1]| {
                call.on_cpu([], [lse], |[], [lse]| cpu::forward(&sinks, o, lse, rows.tokens, head_dim))
            })?)
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::forward(&launcher, sinks, o, lse, rows, head_dim)),
    }
}

/// Adds the gradient of the sinks, `−Σ e^(sink − lse) · delta` over the tokens, in an order that depends only on their number.
/// The gradients of queries, keys and values are those of attention without sinks with this `lse` and `delta`.
///
/// # Shapes
/// `sinks: [H]`; `lse: [B, H, S]` as [`forward`] wrote it, and `delta: [B, H, S]`, the row sums of `o · dout`
/// ([`attention::delta`](crate::attention::delta)), to `dsinks: [H]`, all in f32.
///
/// # Errors
/// As [`forward`].
pub fn backward(sinks: &Tensor, lse: &Tensor, delta: &Tensor, dsinks: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("attention_sink::backward");
    let rows = LseSizes::check(call, sinks, lse)?;
    call.expect(("delta", delta), &[rows.batch, rows.heads, rows.tokens])?;
    call.expect(("dsinks", dsinks), sinks.dims())?;
    let inputs = [("lse", lse), ("delta", delta), ("sinks", sinks)];
    let target = call.elementwise(&[("dsinks", dsinks)], &inputs)?;
    call.element_type(&[("sinks", sinks)], &[("lse", lse), ("delta", delta), ("dsinks", dsinks)])?;
    match target {
        Target::Cpu => {
            let (sinks, lse, delta) = (call.read(sinks)?, call.read(lse)?, call.read(delta)?);
            call.write(dsinks, |dsinks| {
                cpu::backward(&sinks, &lse, &delta, dsinks, rows.tokens);
                Ok(())
            })
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::backward(&launcher, sinks, lse, delta, dsinks, rows)),
    }
}

/// The sizes of `lse`, which has an element for each row of the softmax.
#[derive(Clone, Copy)]
struct LseSizes {
    batch: usize,
    heads: usize,
    tokens: usize,
}

impl LseSizes {
    /// Checks `lse`, and the sinks against it.
    fn check(call: ArgCheck, sinks: &Tensor, lse: &Tensor) -> Result<Self, OpError> {
        let [batch, heads, tokens] = [0, 1, 2].map(|dim| lse.dims().get(dim).copied().unwrap_or_default());
        call.expect(("lse", lse), &[batch, heads, tokens])?;
        call.expect(("sinks", sinks), &[heads])?;
        Ok(Self { batch, heads, tokens })
    }
}
