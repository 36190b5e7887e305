//! Gated DeltaNet (arXiv 2412.06464), token by token.

use super::batch::document_ids;
use super::weights::{ReferenceConfig, Weights, weight};
use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};

/// Key and value heads.
pub const HEADS: [usize; 2] = [2, 4];

/// Elements of a key and of a value head.
pub const HEAD_DIMS: [usize; 2] = [4, 6];

/// Tokens that the convolution reads.
pub const CONV_WIDTH: usize = 4;

/// Elements of all keys and of all values.
fn sizes() -> [usize; 2] {
    [HEADS[0] * HEAD_DIMS[0], HEADS[1] * HEAD_DIMS[1]]
}

/// Names below `model.layers.N.linear_attn`, and shapes.
pub fn parameter_shapes(hidden: usize) -> Vec<(&'static str, Vec<usize>)> {
    let ([keys, values], heads) = (sizes(), HEADS[1]);
    vec![
        ("in_proj_qkv.weight", vec![2 * keys + values, hidden]),
        ("in_proj_z.weight", vec![values, hidden]),
        ("in_proj_b.weight", vec![heads, hidden]),
        ("in_proj_a.weight", vec![heads, hidden]),
        ("out_proj.weight", vec![hidden, values]),
        ("conv1d.weight", vec![2 * keys + values, 1, CONV_WIDTH]),
        ("dt_bias", vec![heads]),
        ("A_log", vec![heads]),
        ("norm.weight", vec![HEAD_DIMS[1]]),
    ]
}

/// The output `[S, E]` of a layer's linear attention for the normalized input `h`.
pub fn linear_attention(
    config: &ReferenceConfig,
    weights: &Weights,
    layer: usize,
    h: &Tensor,
    position_ids: &[u32],
) -> Result<Tensor> {
    let get = |name: &str| weight(weights, &format!("model.layers.{layer}.linear_attn.{name}"));
    let project = |name: &str| anyhow::Ok(h.matmul(&get(name)?.t()?)?);
    let ([keys, values], [key_dim, value_dim], [_, heads]) = (sizes(), HEAD_DIMS, HEADS);
    let documents = document_ids(position_ids);
    let seq_len = documents.len();

    let sums = convolution(&project("in_proj_qkv.weight")?, get("conv1d.weight")?, &documents)?;
    let mixed = (&sums * sigmoid(&sums)?)?;
    // Neighboring value heads share a key head.
    let per_value_head = |x: Tensor| {
        let of_head: Vec<u32> = (0..heads).map(|head| (head * HEADS[0] / heads) as u32).collect();
        x.reshape((seq_len, HEADS[0], key_dim))?.index_select(&Tensor::new(of_head, &Device::Cpu)?, 1)
    };
    let q = unit(&per_value_head(mixed.narrow(1, 0, keys)?)?)?; // [S, Hv, Dk]
    let q = (q / (key_dim as f64).sqrt())?;
    let k = unit(&per_value_head(mixed.narrow(1, keys, keys)?)?)?;
    let v = mixed.narrow(1, 2 * keys, values)?.reshape((seq_len, heads, value_dim))?;
    let beta = sigmoid(&project("in_proj_b.weight")?)?; // [S, Hv]
    let time = project("in_proj_a.weight")?.broadcast_add(get("dt_bias")?)?;
    let softplus = (time.exp()? + 1.0)?.log()?;
    let decay = softplus.broadcast_mul(&get("A_log")?.exp()?)?.neg()?.exp()?;

    let mut outputs = Vec::new();
    let zeros = Tensor::zeros((heads, key_dim, value_dim), DType::F64, &Device::Cpu)?;
    let mut state = zeros.clone();
    for token in 0..seq_len {
        if token > 0 && documents[token] != documents[token - 1] {
            state = zeros.clone();
        }
        let of_token = |x: &Tensor| x.narrow(0, token, 1)?.squeeze(0);
        let (q, k) = (of_token(&q)?.unsqueeze(2)?, of_token(&k)?.unsqueeze(2)?); // [Hv, Dk, 1]
        state = state.broadcast_mul(&of_token(&decay)?.reshape((heads, 1, 1))?)?;
        let recalled = state.broadcast_mul(&k)?.sum(1)?; // [Hv, Dv]
        let change = (of_token(&v)? - recalled)?.broadcast_mul(&of_token(&beta)?.unsqueeze(1)?)?;
        state = (state + k.broadcast_mul(&change.unsqueeze(1)?)?)?;
        outputs.push(state.broadcast_mul(&q)?.sum(1)?);
    }
    let out = Tensor::stack(&outputs, 0)?; // [S, Hv, Dv]
    let mean_square = (out.sqr()?.sum_keepdim(D::Minus1)? / value_dim as f64)?;
    let normed = out.broadcast_div(&(mean_square + config.rms_norm_eps)?.sqrt()?)?;
    let normed = normed.broadcast_mul(get("norm.weight")?)?.reshape((seq_len, values))?;
    let z = project("in_proj_z.weight")?;
    let gated = (normed * (&z * sigmoid(&z)?)?)?;
    Ok(gated.matmul(&get("out_proj.weight")?.t()?)?)
}

/// `Σⱼ weight[c, j] · x[t − (w − 1) + j, c]` over the tokens of t's document: `[S, C]`, `[C, 1, w]` → `[S, C]`.
pub fn convolution(x: &Tensor, weight: &Tensor, documents: &[usize]) -> Result<Tensor> {
    let width = weight.dim(2)?;
    let mut rows = Vec::new();
    for token in 0..documents.len() {
        let mut row = Tensor::zeros((1, x.dim(1)?), DType::F64, &Device::Cpu)?;
        for back in 0..width.min(token + 1) {
            if documents[token - back] == documents[token] {
                let taps = weight.narrow(2, width - 1 - back, 1)?.flatten_all()?;
                row = (row + x.narrow(0, token - back, 1)?.broadcast_mul(&taps)?)?;
            }
        }
        rows.push(row);
    }
    Ok(Tensor::cat(&rows, 0)?)
}

/// `x / sqrt(Σx² + 1e-6)` over the last dimension.
fn unit(x: &Tensor) -> Result<Tensor> {
    Ok(x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?)?)
}

/// `1 / (1 + exp(−x))`
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    Ok((x.neg()?.exp()? + 1.0)?.recip()?)
}
