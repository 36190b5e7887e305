//! A linear layer: all rows of a weight, or some of them.

use super::{BackwardPass, ForwardPass, Init, LayerError, Parameter, ParameterList};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::{Workspace, elementwise, linear};

/// `y = x·Wᵀ`, or `x·Wᵀ + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// The rows of the parameters.
    rows: Range<usize>,
    weight: Parameter,
    bias: Option<Bias>,
}

/// The elements of a parameter that are a layer's bias, from `start`.
#[derive(Debug, Clone, Copy)]
struct Bias {
    parameter: Parameter,
    start: u32,
}

/// Names of the parameters of [`Linear::group`].
#[derive(Debug, Clone, Copy)]
pub enum GroupNames<'a, const N: usize> {
    /// One for each layer.
    Each([&'a str; N]),
    /// One for all.
    One(&'a str),
}

/// The rows of a [`Linear`] that compute some of its outputs.
pub(super) struct LinearRows {
    /// `[rows, in]`
    weight: Tensor,
    /// `[rows]`
    bias: Option<Tensor>,
}

/// The gradients of [`LinearRows`], unless they are frozen.
pub(super) struct LinearGradients {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

impl Linear {
    /// Adds the parameter `name.weight`, `[out, in]`.
    pub fn new(parameters: &mut ParameterList, name: &str, [out, input]: [usize; 2], init: Init) -> Self {
        let weight = parameters.add(&format!("{name}.weight"), [out, input], init);
        Self { rows: 0..out, weight, bias: None }
    }

    /// Layers with the same input: each with a parameter of its own, or the rows of one, one layer after the other.
    pub fn group<const N: usize>(
        parameters: &mut ParameterList,
        names: GroupNames<'_, N>,
        outs: [usize; N],
        input: usize,
        init: Init,
    ) -> [Self; N] {
        let name = match names {
            GroupNames::Each(names) => {
                let mut outs = outs.into_iter();
                return names
                    .map(|name| Self::new(parameters, name, [outs.next().unwrap_or_default(), input], init));
            }
            GroupNames::One(name) => name,
        };
        let Self { weight, .. } = Self::new(parameters, name, [outs.iter().sum(), input], init);
        let mut start = 0;
        outs.map(|out| {
            start += out;
            Self { rows: start - out..start, weight, bias: None }
        })
    }

    /// Adds the parameter `name.bias`, `[out]`, which is 0 at first.
    pub fn add_bias(&mut self, parameters: &mut ParameterList, name: &str) {
        let parameter = parameters.add(&format!("{name}.bias"), [self.num_outputs()], Init::Zeros);
        self.bias = Some(Bias { parameter, start: 0 });
    }

    /// Keeps the outputs of one rank of tp of layers with the same input. `outputs`: for each layer those of every rank. Outputs
    /// that several ranks compute keep their parameters whole, of which each rank then uses some rows.
    pub(super) fn divide_outputs<const N: usize>(
        parameters: &mut ParameterList,
        layers: [&mut Self; N],
        outputs: [&[Range<usize>]; N],
        rank: usize,
    ) {
        let mut layers: Vec<_> = layers.into_iter().zip(outputs).collect();
        while let Some((first, _)) = layers.first() {
            let weight = first.weight;
            let same = layers.partition_point(|(layer, _)| layer.weight == weight);
            let rest = layers.split_off(same);
            divide_rows(parameters, std::mem::replace(&mut layers, rest), rank);
        }
    }

    /// Keeps the inputs of one rank of tp, whose outputs are then summands. `inputs`: those of every rank.
    pub(super) fn divide_inputs(&self, parameters: &mut ParameterList, inputs: &[Range<usize>], rank: usize) {
        let ranks = inputs.iter().map(|inputs| vec![inputs.clone()]).collect();
        parameters.shard(self.weight, 1, ranks, rank);
    }

    /// The weight, of which other layers may have rows too.
    pub fn weight(&self) -> Parameter {
        self.weight
    }

    /// Number of outputs.
    pub fn num_outputs(&self) -> usize {
        self.rows.len()
    }

    /// Writes `y`, or adds to it.
    ///
    /// # Shapes
    /// `x`: `[tokens, in]`, `y`: `[tokens, out]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(
        &self,
        x: &Tensor,
        y: &Tensor,
        accumulate: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        self.rows(&(0..self.num_outputs()), pass)?.forward(x, y, accumulate, pass.workspace())
    }

    /// Writes the gradient of the input, or adds to it.
    ///
    /// # Shapes
    /// `dy`: `[tokens, out]`, `dx`: `[tokens, in]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn backward_input(
        &self,
        dy: &Tensor,
        dx: &Tensor,
        accumulate: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        self.rows(&(0..self.num_outputs()), pass)?.backward_input(dy, dx, accumulate)
    }

    /// Adds to the gradients of the parameters, unless they are frozen.
    ///
    /// # Shapes
    /// `dy`: `[tokens, out]`, `x`: `[tokens, in]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn backward_weight(
        &self,
        dy: &Tensor,
        x: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        self.gradient_rows(&(0..self.num_outputs()), pass)?.add(dy, x, pass.ctx().workspace())
    }

    /// Some rows, sharing the storage.
    pub(super) fn rows(
        &self,
        range: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<LinearRows, LayerError> {
        let weight = pass[self.weight].narrow(0, self.rows.start + range.start, range.len())?;
        let bias =
            |Bias { parameter, start }| pass[parameter].narrow(0, start as usize + range.start, range.len());
        let bias = self.bias.map(bias).transpose()?;
        Ok(LinearRows { weight, bias })
    }

    /// The gradients of some rows, sharing the storage.
    pub(super) fn gradient_rows(
        &self,
        range: &Range<usize>,
        pass: &BackwardPass<'_>,
    ) -> Result<LinearGradients, LayerError> {
        let rows = |parameter, start| {
            pass.gradient(parameter).map(|gradient| gradient.narrow(0, start, range.len())).transpose()
        };
        let weight = rows(self.weight, self.rows.start + range.start)?;
        let bias = |Bias { parameter, start }| rows(parameter, start as usize + range.start);
        Ok(LinearGradients { weight, bias: self.bias.map_or(Ok(None), bias)? })
    }
}

/// [`Linear::divide_outputs`] of layers with one weight.
fn divide_rows(parameters: &mut ParameterList, mut layers: Vec<(&mut Linear, &[Range<usize>])>, rank: usize) {
    let is_shared =
        |(_, ranks): &(_, &[Range<usize>])| ranks.windows(2).any(|pair| pair[0].end > pair[1].start);
    if layers.iter().any(is_shared) {
        for (layer, outputs) in layers {
            let own = &outputs[rank];
            layer.rows = layer.rows.start + own.start..layer.rows.start + own.end;
            layer.bias = layer.bias.map(|bias| Bias { start: own.start as u32, ..bias });
        }
        return;
    }
    let Some((first, outputs)) = layers.first() else { return };
    let (weight, size) = (first.weight, outputs.len());
    let rows = |rank: usize| {
        let rows = layers.iter().map(|(layer, outputs)| {
            layer.rows.start + outputs[rank].start..layer.rows.start + outputs[rank].end
        });
        rows.collect::<Vec<_>>()
    };
    let ranks = (0..size).map(rows).collect();
    parameters.shard(weight, 0, ranks, rank);
    let mut start = 0;
    for (layer, outputs) in &mut layers {
        let end = start + outputs[rank].len();
        layer.rows = start..end;
        start = end;
        if let Some(Bias { parameter, .. }) = layer.bias {
            parameters.shard(parameter, 0, outputs.iter().map(|own| vec![own.clone()]).collect(), rank);
        }
    }
}

impl LinearRows {
    /// As [`Linear::forward`].
    pub(super) fn forward(
        &self,
        x: &Tensor,
        y: &Tensor,
        accumulate: bool,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        if let Some(bias) = &self.bias {
            // The product is added to the bias, not the bias to the product, so that 16-bit elements are rounded
            // once.
            let ones = ones(x.dims()[0], ws)?;
            linear::forward(&ones, &as_column(bias)?, y, accumulate)?;
            ws.recycle(ones);
        }
        Ok(linear::forward(x, &self.weight, y, accumulate || self.bias.is_some())?)
    }

    /// As [`Linear::backward_input`].
    pub(super) fn backward_input(
        &self,
        dy: &Tensor,
        dx: &Tensor,
        accumulate: bool,
    ) -> Result<(), LayerError> {
        Ok(linear::backward_input(dy, &self.weight, dx, accumulate)?)
    }
}

impl LinearGradients {
    /// As [`Linear::backward_weight`].
    pub(super) fn add(&self, dy: &Tensor, x: &Tensor, ws: &Workspace) -> Result<(), LayerError> {
        if let Some(dbias) = &self.bias {
            // Σ dy over the tokens, as a matmul with ones.
            let ones = ones(x.dims()[0], ws)?;
            linear::backward_weight(dy, &ones, &as_column(dbias)?)?;
            ws.recycle(ones);
        }
        match &self.weight {
            Some(dweight) => Ok(linear::backward_weight(dy, x, dweight)?),
            None => Ok(()),
        }
    }
}

/// A one per token, `[tokens, 1]`. With it a bias is a linear layer with one input, and needs no op of its own.
fn ones(tokens: usize, ws: &Workspace) -> Result<Tensor, LayerError> {
    let ones = ws.alloc((tokens, 1))?;
    elementwise::fill(&ones, 1.0)?;
    Ok(ones)
}

/// `[n]` → `[n, 1]`, sharing the storage.
fn as_column(bias: &Tensor) -> Result<Tensor, LayerError> {
    Ok(bias.reshape((bias.elem_count(), 1))?)
}
