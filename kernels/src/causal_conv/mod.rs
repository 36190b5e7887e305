//! Depthwise causal convolution along the tokens of a document: the short convolution of linear attention, followed by SiLU,
//! and that of LFM2.
//!
//! `y[t, c] = act(bias[c] + Σⱼ weight[c, j] · x[t − (w − 1) + j, c])`, where tokens before the document's first count as
//! zero: PyTorch's `Conv1d` with `groups = C` and a padding of w − 1, without its last outputs.

mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

use super::arg_check::{ArgCheck, RowSizes};
use super::cast::with_element_type;
use super::{Documents, OpError};
use crate::device::{Arg, Target};
use candle_core::Tensor;

/// The largest number of taps.
pub const MAX_WIDTH: usize = 8;

/// The convolution of each channel.
#[derive(Debug, Clone, Copy)]
pub struct Filter<'a> {
    /// The taps, that of the current token last, `[C, w]`.
    pub weight: &'a Tensor,
    /// Added to each sum, `[C]`.
    pub bias: Option<&'a Tensor>,
    /// Whether SiLU follows.
    pub silu: bool,
    /// The documents of the sequences.
    pub documents: &'a Documents,
}

/// Writes the convolution of x.
///
/// # Shapes
/// `x, y: [n, C], weight: [C, w], bias: [C]`, where n = B · S, and w is at most [`MAX_WIDTH`]
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, more taps than [`MAX_WIDTH`], an output that shares storage with
/// another argument, or a device without kernels in this build.
pub fn forward(x: &Tensor, filter: &Filter<'_>, y: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("causal_conv::forward");
    let sizes = Sizes::check(call, x, filter)?;
    call.expect(("y", y), &[sizes.tokens, sizes.channels])?;
    let inputs: Vec<_> = [("x", x)].into_iter().chain(filter.named()).collect();
    let target = call.elementwise(&[("y", y)], &inputs)?;
    let dtype = call.element_type(&[&inputs[..], &[("y", y)]].concat(), &[])?;
    match target {
        Target::Cpu => {
            let weights = filter.weights(call, sizes)?;
            with_element_type!(dtype, T => call.on_cpu([x], [y], |[x], [y]| {
                cpu::forward::<T>(x, &weights, filter.silu, y);
            }))
        }
        Target::Dry(cpu) => {
            cpu.alloc_temporary(sizes.weights_bytes());
            Ok(())
        }
        Target::Kernels(launcher) => call.kernels(cuda::forward(&launcher, sizes, filter, x, y)),
    }
}

/// Gradients of [`forward`]: dx is overwritten; dweight and dbias, if there are any, are added to. They may be parts of one
/// tensor.
///
/// The tokens are summed into dweight and dbias in an order that depends only on their number, so the result is the same
/// for any number of threads.
///
/// # Shapes
/// `dy, x, dx: [n, C], weight, dweight: [C, w], bias, dbias: [C]`; dweight and dbias in f32
///
/// # Errors
/// As [`forward`].
pub fn backward<'a, 'b>(
    dy: &Tensor,
    x: &Tensor,
    filter: &Filter<'_>,
    dx: &Tensor,
    dweight: impl Into<Option<&'a Tensor>>,
    dbias: impl Into<Option<&'b Tensor>>,
) -> Result<(), OpError> {
    let gradients = Gradients { dx, dweight: dweight.into(), dbias: dbias.into() };
    let call = ArgCheck::new("causal_conv::backward");
    let sizes = Sizes::check(call, x, filter)?;
    let Sizes { tokens, channels, width } = sizes;
    call.expect(("dy", dy), &[tokens, channels])?;
    call.expect(("dx", dx), &[tokens, channels])?;
    let dweight = gradients.dweight.map(|dweight| ("dweight", dweight));
    let dbias = gradients.dbias.map(|dbias| ("dbias", dbias));
    dweight.map_or(Ok(()), |argument| call.expect(argument, &[channels, width]))?;
    dbias.map_or(Ok(()), |argument| call.expect(argument, &[channels]))?;
    let inputs: Vec<_> = [("dy", dy), ("x", x)].into_iter().chain(filter.named()).collect();
    let outputs: Vec<_> = [("dx", dx)].into_iter().chain(dweight).collect();
    let target = call.elementwise(&outputs, &inputs)?;
    // Apart from dweight, which may be part of the same flat gradient.
    if let Some(dbias) = dbias {
        call.target(&[dbias], &[&inputs[..], &[("dx", dx)]].concat())?;
    }
    let sums: Vec<_> = dweight.into_iter().chain(dbias).collect();
    let dtype = call.element_type(&[&inputs[..], &[("dx", dx)]].concat(), &sums)?;
    match target {
        Target::Cpu => {
            let weights = filter.weights(call, sizes)?;
            let mut partials = Vec::new();
            with_element_type!(dtype, T => call.on_cpu([dy, x], [dx], |[dy, x], [dx]| {
                partials = cpu::backward::<T>(dy, x, &weights, filter.silu, dx);
            }))?;
            drop(weights);
            let sums = cpu::sum_partials(&partials, sizes);
            gradients.dweight.map_or(Ok(()), |dweight| call.add_sums(dweight, &sums.weight))?;
            gradients.dbias.map_or(Ok(()), |dbias| call.add_sums(dbias, &sums.bias))
        }
        Target::Dry(cpu) => {
            cpu.alloc_temporary(sizes.weights_bytes() + cpu::partials_bytes(sizes));
            Ok(())
        }
        Target::Kernels(launcher) => {
            call.kernels(cuda::backward(&launcher, sizes, filter, dy, x, &gradients))
        }
    }
}

/// Outputs of the backward pass.
#[derive(Clone, Copy)]
struct Gradients<'a> {
    dx: &'a Tensor,
    dweight: Option<&'a Tensor>,
    dbias: Option<&'a Tensor>,
}

impl Filter<'_> {
    fn named(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        [("weight", self.weight)].into_iter().chain(self.bias.map(|bias| ("bias", bias)))
    }

    fn weights(&self, call: ArgCheck, sizes: Sizes) -> Result<cpu::Weights, OpError> {
        let weight = call.read(self.weight)?;
        let bias = self.bias.map(|bias| call.read(bias)).transpose()?;
        Ok(cpu::Weights::new(&weight, bias.as_deref(), sizes, self.documents))
    }
}

/// The sizes of a call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    tokens: usize,
    channels: usize,
    width: usize,
}

impl Sizes {
    fn check(call: ArgCheck, x: &Tensor, filter: &Filter<'_>) -> Result<Self, OpError> {
        let RowSizes { count: tokens, width: channels } = call.rows(("x", x))?;
        let width = call.rows(("weight", filter.weight))?.width;
        call.expect(("weight", filter.weight), &[channels, width])?;
        call.expect_value("weight", width as f64, width <= MAX_WIDTH, "at most 8 taps per channel")?;
        filter.bias.map_or(Ok(()), |bias| call.expect(("bias", bias), &[channels]))?;
        let documents = filter.documents;
        call.expect_tokens("documents", documents.batch() * documents.seq_len(), tokens)?;
        Ok(Self { tokens, channels, width })
    }

    fn is_empty(self) -> bool {
        self.tokens == 0 || self.channels == 0
    }

    /// The parameters of the kernels.
    fn args(self) -> [Arg<'static>; 3] {
        [(self.tokens as u64).into(), (self.channels as u32).into(), (self.width as u32).into()]
    }

    /// Bytes of the weights and of the distances to the ends of documents, as the CPU kernels read them.
    fn weights_bytes(self) -> usize {
        (self.width + 1) * self.channels * size_of::<f32>() + 2 * self.tokens
    }
}
