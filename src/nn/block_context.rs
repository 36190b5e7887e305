//! [`BlockContext`]: what a block written with candle ops gets in addition to its parameters and input.

use super::sum_node::autograd_sum;
use super::{LayerContext, LayerError, NumHeads, ParallelStyle, ParameterSpec, autograd_attention};
use candle_core::{D, Error, Result, Tensor};
use std::cell::RefCell;
use std::sync::Arc;
use ulysses_kernels::rope::{self, Rope};

/// The context of a user-defined block, in addition to its parameters and input.
pub struct BlockContext<'a> {
    layer: &'a LayerContext,
    /// The name of the block's layer.
    name: &'a str,
    specs: &'a [ParameterSpec],
    params: &'a [Tensor],
    /// The weights that [`linear`](Self::linear) has used.
    used: RefCell<Vec<usize>>,
}

impl<'a> BlockContext<'a> {
    /// The context of a pass of the layer called `name`, with its parameters.
    pub(super) fn new(
        layer: &'a LayerContext,
        name: &'a str,
        specs: &'a [ParameterSpec],
        params: &'a [Tensor],
    ) -> Self {
        Self { layer, name, specs, params, used: RefCell::default() }
    }

    /// Checks that the block has computed with divided weights by [`linear`](Self::linear).
    pub(super) fn check_divided_weights(&self) -> std::result::Result<(), LayerError> {
        let used = self.used.borrow();
        let is_missed = |index: &usize| is_divided(&self.specs[*index]) && !used.contains(index);
        let missed = (0..self.specs.len()).find(is_missed).map(|index| self.specs[index].name.clone());
        missed.map_or(Ok(()), |parameter| {
            Err(LayerError::PlanNotUsed { layer: self.name.to_owned(), parameter })
        })
    }

    /// `x·Wᵀ`, or `x·Wᵀ + b`, with the parameters `name.weight` and, if there is one, `name.bias`. Their names are full ones, or
    /// begin with the layer's. The layer's plan may divide them over tp ([`AutogradLayer::parallelize`](super::AutogradLayer::parallelize)):
    /// collective if it is `Rowwise`.
    ///
    /// # Shapes
    /// `x`: `[…, in]`, result: `[…, out]`. If tp divides the outputs or the inputs, this rank's.
    ///
    /// # Errors
    /// A name that no weight has, an input of another width, or failed communication.
    pub fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let index = find_weight(self.name, self.specs, name).map_err(Error::wrap)?;
        self.used.borrow_mut().push(index);
        let (spec, weight) = (&self.specs[index], &self.params[index]);
        let is_rowwise = is_divided(spec) && spec.style == Some(ParallelStyle::Rowwise);
        let ((out, expected), got) = (weight.dims2()?, x.dim(D::Minus1)?);
        if got != expected {
            let parameter = spec.name.clone();
            return Err(Error::wrap(LayerError::LinearInput { parameter, expected, got, is_rowwise }));
        }
        let mut dims = x.dims().to_vec();
        dims[x.rank() - 1] = out;
        let mut y = x.flatten_to(x.rank().saturating_sub(2))?.matmul(&weight.t()?)?.reshape(dims)?;
        if is_rowwise {
            let exchange = self.layer.token_exchange(self.name).map_err(Error::wrap)?;
            y = autograd_sum(exchange, &y)?;
        }
        match find(self.name, self.specs, &format!("{name}.bias")) {
            Some(bias) => y.broadcast_add(&self.params[bias]),
            None => Ok(y),
        }
    }

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
        let layout = self.layer.attention_layout(NumHeads { q: q.dims4()?.2, kv: k.dims4()?.2 });
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

/// Whether this rank has a part of a weight.
fn is_divided(spec: &ParameterSpec) -> bool {
    spec.style.is_some() && spec.shard.is_some()
}

/// The parameter with this name, in full or within the layer.
fn find(layer: &str, specs: &[ParameterSpec], name: &str) -> Option<usize> {
    let is_called = |full: &str| {
        let within = full.strip_prefix(layer).and_then(|rest| rest.strip_prefix('.'));
        full == name || within == Some(name)
    };
    specs.iter().position(|spec| is_called(&spec.name))
}

/// The weight of the linear layer called `name`.
pub(super) fn find_weight(
    layer: &str,
    specs: &[ParameterSpec],
    name: &str,
) -> std::result::Result<usize, LayerError> {
    let is_matrix = |spec: &ParameterSpec| spec.shape.len() == 2;
    let found = find(layer, specs, &format!("{name}.weight")).filter(|index| is_matrix(&specs[*index]));
    found.ok_or_else(|| {
        let known = specs.iter().filter(|spec| is_matrix(spec)).map(|spec| spec.name.clone()).collect();
        LayerError::UnknownLinear { layer: layer.to_owned(), name: name.to_owned(), known }
    })
}
