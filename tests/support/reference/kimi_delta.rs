//! Kimi Delta Attention (arXiv 2510.26692), token by token.

use super::batch::document_ids;
use super::linear_attention::{convolution, delta_rule, sigmoid, unit};
use super::model::{linear, rms_norm};
use super::weights::{ReferenceConfig, Weights, weight};
use anyhow::Result;
use candle_core::Tensor;

/// Heads, elements of each, and tokens that a convolution reads.
pub const HEADS: usize = 4;
pub const HEAD_DIM: usize = 6;
pub const CONV_WIDTH: usize = 4;

/// Names below `model.layers.N.self_attn`, and shapes.
pub fn parameter_shapes(hidden: usize) -> Vec<(&'static str, Vec<usize>)> {
    let all = HEADS * HEAD_DIM;
    vec![
        ("q_proj.weight", vec![all, hidden]),
        ("k_proj.weight", vec![all, hidden]),
        ("v_proj.weight", vec![all, hidden]),
        ("q_conv1d.weight", vec![all, 1, CONV_WIDTH]),
        ("k_conv1d.weight", vec![all, 1, CONV_WIDTH]),
        ("v_conv1d.weight", vec![all, 1, CONV_WIDTH]),
        ("f_a_proj.weight", vec![HEAD_DIM, hidden]),
        ("f_b_proj.weight", vec![all, HEAD_DIM]),
        ("dt_bias", vec![all]),
        ("A_log", vec![1, 1, HEADS, 1]),
        ("b_proj.weight", vec![HEADS, hidden]),
        ("g_a_proj.weight", vec![HEAD_DIM, hidden]),
        ("g_b_proj.weight", vec![all, HEAD_DIM]),
        ("o_norm.weight", vec![HEAD_DIM]),
        ("o_proj.weight", vec![hidden, all]),
    ]
}

/// The output `[S, E]` of a layer's linear attention for the normalized input `h`.
pub fn kimi_delta(
    config: &ReferenceConfig,
    weights: &Weights,
    layer: usize,
    h: &Tensor,
    position_ids: &[u32],
) -> Result<Tensor> {
    let get = |name: &str| weight(weights, &format!("model.layers.{layer}.self_attn.{name}"));
    let project = |x: &Tensor, name: &str| linear(x, get(&format!("{name}.weight"))?);
    let documents = document_ids(position_ids);
    let seq_len = documents.len();
    let by_head = |x: &Tensor| x.reshape((seq_len, HEADS, HEAD_DIM));
    let mixed = |part: &str| {
        let projected = project(h, &format!("{part}_proj"))?;
        let sums = convolution(&projected, get(&format!("{part}_conv1d.weight"))?, &documents)?;
        anyhow::Ok(by_head(&(&sums * sigmoid(&sums)?)?)?)
    };
    let q = (unit(&mixed("q")?)? / (HEAD_DIM as f64).sqrt())?; // [S, H, D]
    let (k, v) = (unit(&mixed("k")?)?, mixed("v")?);

    let time = project(&project(h, "f_a_proj")?, "f_b_proj")?.broadcast_add(get("dt_bias")?)?;
    let softplus = by_head(&(time.exp()? + 1.0)?.log()?)?;
    let decay = softplus.broadcast_mul(&get("A_log")?.exp()?.reshape((1, HEADS, 1))?)?.neg()?.exp()?;
    let beta = sigmoid(&project(h, "b_proj")?)?; // [S, H]
    let out = delta_rule([&q, &k, &v], &decay, &beta, &documents)?;

    let normed = rms_norm(&out, get("o_norm.weight")?, config.rms_norm_eps)?;
    let gate = sigmoid(&project(&project(h, "g_a_proj")?, "g_b_proj")?)?;
    project(&(normed.reshape((seq_len, HEADS * HEAD_DIM))? * gate)?, "o_proj")
}
