//! Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): queries, keys and values of all heads come from small latents.
//!
//! ```text
//! q = q_b(norm(q_a(x)))                          or q_proj(x); of each head [without position | rotary]
//! latent, k_rope = kv_a(x)                       one rotary key for all heads
//! k_nope, v = kv_b(norm(latent))                 of each head
//! y = o(attend([q_nope | rope(q_rope)], [k_nope | rope(k_rope)], v))
//! ```
//!
//! Between projections and output it is the attention of the context, with as many KV heads as query heads; values may have fewer
//! elements than keys, also in the exchange. All heads are attended at once.
//!
//! Ranks of tp have some heads. Each computes the latents of all tokens, from weights that stay whole, and so partial sums of the
//! gradients of latents, rotary key and these weights.

mod backward;
mod forward;
mod heads;
mod saved;

pub use saved::LatentAttentionSaved;

use super::heads::scaled;
use super::projection::Projection;
use super::{
    AttentionConfig, AttentionExtent, ForwardPass, GroupNames, Heads, LatentConfig, LayerError, Linear,
    ModuleWeights, Norm, ParameterList, TensorRank,
};
use ulysses_kernels::attention::AttentionLayout;

/// Latent attention, without the branch that it is in.
#[derive(Debug)]
pub struct LatentAttention {
    shape: AttentionConfig,
    latent: LatentConfig,
    q: Projection,
    /// Keys and values of all heads: of each the part of the key without a position, then the value.
    kv: Projection,
    /// The rotary key of all heads.
    k_rope: Projection,
    o: Linear,
}

/// Epsilon of the norms of latents, whatever that of the model's other norms is: as in DeepSeek's code and transformers.
const EPS: f64 = 1e-6;

impl LatentAttention {
    /// Adds the parameters under `self_attn`, by the names of DeepSeek.
    pub fn new(
        parameters: &mut ParameterList,
        hidden_size: usize,
        shape: AttentionConfig,
        latent: LatentConfig,
        weights: ModuleWeights,
    ) -> Self {
        let AttentionConfig { num_heads, head_dim, .. } = shape;
        let LatentConfig { q_rank, kv_rank, rope_head_dim, value_head_dim, .. } = latent;
        let (weight, q_size) = (weights.input, num_heads * head_dim);
        let q = match q_rank {
            None => {
                let q = Linear::new(parameters, "self_attn.q_proj", [q_size, hidden_size], weight);
                Projection::Direct(q)
            }
            Some(rank) => {
                let down = Linear::new(parameters, "self_attn.q_a_proj", [rank, hidden_size], weight);
                let norm = Norm::new(parameters, "self_attn.q_a_layernorm", rank, EPS.into());
                let name = "self_attn.q_b_proj";
                Projection::through_latent(parameters, name, down, Some(norm), q_size, weight)
            }
        };
        let name = GroupNames::One("self_attn.kv_a_proj_with_mqa");
        let [down, k_rope] = Linear::group(parameters, name, [kv_rank, rope_head_dim], hidden_size, weight);
        let kv_size = num_heads * (head_dim - rope_head_dim + value_head_dim);
        let norm = Norm::new(parameters, "self_attn.kv_a_layernorm", kv_rank, EPS.into());
        let name = "self_attn.kv_b_proj";
        let kv = Projection::through_latent(parameters, name, down, Some(norm), kv_size, weight);
        let k_rope = Projection::Direct(k_rope);
        let values = num_heads * value_head_dim;
        let o = Linear::new(parameters, "self_attn.o_proj", [hidden_size, values], weights.output);
        Self { shape, latent, q, kv, k_rope, o }
    }

    /// Keeps the heads of one rank of tp; the output is then a partial sum.
    ///
    /// # Errors
    /// More ranks than heads.
    pub fn divide(&mut self, parameters: &mut ParameterList, tp: TensorRank) -> Result<(), LayerError> {
        let (shape, Heads { q: heads, .. }) = self.shape.divided(parameters.layer(), tp)?;
        let LatentConfig { value_head_dim, .. } = self.latent;
        let [queries, keys_and_values, values] =
            [shape.head_dim, self.k_nope_dim() + value_head_dim, value_head_dim]
                .map(|size| scaled(&heads, size));
        Linear::divide_outputs(parameters, [self.q.last_mut()], [&queries], tp.rank);
        Linear::divide_outputs(parameters, [self.kv.last_mut()], [&keys_and_values], tp.rank);
        self.o.divide_inputs(parameters, &values, tp.rank);
        self.shape = shape;
        Ok(())
    }

    /// The size of the attention, for its FLOPs.
    pub fn extent(&self) -> AttentionExtent {
        self.shape.extent()
    }

    /// Elements of each key and query without a position.
    fn k_nope_dim(&self) -> usize {
        self.shape.head_dim - self.latent.rope_head_dim
    }

    fn layout(&self, pass: &ForwardPass<'_>) -> Result<AttentionLayout, LayerError> {
        pass.ctx.attention_layout_with(self.shape.heads(), self.shape.mask(), self.shape.logits())
    }
}
