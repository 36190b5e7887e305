//! Self-attention, in head chunks.
//!
//! With `head_chunks`, one chunk of heads is attended at a time. Queries, keys, values and output of the whole
//! sequence then exist for one chunk only, and so do the buffers of the exchange (the idea of UPipe); for up to
//! three chunks if the exchange [overlaps](chunk_pipeline). Chunks consist of whole KV heads; each uses its own
//! rows of the weights.

mod backward;
mod chunk_pipeline;
mod forward;
mod head_projection;
mod latent;
mod output_gate;
mod projections;
mod saved;

pub use latent::LatentConfig;
pub use projections::{AttentionProjections, QkvNames};
pub use saved::{AttentionSaved, Saves};
pub(super) use saved::{ChunkState, ReturningChunk, delta, release_output};

use super::{
    AttentionExtent, AttentionMask, BackwardPass, ForwardPass, GroupNames, HeadDivision, HeadRanges, Heads,
    LayerError, Linear, ModuleWeights, Norm, NormConfig, NumHeads, Parameter, ParameterList, TensorRank,
    heads::{one_each, scaled},
};
use candle_core::Tensor;
use head_projection::{HeadNorm, HeadProjection};
use std::ops::Range;
use ulysses_kernels::attention::{AttentionLayout, Logits, Sinks};
use ulysses_kernels::rope::{self, Direction, Rope};

/// The heads of a layer's attention, the tokens that it sees, and its position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head; even.
    pub head_dim: usize,
    /// Number of tokens that a token attends to, including itself; `None` for all of its document.
    pub window: Option<usize>,
    /// The size of the chunks into which each document is cut, if a token attends to its own chunk only.
    pub chunk: Option<u32>,
    /// The rotary embedding; `None` without position embedding (NoPE).
    pub rope: Option<Rope>,
    /// The factor on the logits; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Norms of queries and keys before the rotary embedding.
    pub qk_norm: Option<QkNorm>,
    /// The soft cap of the logits, `cap · tanh(logit / cap)`; `None` without one.
    pub softcap: Option<f64>,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection of the output has one.
    pub o_bias: bool,
    /// Whether values are projected with the weight of the keys, if each projection has one.
    pub values_from_keys: bool,
    /// Whether the values of each head are normalized, without a weight.
    pub value_norm: bool,
    /// Whether every query head has a sink: a learned logit that takes part in its softmax and contributes no value (gpt-oss).
    pub sinks: bool,
    /// Whether the output is multiplied by the sigmoid of a gate, which the projection of the queries has as well.
    pub output_gate: bool,
    /// The sizes of a [`LatentAttention`](super::LatentAttention), if it is one. It has as many KV heads as query heads, and of the options above
    /// `rope` and `scale` only.
    pub latent: Option<LatentConfig>,
}

/// The elements over which a norm of queries or keys is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// The elements of each head; all heads have the same weights.
    Head,
    /// The elements of all heads.
    AllHeads,
    /// The elements of each head, without weights. It commutes with a rotation.
    HeadWithoutWeight,
}

impl AttentionConfig {
    /// Heads that see the whole document, without anything else.
    pub const fn with_heads(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self {
            num_heads,
            num_kv_heads,
            head_dim,
            window: None,
            chunk: None,
            rope: None,
            scale: None,
            qk_norm: None,
            softcap: None,
            qkv_bias: false,
            o_bias: false,
            output_gate: false,
            values_from_keys: false,
            value_norm: false,
            sinks: false,
            latent: None,
        }
    }

    /// The KV head of each query head.
    pub fn q_to_kv(&self) -> Vec<usize> {
        self.heads().q_to_kv()
    }

    /// The numbers of heads.
    pub fn heads(&self) -> NumHeads {
        NumHeads { q: self.num_heads, kv: self.num_kv_heads }
    }

    /// The attention of one rank, with the heads of every rank.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks; `layer` is the name for the error.
    pub fn divided(self, layer: &str, tp: TensorRank) -> Result<(Self, HeadDivision), LayerError> {
        let division = self.heads().divide(layer, tp)?;
        let NumHeads { q: num_heads, kv: num_kv_heads } = division.num_heads(tp.rank);
        Ok((Self { num_heads, num_kv_heads, ..self }, division))
    }

    /// The largest number of head chunks: a norm over all heads needs them at once, and latent attention computes them at once.
    pub fn max_head_chunks(&self) -> usize {
        let at_once = self.qk_norm == Some(QkNorm::AllHeads) || self.latent.is_some();
        if at_once { 1 } else { self.num_kv_heads }
    }

    /// The largest number of head chunks that all these layers allow.
    pub fn common_head_chunks<'a>(layers: impl IntoIterator<Item = &'a Self>) -> usize {
        layers.into_iter().map(Self::max_head_chunks).min().unwrap_or(0)
    }

    /// Checks that all these layers can be split into so many head chunks.
    ///
    /// # Errors
    /// None, or more than [`common_head_chunks`](Self::common_head_chunks); `layer` is the name for the error.
    pub fn check_head_chunks<'a>(
        layers: impl IntoIterator<Item = &'a Self>,
        layer: &str,
        chunks: usize,
    ) -> Result<(), LayerError> {
        let max_chunks = Self::common_head_chunks(layers);
        match (1..=max_chunks).contains(&chunks) {
            true => Ok(()),
            false => Err(LayerError::HeadChunks { layer: layer.to_owned(), chunks, max_chunks }),
        }
    }

    /// Elements per value head.
    pub fn value_head_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.value_head_dim)
    }

    /// The size of the attention, for its FLOPs.
    pub(in crate::nn) fn extent(&self) -> AttentionExtent {
        let of_heads = self.num_heads * (self.head_dim + self.value_head_dim());
        AttentionExtent { width: of_heads / 2, mask: self.mask() }
    }

    /// The attention mask.
    pub(in crate::nn) fn mask(&self) -> AttentionMask {
        AttentionMask { window: self.window, chunk: self.chunk }
    }

    /// The form of the logits.
    pub(in crate::nn) fn logits(&self) -> Logits {
        let [scale, softcap] = [self.scale, self.softcap].map(|number| number.map(|number| number as f32));
        Logits { scale, softcap }
    }

    /// Outputs of the projection of the queries per head: queries, then the gate if there is one.
    pub(in crate::nn) fn q_outputs_per_head(&self) -> usize {
        self.head_dim * if self.output_gate { 2 } else { 1 }
    }

    /// Splits the heads into as many chunks as the tiling says.
    ///
    /// # Errors
    /// None, or more than [`max_head_chunks`](Self::max_head_chunks).
    pub(in crate::nn) fn head_chunks(&self, pass: &ForwardPass<'_>) -> Result<Vec<HeadRanges>, LayerError> {
        let chunks = pass.ctx.tiling().head_chunks;
        Self::check_head_chunks([self], pass.layer, chunks)?;
        Ok(self.heads().chunks(chunks))
    }
}

/// `o(attend(rope(norm_q(q(x))), rope(norm_k(k(x))), v(x)))`, causal within documents; with a gate, `o(σ(gate(x)) · attend(…))`.
#[derive(Debug)]
pub struct SelfAttention {
    shape: AttentionConfig,
    q: HeadProjection,
    k: HeadProjection,
    v: HeadProjection,
    o: Linear,
    sinks: Option<Parameter>,
}

impl SelfAttention {
    /// Adds the projections of queries, keys and values, then that of the output, then the sinks if there are any.
    ///
    /// # Panics
    /// If values come from keys, but the projections are fused or have biases.
    pub fn new(
        parameters: &mut ParameterList,
        projections: AttentionProjections,
        hidden_size: usize,
        shape: AttentionConfig,
        weights: ModuleWeights,
    ) -> Self {
        let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = shape;
        let per_head = [shape.q_outputs_per_head(), head_dim, head_dim];
        let outs = [num_heads * per_head[0], num_kv_heads * head_dim, num_kv_heads * head_dim];
        let qkv = match (projections.qkv, shape.values_from_keys) {
            (QkvNames::Each([q, k, _]), true) => {
                let (names, outs) = (GroupNames::Each([q, k]), [outs[0], outs[1]]);
                let [q, k] = Linear::group(parameters, names, outs, hidden_size, weights.input);
                [q, k.clone(), k]
            }
            (_, true) => panic!("values from keys, but fused projections"),
            _ => Linear::group(parameters, projections.qkv(head_dim), outs, hidden_size, weights.input),
        };
        assert!(!(shape.values_from_keys && shape.qkv_bias), "values from keys, but biases");
        let o = Linear::new(parameters, projections.o, [hidden_size, num_heads * head_dim], weights.output);
        let sinks = shape.sinks.then(|| parameters.add(projections.sinks, [num_heads], weights.input.init));
        let mut per_head = per_head.into_iter();
        let [q, k, v] = qkv.map(|linear| {
            let outputs_per_head = per_head.next().unwrap_or(head_dim);
            HeadProjection { linear, norm: None, head_dim, outputs_per_head }
        });
        Self { shape, q, k, v, o, sinks }
    }

    /// Adds the biases of the projections, if there are any.
    pub fn add_biases(&mut self, parameters: &mut ParameterList, projections: AttentionProjections) {
        if self.shape.qkv_bias {
            let layers = [&mut self.q.linear, &mut self.k.linear, &mut self.v.linear];
            Linear::add_group_bias(parameters, projections.qkv(self.shape.head_dim), layers);
        }
        if self.shape.o_bias {
            self.o.add_bias(parameters, projections.o);
        }
    }

    /// Adds the norms of queries, keys and values, if there are any.
    pub fn add_norms(
        &mut self,
        parameters: &mut ParameterList,
        projections: AttentionProjections,
        norm: NormConfig,
    ) {
        let AttentionConfig { num_heads, num_kv_heads, head_dim, qk_norm, .. } = self.shape;
        if self.shape.value_norm {
            let norm = Norm::without_weight(norm.eps);
            self.v.norm = Some(HeadNorm { norm, over: QkNorm::HeadWithoutWeight });
        }
        let Some(over) = qk_norm else { return };
        let [q_norm, k_norm] = projections.qk_norms;
        let parts = [(q_norm, num_heads, &mut self.q), (k_norm, num_kv_heads, &mut self.k)];
        for (name, heads, projection) in parts {
            let norm = match over {
                QkNorm::Head => Norm::new(parameters, name, head_dim, norm),
                QkNorm::AllHeads => Norm::new(parameters, name, heads * head_dim, norm),
                QkNorm::HeadWithoutWeight => Norm::without_weight(norm.eps),
            };
            projection.norm = Some(HeadNorm { norm, over });
        }
    }

    /// Keeps the heads of one rank of tp; the output is then a partial sum.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks.
    pub fn divide(&mut self, parameters: &mut ParameterList, tp: TensorRank) -> Result<(), LayerError> {
        let (shape, Heads { q, kv }) = self.shape.divided(parameters.layer(), tp)?;
        if let Some(sinks) = self.sinks {
            parameters.shard(sinks, 0, one_each(&q), tp.rank);
        }
        let q_outputs = scaled(&q, shape.q_outputs_per_head());
        let [q, kv] = [q, kv].map(|heads| scaled(&heads, shape.head_dim));
        let Self { q: of_q, k: of_k, v: of_v, .. } = self;
        let [of_q, of_k, of_v] = [of_q, of_k, of_v].map(|projection| &mut projection.linear);
        if shape.values_from_keys {
            Linear::divide_outputs(parameters, [of_q, &mut *of_k], [&q_outputs, &kv], tp.rank);
            *of_v = of_k.clone();
        } else {
            Linear::divide_outputs(parameters, [of_q, of_k, of_v], [&q_outputs, &kv, &kv], tp.rank);
        }
        self.o.divide_inputs(parameters, &q, tp.rank);
        self.q.divide_norm(parameters, &q, tp.rank)?;
        self.k.divide_norm(parameters, &kv, tp.rank)?;
        self.shape = shape;
        Ok(())
    }

    /// The size of the attention, for its FLOPs.
    pub fn extent(&self) -> AttentionExtent {
        self.shape.extent()
    }

    /// The attention layout of a chunk, in a backward pass with the gradients of its sinks.
    fn layout(
        &self,
        chunk: &HeadRanges,
        pass: &ForwardPass<'_>,
        backward: Option<&BackwardPass<'_>>,
    ) -> Result<AttentionLayout, LayerError> {
        let (mask, logits) = (self.shape.mask(), self.shape.logits());
        let layout = pass.ctx.attention_layout_with(chunk.num_heads(), mask, logits)?;
        let Some(sinks) = self.sinks else { return Ok(layout) };
        let gradient = backward.and_then(|pass| pass.gradient(sinks)).cloned();
        let sinks = Sinks { logits: pass[sinks].clone(), gradient }.heads(&chunk.q)?;
        Ok(layout.with_sinks(Some(sinks)))
    }

    /// Rotates queries and keys, if there is a rotary embedding.
    fn rotate(
        &self,
        [queries, keys]: [&Tensor; 2],
        direction: Direction,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        let Some(rope) = self.shape.rope else { return Ok(()) };
        let changes = |(_, rope): &(_, Rope)| rope.rotates() || rope.query_growth != 0.0;
        for (heads, rope) in [(queries, rope), (keys, rope.of_keys())].into_iter().filter(changes) {
            rope::apply(heads, &*pass.ctx.rope(self.shape.head_dim, rope)?, direction)?;
        }
        Ok(())
    }

    /// A chunk's inputs of the output projection.
    fn o_inputs(&self, chunk: &HeadRanges) -> Range<usize> {
        chunk.q.start * self.shape.head_dim..chunk.q.end * self.shape.head_dim
    }
}

/// Frees the chunks' working memory, which the MLP cannot use. Head chunks mean that memory is short.
fn trim_after_chunks(pass: &ForwardPass<'_>) {
    if pass.ctx.tiling().head_chunks > 1 {
        pass.workspace().trim();
    }
}
