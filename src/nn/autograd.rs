//! [`AutogradLayer`]: any block written with candle ops, as a layer.

use super::{Layer, LayerContext, LayerError, ParameterSpec, Saved, TensorRank, autograd_attention};
use crate::mesh::shard_range;
use candle_core::{DType, Result, Tensor, Var};
use std::sync::Arc;
use ulysses_kernels::elementwise;
use ulysses_kernels::rope::{self, Rope};

/// The context of a user-defined block, in addition to its parameters and input.
pub struct BlockContext<'a> {
    layer: &'a LayerContext,
}

impl BlockContext<'_> {
    /// Number of sequences in the micro batch.
    pub fn batch(&self) -> usize {
        self.layer.batch()
    }

    /// Number of this rank's tokens per sequence.
    pub fn seq_len_local(&self) -> usize {
        self.layer.seq_len_local()
    }

    /// Positions of this rank's tokens within their documents, `[batch, seq_local]`.
    pub fn position_ids(&self) -> &[u32] {
        self.layer.position_ids()
    }

    /// Causal attention over whole sequences, within documents, as one autograd node. With sequence
    /// parallelism it runs the all-to-all exchanges.
    ///
    /// # Shapes
    /// `q`, result: `[batch, seq_local, num_heads, head_dim]`; `k`, `v`:
    /// `[batch, seq_local, num_kv_heads, head_dim]`.
    ///
    /// # Errors
    /// Shapes that do not fit, or failed communication.
    pub fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let layout = self.layer.attention_layout(q.dims4()?.2, k.dims4()?.2);
        autograd_attention(self.layer.attention().clone(), &layout, q, k, v)
    }

    /// `cos` and `sin` of the rotary embedding (θ, or a whole [`Rope`]) for this rank's tokens, each
    /// `[batch, seq_local, 1, pairs]`, ready to broadcast over heads.
    ///
    /// # Errors
    /// An odd `head_dim`, or a scaling without frequencies.
    pub fn rope_tables(&self, head_dim: usize, rope: impl Into<Rope>) -> Result<(Tensor, Tensor)> {
        let table: Arc<rope::Table> = self.layer.rope(head_dim, rope).map_err(candle_core::Error::wrap)?;
        let dims = (self.batch(), self.seq_len_local(), 1, table.pairs());
        let options = self.layer.workspace().options();
        let [cos, sin] = table.on(&options.device)?;
        let shaped = |half: Tensor| half.reshape(dims)?.to_dtype(options.dtype);
        Ok((shaped(cos)?, shaped(sin)?))
    }
}

/// Runs a block written with candle ops as a [`Layer`], with candle's autograd for this one layer. The graph
/// spans only the block and is dropped after the layer's backward.
///
/// The block must treat tokens independently except through [`BlockContext::attention`]; this allows sequence
/// parallelism. With tensor parallelism, every tp rank has the whole parameters and computes all tokens of its sp rank;
/// a block that is [`token_wise`](Self::token_wise) computes only the rank's own. Gradients count each token once.
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

    /// States that the block treats every token by itself and does not attend. The ranks of tp then share its tokens.
    #[must_use]
    pub fn token_wise(self) -> Self {
        Self { is_token_wise: true, ..self }
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
        let own = self.is_token_wise.then(|| ctx.of_own_tokens());
        let gathered = match self.tp {
            Some(_) => Some(ctx.token_exchange(&self.name)?.gather(x, ctx.seq_len_local())?),
            None => None,
        };
        let (x, layer) = (gathered.as_ref().unwrap_or(x), own.as_ref().unwrap_or(ctx));
        let run = |params: &[Tensor], x: &Tensor| (self.block)(params, x, &BlockContext { layer });
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
            Some(_) => ctx.token_exchange(&self.name)?.sum_scatter(&dx),
            None => Ok(dx),
        }
    }

    fn tensor_parallel(self: Box<Self>, tp: TensorRank) -> std::result::Result<Box<dyn Layer>, LayerError> {
        let tp = (!self.is_token_wise).then_some(tp);
        Ok(Box::new(Self { tp, ..*self }))
    }
}
