//! Multi-head latent attention, of DeepSeek-V2 and V3, Youtu-LLM and MiniCPM3.

use super::families::Family;
use super::model::{
    attention, document_causal_mask, linear, merge_heads, rms_norm, rotate, rotate_neighbors, split_heads,
};
use super::rope::rope_tables;
use super::weights::{ReferenceConfig, RopeScaling, Weights, weight};
use anyhow::Result;
use candle_core::{D, Tensor};

/// Elements of each head of queries and keys that rotate, its last ones, and of each value head. `head_dim` is that of queries.
pub const ROPE_DIM: usize = 4;
pub const VALUE_DIM: usize = 5;

/// The latents of queries, and of keys and values.
pub const Q_RANK: usize = 10;
pub const KV_RANK: usize = 6;

/// `mscale_all_dim` of DeepSeek-V3.
pub const MSCALE_ALL_DIM: f64 = 1.5;

/// The epsilon of the norms of latents.
const EPS: f64 = 1e-6;

impl Family {
    pub fn is_latent(self) -> bool {
        matches!(self, Self::DeepseekV2 | Self::DeepseekV3 | Self::Youtu | Self::MiniCpm3 | Self::KimiLinear)
    }

    /// Whether queries have a latent.
    pub fn has_q_latent(self) -> bool {
        !matches!(self, Self::Youtu | Self::KimiLinear)
    }
}

/// Names below `model.layers.N.self_attn`, and shapes.
pub fn parameter_shapes(config: &ReferenceConfig) -> Vec<(&'static str, Vec<usize>)> {
    let ReferenceConfig { hidden_size: hidden, num_heads: heads, head_dim, .. } = *config;
    let q = match config.family.has_q_latent() {
        true => vec![
            ("q_a_proj.weight", vec![Q_RANK, hidden]),
            ("q_a_layernorm.weight", vec![Q_RANK]),
            ("q_b_proj.weight", vec![heads * head_dim, Q_RANK]),
        ],
        false => vec![("q_proj.weight", vec![heads * head_dim, hidden])],
    };
    let others = [
        ("kv_a_proj_with_mqa.weight", vec![KV_RANK + ROPE_DIM, hidden]),
        ("kv_a_layernorm.weight", vec![KV_RANK]),
        ("kv_b_proj.weight", vec![heads * (head_dim - ROPE_DIM + VALUE_DIM), KV_RANK]),
        ("o_proj.weight", vec![hidden, heads * VALUE_DIM]),
    ];
    q.into_iter().chain(others).collect()
}

/// The factor on the logits.
pub fn scale(config: &ReferenceConfig) -> f64 {
    let plain = 1.0 / (config.head_dim as f64).sqrt();
    match (config.family, config.rope_scaling) {
        (Family::DeepseekV3, RopeScaling::Yarn { factor, .. }) => {
            plain * (0.1 * MSCALE_ALL_DIM * factor.ln() + 1.0).powi(2)
        }
        _ => plain,
    }
}

/// The output `[S, E]` of a layer's attention for the normalized input `h`.
pub fn latent_attention(
    config: &ReferenceConfig,
    weights: &Weights,
    layer: usize,
    h: &Tensor,
    position_ids: &[u32],
) -> Result<Tensor> {
    let get = |name: &str| weight(weights, &format!("model.layers.{layer}.self_attn.{name}.weight"));
    let project = |x: &Tensor, name: &str| linear(x, get(name)?);
    let tables = config.theta(layer).map(|theta| {
        rope_tables(&ReferenceConfig { head_dim: ROPE_DIM, ..config.clone() }, theta, position_ids)
    });
    let tables = tables.transpose()?;
    let rotated = |heads: &Tensor| match &tables {
        None => Ok(heads.contiguous()?),
        Some((cos, sin)) if config.family.is_interleaved() => rotate_neighbors(heads, cos, sin),
        Some((cos, sin)) => rotate(&heads.contiguous()?, cos, sin),
    };
    let nope = config.head_dim - ROPE_DIM;
    let q = match config.family.has_q_latent() {
        true => {
            let latent = rms_norm(&project(h, "q_a_proj")?, get("q_a_layernorm")?, EPS)?;
            project(&latent, "q_b_proj")?
        }
        false => project(h, "q_proj")?,
    };
    let q = split_heads(&q, config.num_heads)?; // [H, S, D]
    let parts = [q.narrow(D::Minus1, 0, nope)?, rotated(&q.narrow(D::Minus1, nope, ROPE_DIM)?)?];
    let q = Tensor::cat(&parts, D::Minus1)?;

    let joint = project(h, "kv_a_proj_with_mqa")?; // [S, KV_RANK + ROPE_DIM]
    let latent = rms_norm(&joint.narrow(1, 0, KV_RANK)?.contiguous()?, get("kv_a_layernorm")?, EPS)?;
    let k_rope = rotated(&joint.narrow(1, KV_RANK, ROPE_DIM)?.unsqueeze(0)?)?; // [1, S, ROPE_DIM]
    let kv = split_heads(&project(&latent, "kv_b_proj")?, config.num_heads)?;
    let shared = k_rope.broadcast_as((config.num_heads, h.dim(0)?, ROPE_DIM))?.contiguous()?;
    let k = Tensor::cat(&[kv.narrow(D::Minus1, 0, nope)?.contiguous()?, shared], D::Minus1)?;
    let v = kv.narrow(D::Minus1, nope, VALUE_DIM)?.contiguous()?;

    let mask = document_causal_mask(position_ids, None)?;
    let attended = attention(&q, &k, &v, &mask, (scale(config), None, None))?;
    project(&merge_heads(&attended)?, "o_proj")
}
