//! A linear layer: all outputs of a weight, or some of them.

mod bias;
mod divide;
mod outputs;
mod rows;

pub(crate) use bias::{add_bias, add_bias_gradient};
use outputs::{Outputs, Part};
use rows::WeightPart;
pub(super) use rows::{LinearGradients, LinearRows};

use super::{BackwardPass, ForwardPass, Init, LayerError, Parameter, ParameterList};
use candle_core::Tensor;
use std::ops::Range;

/// `y = x·Wᵀ`, or `x·Wᵀ + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Parameter,
    layout: WeightLayout,
    /// Among the rows or columns of the weight.
    outputs: Outputs,
    bias: Option<Bias>,
}

/// The elements of a parameter that are a layer's bias.
#[derive(Debug, Clone, Copy)]
struct Bias {
    parameter: Parameter,
    outputs: Outputs,
}

/// The dimensions of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[out, in]`, as PyTorch's `Linear`.
    OutIn,
    /// `[in, out]`, as the `Conv1D` of GPT-2.
    InOut,
}

impl WeightLayout {
    fn shape(self, [out, input]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::OutIn => [out, input],
            Self::InOut => [input, out],
        }
    }

    /// The dimension of the outputs.
    fn output_dim(self) -> usize {
        usize::from(self == Self::InOut)
    }

    /// With inputs and outputs exchanged.
    fn transposed(self) -> Self {
        match self {
            Self::OutIn => Self::InOut,
            Self::InOut => Self::OutIn,
        }
    }
}

/// A new weight.
#[derive(Debug, Clone, Copy)]
pub struct WeightSpec {
    /// Its initial values.
    pub init: Init,
    /// Its dimensions.
    pub layout: WeightLayout,
}

impl From<Init> for WeightSpec {
    fn from(init: Init) -> Self {
        Self { init, layout: WeightLayout::OutIn }
    }
}

/// The new weights of a module.
#[derive(Debug, Clone, Copy)]
pub struct ModuleWeights {
    /// The weights of the projections of its input.
    pub input: WeightSpec,
    /// The weight of the projection of its output.
    pub output: WeightSpec,
}

/// Names of the parameters of [`Linear::group`].
#[derive(Debug, Clone, Copy)]
pub enum GroupNames<'a, const N: usize> {
    /// One for each layer.
    Each([&'a str; N]),
    /// One for all: the outputs of one layer after the other.
    One(&'a str),
    /// One for all: so many outputs of each layer in turn.
    Interleaved(&'a str, [usize; N]),
}

impl Linear {
    /// Adds the parameter `name.weight`, `[out, in]` unless its layout is another.
    pub fn new(
        parameters: &mut ParameterList,
        name: &str,
        shape: [usize; 2],
        weight: impl Into<WeightSpec>,
    ) -> Self {
        let WeightSpec { init, layout } = weight.into();
        let weight = parameters.add(&format!("{name}.weight"), layout.shape(shape), init);
        Self { weight, layout, outputs: Outputs::adjacent(0..shape[0]), bias: None }
    }

    /// Layers with the same input: each with a parameter of its own, or the rows of one.
    pub fn group<const N: usize>(
        parameters: &mut ParameterList,
        names: GroupNames<'_, N>,
        outs: [usize; N],
        input: usize,
        weight: impl Into<WeightSpec>,
    ) -> [Self; N] {
        let weight = weight.into();
        let (name, runs) = match names {
            GroupNames::Each(names) => {
                let mut outs = outs.into_iter();
                return names.map(|name| {
                    Self::new(parameters, name, [outs.next().unwrap_or_default(), input], weight)
                });
            }
            GroupNames::One(name) => (name, None),
            GroupNames::Interleaved(name, runs) => (name, Some(runs)),
        };
        let all = Self::new(parameters, name, [outs.iter().sum(), input], weight);
        let widths = runs.unwrap_or(outs);
        let stride = widths.iter().sum();
        std::array::from_fn(|layer| {
            let (start, out) = (widths[..layer].iter().sum(), outs[layer]);
            let outputs = match runs {
                None => Outputs::adjacent(start..start + out),
                Some(runs) => Outputs::runs(start, out, [runs[layer], stride]),
            };
            Self { outputs, ..all.clone() }
        })
    }

    /// Adds the parameter `name.bias`, `[out]`, which is 0 at first.
    pub fn add_bias(&mut self, parameters: &mut ParameterList, name: &str) {
        let outputs = Outputs::adjacent(0..self.num_outputs());
        let parameter = parameters.add(&format!("{name}.bias"), [self.num_outputs()], Init::Zeros);
        self.bias = Some(Bias { parameter, outputs });
    }

    /// Adds biases to the layers of a [`group`](Self::group), as many parameters as they have weights.
    pub fn add_group_bias<const N: usize>(
        parameters: &mut ParameterList,
        names: GroupNames<'_, N>,
        layers: [&mut Self; N],
    ) {
        match names {
            GroupNames::Each(names) => {
                names.into_iter().zip(layers).for_each(|(name, layer)| layer.add_bias(parameters, name));
            }
            GroupNames::One(name) | GroupNames::Interleaved(name, _) => {
                let outs: usize = layers.iter().map(|layer| layer.num_outputs()).sum();
                let parameter = parameters.add(&format!("{name}.bias"), [outs], Init::Zeros);
                for layer in layers {
                    layer.bias = Some(Bias { parameter, outputs: layer.outputs });
                }
            }
        }
    }

    /// Number of outputs.
    pub fn num_outputs(&self) -> usize {
        self.outputs.len()
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
        self.gradient_rows(&(0..self.num_outputs()), pass).add(dy, x)
    }

    /// The layer with some of its outputs.
    pub(super) fn rows(
        &self,
        range: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<LinearRows, LayerError> {
        let weight = Part::new(&pass[self.weight], self.layout, self.outputs.part(range)).read()?;
        let bias = |bias: Bias| Part::for_bias(&pass[bias.parameter], bias.outputs.part(range)).read();
        Ok(LinearRows { weight, layout: self.layout, bias: self.bias.map(bias).transpose()? })
    }

    /// The gradients of [`rows`](Self::rows).
    pub(super) fn gradient_rows<'a>(
        &self,
        range: &Range<usize>,
        pass: &BackwardPass<'a>,
    ) -> LinearGradients<'a> {
        let bias =
            self.bias.and_then(|bias| Some((pass.gradient(bias.parameter)?, bias.outputs.part(range))));
        let bias = bias.map(|(gradient, outputs)| Part::for_bias(gradient, outputs));
        let layout = self.layout;
        let part =
            WeightPart { weight: self.weight, layout, divided: layout, range: self.outputs.part(range) };
        LinearGradients { part, bias, pass: *pass }
    }

    /// The layer with some of its inputs, without its bias.
    pub(super) fn columns(
        &self,
        inputs: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<LinearRows, LayerError> {
        let inputs = Outputs::adjacent(inputs.clone());
        let weight = Part::new(&pass[self.weight], self.layout.transposed(), inputs).read()?;
        Ok(LinearRows { weight, layout: self.layout, bias: None })
    }

    /// The gradients of [`columns`](Self::columns).
    pub(super) fn gradient_columns<'a>(
        &self,
        inputs: &Range<usize>,
        pass: &BackwardPass<'a>,
    ) -> LinearGradients<'a> {
        let (layout, range) = (self.layout, Outputs::adjacent(inputs.clone()));
        let part = WeightPart { weight: self.weight, layout, divided: layout.transposed(), range };
        LinearGradients { part, bias: None, pass: *pass }
    }

    /// Adds the bias, if there is one, to the outputs that the weights are still to be added to.
    pub(super) fn add_bias_to(&self, y: &Tensor, pass: &ForwardPass<'_>) -> Result<(), LayerError> {
        match self.bias {
            None => Ok(()),
            Some(Bias { parameter, .. }) => add_bias(&pass[parameter], y, true, pass.workspace()),
        }
    }

    /// Adds to the gradient of the bias, if there is one that is not frozen.
    pub(super) fn backward_bias(&self, dy: &Tensor, pass: &BackwardPass<'_>) -> Result<(), LayerError> {
        match self.bias.and_then(|bias| pass.gradient(bias.parameter)) {
            None => Ok(()),
            Some(gradient) => add_bias_gradient(dy, gradient, pass.ctx().workspace()),
        }
    }
}
