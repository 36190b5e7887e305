//! Parameters of a layer by handle, and views of their values and gradients.
//!
//! The engine owns all parameters and passes a layer its own, in one order. A module keeps a [`Parameter`] for each
//! of its own, and finds its values and gradients by it.

use super::{LayerContext, LayerError, ParallelStyle, TensorRank};
use crate::mesh::TensorShard;
use candle_core::Tensor;
use std::num::NonZero;
use std::ops::{Index, Range};
use ulysses_kernels::Workspace;

/// Initial values of a parameter that is not loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal distribution with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// The logarithm of a uniform distribution: the decays of Gated DeltaNet.
    LogUniform {
        /// Bounds of the distribution, positive.
        bounds: [f64; 2],
    },
    /// The biases of time steps, softplus(bias), of a log-uniform distribution: those of Mamba 2.
    TimeSteps {
        /// Bounds of the distribution, in any order.
        bounds: [f64; 2],
        /// Smaller time steps become this one, positive.
        floor: f64,
    },
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
}

/// One parameter of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Full name in Hugging Face's convention, for example
    /// `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Shape on this rank; that of a linear weight depends on its [`WeightLayout`](super::WeightLayout).
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
    /// The part of the whole parameter that this rank has, if the ranks of tp divide it.
    pub shard: Option<Box<TensorShard>>,
    /// Whether it is never trained, as a persistent buffer of PyTorch: frozen, whatever parameter groups say.
    pub is_constant: bool,
    /// How the ranks of tp divide the parameter, or its use, as the weight of a linear layer.
    pub style: Option<ParallelStyle>,
    /// Number of equal parts of the divided dimension that stay whole: [`in_parts`](Self::in_parts).
    pub(super) parts: Option<usize>,
}

impl ParameterSpec {
    /// Creates a parameter called `name`.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        let (name, shape) = (name.into(), shape.into());
        Self { name, shape, init, shard: None, is_constant: false, style: None, parts: None }
    }

    /// States that the dimension over which tp divides a weight has this many equal parts, and that none may be cut. Weights of
    /// one attention have as many as KV heads: those of the queries and of the output in groups that share one.
    #[must_use]
    pub fn in_parts(self, parts: usize) -> Self {
        Self { parts: Some(parts), ..self }
    }

    /// The whole parameter.
    #[must_use]
    pub fn whole(&self) -> Self {
        let shape =
            self.shard.as_ref().map_or_else(|| self.shape.clone(), |shard| shard.whole_shape(&self.shape));
        Self { shape, shard: None, ..self.clone() }
    }

    /// Keeps only the part of the parameter that `rank` has, if the ranks divide the dimension `dim` so.
    pub(crate) fn shard(&mut self, dim: usize, ranks: Vec<Vec<Range<usize>>>, rank: usize) {
        let shard = TensorShard::new(dim, self.shape[dim], ranks, rank);
        self.shape = shard.local_shape(&self.shape);
        self.shard = Some(Box::new(shard));
    }

    /// Keeps this rank's rows of a matrix with one row per token of the vocabulary, and returns which they are; `None` if there are
    /// fewer rows than ranks. Rows are outputs of the head and inputs of the embedding, which `style` says.
    pub(crate) fn divide_vocabulary(&mut self, style: ParallelStyle, tp: TensorRank) -> Option<Range<usize>> {
        let ranks: Vec<_> = tp.ranges(self.shape[0]).collect();
        let own = ranks.get(tp.rank).filter(|_| self.shape[0] >= tp.size)?.clone();
        self.shard(0, ranks.into_iter().map(|rows| vec![rows]).collect(), tp.rank);
        self.style = Some(style);
        Some(own)
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A parameter of a module: its place among those of the layer, from 1, so that an optional one is as small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter(NonZero<u32>);

impl Parameter {
    fn index(self) -> usize {
        self.0.get() as usize - 1
    }

    /// The parameter's gradient among those of its layer; `None` if the parameter is frozen.
    pub(super) fn gradient_in(self, grads: &[Option<Tensor>]) -> Option<&Tensor> {
        grads[self.index()].as_ref()
    }
}

/// The parameters of a layer, to which its modules add theirs.
#[derive(Debug)]
pub struct ParameterList {
    layer: String,
    specs: Vec<ParameterSpec>,
}

impl ParameterList {
    /// Creates an empty list of the layer called `layer`.
    pub fn new(layer: impl Into<String>) -> Self {
        Self { layer: layer.into(), specs: Vec::new() }
    }

    /// Adds a parameter called `layer.name`.
    pub fn add(&mut self, name: &str, shape: impl Into<Vec<usize>>, init: Init) -> Parameter {
        // A model keeps the list of every layer.
        self.specs.reserve_exact(1);
        self.specs.push(ParameterSpec::new(format!("{}.{name}", self.layer), shape, init));
        Parameter(NonZero::<u32>::MIN.saturating_add(self.specs.len() as u32 - 1))
    }

    /// As [`add`](Self::add), of a parameter that is never trained.
    pub fn add_constant(&mut self, name: &str, shape: impl Into<Vec<usize>>, init: Init) -> Parameter {
        let parameter = self.add(name, shape, init);
        self.specs[parameter.index()].is_constant = true;
        parameter
    }

    /// Keeps only the part of a parameter that `rank` has, if the ranks divide the dimension `dim` so.
    pub(super) fn shard(
        &mut self,
        parameter: Parameter,
        dim: usize,
        ranks: Vec<Vec<Range<usize>>>,
        rank: usize,
    ) {
        self.specs[parameter.index()].shard(dim, ranks, rank);
    }

    /// Records how the ranks of tp divide a weight, or its use.
    pub(super) fn set_style(&mut self, weight: Parameter, style: ParallelStyle) {
        self.specs[weight.index()].style = Some(style);
    }

    /// The layer's name.
    pub fn layer(&self) -> &str {
        &self.layer
    }

    /// The parameters, in the order in which the engine passes them.
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// The views of a forward pass.
    ///
    /// # Errors
    /// Another number of tensors than parameters.
    pub fn forward<'a>(
        &'a self,
        params: &'a [Tensor],
        ctx: &'a LayerContext,
    ) -> Result<ForwardPass<'a>, LayerError> {
        self.check(params.len())?;
        Ok(ForwardPass { layer: &self.layer, params, ctx })
    }

    /// The views of a backward pass.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward<'a>(
        &'a self,
        params: &'a [Tensor],
        grads: &'a [Option<Tensor>],
        ctx: &'a LayerContext,
    ) -> Result<BackwardPass<'a>, LayerError> {
        self.check(grads.len())?;
        Ok(BackwardPass { forward: self.forward(params, ctx)?, grads })
    }

    fn check(&self, got: usize) -> Result<(), LayerError> {
        match self.specs.len() {
            expected if got == expected => Ok(()),
            expected => Err(LayerError::parameter_count(&self.layer, expected, got)),
        }
    }
}

/// A forward pass of a layer: its parameters by handle, as `pass[self.weight]`, and its context.
#[derive(Clone, Copy)]
pub struct ForwardPass<'a> {
    /// The layer's name, for errors.
    pub layer: &'a str,
    params: &'a [Tensor],
    /// The micro batch, and the services for it.
    pub ctx: &'a LayerContext,
}

impl<'a> ForwardPass<'a> {
    /// The recycled storage of this rank.
    pub fn workspace(&self) -> &'a Workspace {
        self.ctx.workspace()
    }

    /// Recycles tensors.
    pub fn recycle(&self, tensors: impl IntoIterator<Item = Tensor>) {
        tensors.into_iter().for_each(|tensor| self.workspace().recycle(tensor));
    }

    /// The error of saved state that is not that of the layer.
    pub(crate) fn foreign_state(&self) -> LayerError {
        LayerError::foreign_state(self.layer)
    }
}

impl Index<Parameter> for ForwardPass<'_> {
    type Output = Tensor;

    fn index(&self, parameter: Parameter) -> &Tensor {
        &self.params[parameter.index()]
    }
}

/// A backward pass of a layer: as its forward pass, with the gradients of the parameters.
#[derive(Clone, Copy)]
pub struct BackwardPass<'a> {
    /// Parameters and context.
    pub forward: ForwardPass<'a>,
    grads: &'a [Option<Tensor>],
}

impl<'a> BackwardPass<'a> {
    /// The gradient of a parameter, to be added to; `None` if the parameter is frozen.
    pub fn gradient(&self, parameter: Parameter) -> Option<&'a Tensor> {
        parameter.gradient_in(self.grads)
    }

    /// The gradients of all parameters of the layer.
    pub(super) fn gradients(&self) -> &'a [Option<Tensor>] {
        self.grads
    }

    /// The micro batch, and the services for it.
    pub fn ctx(&self) -> &'a LayerContext {
        self.forward.ctx
    }
}
