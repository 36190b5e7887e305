//! Depthwise causal convolution of the channels that a rank has, for all of their tokens.

use super::{BackwardPass, ForwardPass, Init, LayerError, Parameter, ParameterList};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::Documents;
use ulysses_kernels::causal_conv::{self, Filter};

/// `y[t, c] = act(bias[c] + Σⱼ weight[c, j] · x[t − (taps − 1) + j, c])`, within documents.
#[derive(Debug, Clone, Copy)]
pub(super) struct CausalConv {
    /// `[channels, 1, taps]`
    weight: Parameter,
    /// `[channels]`
    bias: Option<Parameter>,
    /// Whether SiLU follows.
    silu: bool,
}

impl CausalConv {
    /// Adds the parameter `name.weight`, `[channels, 1, taps]`.
    pub(super) fn new(
        parameters: &mut ParameterList,
        name: &str,
        channels: usize,
        taps: usize,
        init: Init,
        silu: bool,
    ) -> Self {
        let weight = parameters.add(&format!("{name}.weight"), [channels, 1, taps], init);
        Self { weight, bias: None, silu }
    }

    /// Adds the parameter `name.bias`, which is 0 at first.
    pub(super) fn add_bias(&mut self, parameters: &mut ParameterList, name: &str, channels: usize) {
        self.bias = Some(parameters.add(&format!("{name}.bias"), [channels], Init::Zeros));
    }

    /// Whether both are parts of one.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.weight == other.weight
    }

    /// Keeps the channels of one rank of tp. `channels`: those of every rank, ascending.
    pub(super) fn divide(&self, parameters: &mut ParameterList, channels: &[Vec<Range<usize>>], rank: usize) {
        for parameter in [self.weight].into_iter().chain(self.bias) {
            parameters.shard(parameter, 0, channels.to_vec(), rank);
        }
    }

    /// The convolution of some channels, within documents.
    ///
    /// # Shapes
    /// `x`, result: `[batch, seq, heads, dim]`, of which the last two dimensions are the channels.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        channels: &Range<usize>,
        documents: &Documents,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let y = pass.workspace().alloc(x.dims())?;
        if !channels.is_empty() {
            let (weight, bias) = self.part(channels, pass)?;
            let filter = self.filter(&weight, bias.as_ref(), documents);
            causal_conv::forward(&x.flatten_from(2)?, &filter, &y.flatten_from(2)?)?;
        }
        Ok(y)
    }

    /// Backward of [`forward`](Self::forward): adds to the gradients of the parameters, unless they are frozen, and returns that
    /// of `x`.
    pub(super) fn backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        channels: &Range<usize>,
        documents: &Documents,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let forward = &pass.forward;
        let dx = forward.workspace().alloc(x.dims())?;
        if !channels.is_empty() {
            let (weight, bias) = self.part(channels, forward)?;
            let filter = self.filter(&weight, bias.as_ref(), documents);
            let gradient =
                |parameter| pass.gradient(parameter).map(|gradient| rows(gradient, channels)).transpose();
            let dweight = gradient(self.weight)?;
            let dbias = self.bias.map(gradient).transpose()?.flatten();
            let [dy, x, dx] = [dy, x, &dx].map(|tensor| tensor.flatten_from(2));
            causal_conv::backward(&dy?, &x?, &filter, &dx?, dweight.as_ref(), dbias.as_ref())?;
        }
        Ok(dx)
    }

    /// Some channels of weight and bias.
    fn part(
        &self,
        channels: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<Tensor>), LayerError> {
        let bias = self.bias.map(|bias| rows(&pass[bias], channels)).transpose()?;
        Ok((rows(&pass[self.weight], channels)?, bias))
    }

    fn filter<'a>(
        &self,
        weight: &'a Tensor,
        bias: Option<&'a Tensor>,
        documents: &'a Documents,
    ) -> Filter<'a> {
        Filter { weight, bias, silu: self.silu, documents }
    }
}

fn rows(parameter: &Tensor, channels: &Range<usize>) -> Result<Tensor, LayerError> {
    Ok(parameter.narrow(0, channels.start, channels.len())?)
}
