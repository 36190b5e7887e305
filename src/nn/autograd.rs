//! [`AutogradLayer`]: any block written with candle ops, as a layer.

use super::block_context::find_weight;
use super::{BlockContext, Layer, LayerContext, LayerError, ParallelStyle, ParameterSpec, Saved, TensorRank};
use crate::mesh::shard_range;
use candle_core::{DType, Error, Result, Tensor, Var};
use std::ops::Range;
use ulysses_kernels::elementwise;

/// Runs a block written with candle ops as a [`Layer`], with candle's autograd for this one layer. The graph
/// spans only the block and is dropped after the layer's backward.
///
/// The block must treat tokens independently except through [`BlockContext::attention`]; this allows sequence
/// parallelism. With tensor parallelism, every tp rank computes all tokens of its sp rank, with its part of the weights that a
/// plan divides ([`parallelize`](Self::parallelize)) and the others whole. Without a plan, a block that is
/// [`token_wise`](Self::token_wise) computes only the rank's own tokens. Gradients count each token once.
///
/// Every op must be differentiable in candle. The fused softmax, norms and rope of `candle_nn`
/// are not, and silently give no gradient; a parameter without a gradient is an error here.
///
/// From forward to backward, the layer stores a copy of its whole parameters, even at ZeRO stage 3, and
/// everything in candle's graph. [`Saved::bytes`] counts parameters, input and output. With activation
/// checkpointing it stores only its input. candle also computes the gradients of frozen parameters, until the
/// layer's backward ends.
pub struct AutogradLayer<F> {
    name: String,
    parameters: Vec<ParameterSpec>,
    output_width: Option<usize>,
    is_token_wise: bool,
    /// This rank of those that get all tokens, if there are several.
    tp: Option<TensorRank>,
    block: F,
}

/// A graph of candle's autograd, from copies of parameters and input to an output.
pub(crate) struct AutogradGraph {
    x: Var,
    params: Vec<Var>,
    y: Tensor,
}

impl AutogradGraph {
    /// Runs `work` on variables, which are copies: the engine may release the gathered parameters before the backward
    /// pass, and later updates must not change the graph's values.
    pub(crate) fn record(
        params: &[Tensor],
        x: &Tensor,
        work: impl FnOnce(&[Tensor], &Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let params = params.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
        let x = Var::from_tensor(x)?;
        let views: Vec<Tensor> = params.iter().map(|var| var.as_tensor().clone()).collect();
        let y = work(&views, x.as_tensor())?;
        Ok(Self { x, params, y })
    }

    pub(crate) fn output(&self) -> &Tensor {
        &self.y
    }

    /// Bytes of parameters, input and output.
    pub(crate) fn bytes(&self) -> usize {
        let saved = self.params.iter().chain([&self.x]).map(|var| var.as_tensor()).chain([&self.y]);
        saved.map(ulysses_kernels::tensor::bytes).sum()
    }

    pub(crate) fn input(&self) -> &Tensor {
        &self.x
    }

    /// Backward of `scalar`, which was computed from the output: adds to `grads` and returns the gradient of the input.
    /// Errors call the graph `owner`.
    pub(crate) fn backward(
        self,
        owner: &str,
        scalar: Tensor,
        specs: &[ParameterSpec],
        grads: &[Option<Tensor>],
    ) -> std::result::Result<Tensor, LayerError> {
        let store = scalar.backward()?;
        let gradient = |var: &Var, name: &str| {
            let missing = || LayerError::NoGradient { owner: owner.to_owned(), parameter: name.to_owned() };
            Ok::<_, LayerError>(store.get(var).ok_or_else(missing)?.detach().contiguous()?)
        };
        for ((var, spec), grad) in self.params.iter().zip(specs).zip(grads) {
            if let Some(grad) = grad {
                elementwise::accumulate(grad, &gradient(var, &spec.name)?.to_dtype(DType::F32)?)?;
            }
        }
        gradient(&self.x, "its input")
    }
}

impl<F> AutogradLayer<F>
where
    F: Fn(&[Tensor], &Tensor, &BlockContext<'_>) -> Result<Tensor> + Send + Sync,
{
    /// Creates a layer with `parameters` that computes `block(parameters, x, context)`.
    pub fn new(name: impl Into<String>, parameters: Vec<ParameterSpec>, block: F) -> Self {
        let (name, output_width, is_token_wise, tp) = (name.into(), None, false, None);
        Self { name, parameters, output_width, is_token_wise, tp, block }
    }

    /// Sets the width of the hidden states that the block returns; by default that of its input.
    #[must_use]
    pub fn with_output_width(self, width: usize) -> Self {
        Self { output_width: Some(width), ..self }
    }

    /// States that the block treats every token by itself and does not attend. The ranks of tp then share its tokens, unless they
    /// divide its weights.
    #[must_use]
    pub fn token_wise(self) -> Self {
        Self { is_token_wise: true, ..self }
    }

    /// Divides linear layers over tp, by their names as in [`BlockContext::linear`]: torch's `parallelize_module`. The block must
    /// compute them by that function; other parameters stay whole on every rank.
    ///
    /// `Colwise` outputs are this rank's part of the features, which only element-wise operations,
    /// [`BlockContext::attention`] and a `Rowwise` layer may follow. Widths may be uneven; weights of attention say their heads by
    /// [`ParameterSpec::in_parts`].
    ///
    /// ```
    /// use ulysses::candle::Tensor;
    /// use ulysses::nn::ParallelStyle::{Colwise, Rowwise};
    /// use ulysses::nn::{AutogradLayer, BlockContext, Init, ParameterSpec};
    ///
    /// let weight = |name: &str, shape: [usize; 2]| ParameterSpec::new(name, shape, Init::Normal { std: 0.02 });
    /// let parameters = vec![weight("mlp.up.weight", [41, 10]), weight("mlp.down.weight", [10, 41])];
    /// let block = |_: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>| {
    ///     ctx.linear("down", &ctx.linear("up", x)?.gelu()?)
    /// };
    /// AutogradLayer::new("mlp", parameters, block).parallelize([("up", Colwise), ("down", Rowwise)])?;
    /// # Ok::<(), ulysses::nn::LayerError>(())
    /// ```
    ///
    /// # Errors
    /// A name that no weight has.
    pub fn parallelize<N: AsRef<str>>(
        mut self,
        plan: impl IntoIterator<Item = (N, ParallelStyle)>,
    ) -> std::result::Result<Self, LayerError> {
        for (name, style) in plan {
            let weight = find_weight(&self.name, &self.parameters, name.as_ref())?;
            self.parameters[weight].style = Some(style);
        }
        Ok(self)
    }

    /// Keeps this rank's part of the planned weights and their biases. Returns whether there are any.
    fn divide(&mut self, tp: TensorRank) -> std::result::Result<bool, LayerError> {
        let styles = self.parameters.iter().enumerate();
        let planned: Vec<_> = styles.filter_map(|(index, spec)| Some((index, spec.style?))).collect();
        for &(index, style) in &planned {
            let ranks = self.ranges(&self.parameters[index], style.dim(), tp)?;
            let bias =
                self.parameters[index].name.strip_suffix("weight").map(|linear| format!("{linear}bias"));
            let bias = self.parameters.iter().position(|spec| Some(&spec.name) == bias.as_ref());
            if let Some(bias) = bias.filter(|_| style == ParallelStyle::Colwise) {
                self.parameters[bias].shard(0, ranks.clone(), tp.rank);
            }
            self.parameters[index].shard(style.dim(), ranks, tp.rank);
        }
        Ok(!planned.is_empty())
    }

    /// The indices of a weight's dimension that each rank has: whole parts.
    fn ranges(
        &self,
        weight: &ParameterSpec,
        dim: usize,
        tp: TensorRank,
    ) -> std::result::Result<Vec<Vec<Range<usize>>>, LayerError> {
        let len = weight.shape[dim];
        let (layer, parameter, parts) = (self.name.clone(), weight.name.clone(), weight.parts.unwrap_or(len));
        // Heads of queries and keys that are divided in different numbers would not fit each other.
        let is_planned = |spec: &&ParameterSpec| spec.style.is_some() && spec.parts.is_some();
        let first = self.parameters.iter().find(is_planned).and_then(|spec| spec.parts);
        let expected = match first.filter(|first| weight.parts.is_some_and(|parts| parts != *first)) {
            Some(first) => {
                Some(format!("another weight of the layer is in {first}: expected the same number"))
            }
            None if parts == 0 || !len.is_multiple_of(parts) => {
                Some(format!("expected a divisor of {len}, the length of its dimension {dim}"))
            }
            None => None,
        };
        if let Some(expected) = expected {
            return Err(LayerError::WeightParts { layer, parameter, parts, expected });
        }
        if parts < tp.size {
            return Err(LayerError::PlannedWeight { layer, parameter, parts, size: tp.size });
        }
        let width = len / parts;
        let indices = |parts: Range<usize>| parts.start * width..parts.end * width;
        Ok(tp.ranges(parts).map(|own| vec![indices(own)]).collect())
    }

    /// This rank's tokens of the block's result.
    fn of_own_tokens(&self, y: &Tensor) -> Result<Tensor> {
        let Some(tp) = self.tp else { return Ok(y.clone()) };
        let own = shard_range(y.dim(1)?, tp.size, tp.rank);
        y.narrow(1, own.start, own.len())
    }
}

impl<F> Layer for AutogradLayer<F>
where
    F: Fn(&[Tensor], &Tensor, &BlockContext<'_>) -> Result<Tensor> + Send + Sync + 'static,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> std::result::Result<(Tensor, Saved), LayerError> {
        let own = (self.is_token_wise && self.tp.is_none()).then(|| ctx.of_own_tokens());
        let gathered = match self.tp {
            Some(_) => Some(ctx.token_exchange(&self.name)?.all_gather(x, ctx.seq_len_local())?),
            None => None,
        };
        let (x, layer) = (gathered.as_ref().unwrap_or(x), own.as_ref().unwrap_or(ctx));
        let run = |params: &[Tensor], x: &Tensor| {
            let context = BlockContext::new(layer, &self.name, &self.parameters, params);
            let y = (self.block)(params, x, &context)?;
            context.check_divided_weights().map_err(Error::wrap)?;
            Ok(y)
        };
        let graph = AutogradGraph::record(params, x, run)?;
        let y = graph.output();
        let (batch, seq_len, hidden) = x.dims3()?;
        let expected = [batch, seq_len, self.output_width.unwrap_or(hidden)];
        if y.dims() != expected || y.dtype() != x.dtype() {
            return Err(LayerError::BlockOutput {
                layer: self.name.clone(),
                expected: expected.to_vec(),
                got: y.dims().to_vec(),
            });
        }
        // The engine recycles the result; the graph keeps its own output.
        let result = self.of_own_tokens(&y.detach())?.contiguous()?.copy()?;
        let bytes = graph.bytes();
        Ok((result, Saved::new(graph, bytes)))
    }

    fn backward(
        &self,
        _params: &[Tensor],
        saved: Saved,
        dy: Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> std::result::Result<Tensor, LayerError> {
        let graph: AutogradGraph = saved.downcast(&self.name)?;
        // The gradient of Σ y·dy with respect to y is exactly dy.
        let scalar = (self.of_own_tokens(graph.output())? * dy)?.sum_all()?;
        let dx = graph.backward(&format!("layer {}", self.name), scalar, &self.parameters, grads)?;
        match self.tp {
            // The other ranks have the gradients by way of their tokens.
            Some(_) => ctx.token_exchange(&self.name)?.reduce_scatter(&dx),
            None => Ok(dx),
        }
    }

    fn apply_plan(&mut self, style_of: &dyn Fn(&str) -> Option<ParallelStyle>) {
        for spec in self.parameters.iter_mut().filter(|spec| spec.shape.len() == 2 && spec.style.is_none()) {
            spec.style = style_of(&spec.name);
        }
    }

    fn tensor_parallel(
        mut self: Box<Self>,
        tp: TensorRank,
    ) -> std::result::Result<Box<dyn Layer>, LayerError> {
        let is_divided = self.divide(tp)?;
        self.tp = (is_divided || !self.is_token_wise).then_some(tp);
        Ok(self)
    }
}
