//! Gated DeltaNet (arXiv 2412.06464), token by token.

use super::batch::document_ids;
use super::families::Family;
use super::weights::{ReferenceConfig, Weights, weight};
use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};

/// Key and value heads. In Qwen3-Next some ranks of tp have two key heads, and others one or a part of one.
pub fn heads(family: Family) -> [usize; 2] {
    if family == Family::Qwen3Next { [3, 6] } else { [2, 4] }
}

/// Elements of a key and of a value head.
pub const HEAD_DIMS: [usize; 2] = [4, 6];

/// Tokens that the convolution reads.
pub const CONV_WIDTH: usize = 4;

/// Elements of all keys and of all values.
fn sizes(family: Family) -> [usize; 2] {
    let [keys, values] = heads(family);
    [keys * HEAD_DIMS[0], values * HEAD_DIMS[1]]
}

/// Names below `model.layers.N.linear_attn`, and shapes.
pub fn parameter_shapes(config: &ReferenceConfig) -> Vec<(&'static str, Vec<usize>)> {
    let ([keys, values], [_, heads]) = (sizes(config.family), heads(config.family));
    let hidden = config.hidden_size;
    let projections = match config.family {
        Family::Qwen3Next => {
            vec![("in_proj_qkvz.weight", 2 * keys + 2 * values), ("in_proj_ba.weight", 2 * heads)]
        }
        _ => vec![
            ("in_proj_qkv.weight", 2 * keys + values),
            ("in_proj_z.weight", values),
            ("in_proj_b.weight", heads),
            ("in_proj_a.weight", heads),
        ],
    };
    let others = [
        ("out_proj.weight", vec![hidden, values]),
        ("conv1d.weight", vec![2 * keys + values, 1, CONV_WIDTH]),
        ("dt_bias", vec![heads]),
        ("A_log", vec![heads]),
        ("norm.weight", vec![HEAD_DIMS[1]]),
    ];
    projections.into_iter().map(|(name, outs)| (name, vec![outs, hidden])).chain(others).collect()
}

/// The projections of a layer.
struct Projections {
    /// Queries, keys and values `[S, C]`, in the order of the channels of the convolution.
    mixed: Tensor,
    /// `[S, Hv·Dv]`
    z: Tensor,
    /// `[S, Hv]`
    b: Tensor,
    /// `[S, Hv]`
    a: Tensor,
}

impl Projections {
    fn new(family: Family, project: impl Fn(&str) -> Result<Tensor>) -> Result<Self> {
        if family != Family::Qwen3Next {
            let [mixed, z, b, a] =
                ["qkv", "z", "b", "a"].map(|part| project(&format!("in_proj_{part}.weight")));
            return Ok(Self { mixed: mixed?, z: z?, b: b?, a: a? });
        }
        // Of each key head its query, its key, the values of the value heads that use it, and their z; then their b, and their a.
        let ([key_heads, value_heads], [query, value]) = (heads(family), HEAD_DIMS);
        let group = value_heads / key_heads;
        let sizes = [query, query, group * value, group * value];
        let [q, k, v, z] = split(&project("in_proj_qkvz.weight")?, key_heads, sizes)?;
        let [b, a] = split(&project("in_proj_ba.weight")?, key_heads, [group, group])?;
        Ok(Self { mixed: Tensor::cat(&[q, k, v], 1)?, z, b, a })
    }
}

/// `[S, key heads · Σ sizes]` → the parts of every key head, each `[S, key heads · size]`.
fn split<const N: usize>(joint: &Tensor, key_heads: usize, sizes: [usize; N]) -> Result<[Tensor; N]> {
    let by_head = joint.reshape((joint.dim(0)?, key_heads, ()))?;
    let mut start = 0;
    let mut parts = Vec::new();
    for size in sizes {
        parts.push(by_head.narrow(2, start, size)?.contiguous()?.flatten_from(1)?);
        start += size;
    }
    Ok(parts.try_into().expect("one part for each size"))
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
    let Projections { mixed, z, b, a } = Projections::new(config.family, project)?;
    let ([key_heads, heads], [key_dim, value_dim]) = (heads(config.family), HEAD_DIMS);
    let [keys, values] = sizes(config.family);
    let documents = document_ids(position_ids);
    let seq_len = documents.len();

    let sums = convolution(&mixed, get("conv1d.weight")?, &documents)?;
    let mixed = (&sums * sigmoid(&sums)?)?;
    // Neighboring value heads share a key head.
    let per_value_head = |x: Tensor| {
        let of_head: Vec<u32> = (0..heads).map(|head| (head * key_heads / heads) as u32).collect();
        x.reshape((seq_len, key_heads, key_dim))?.index_select(&Tensor::new(of_head, &Device::Cpu)?, 1)
    };
    let q = unit(&per_value_head(mixed.narrow(1, 0, keys)?)?)?; // [S, Hv, Dk]
    let q = (q / (key_dim as f64).sqrt())?;
    let k = unit(&per_value_head(mixed.narrow(1, keys, keys)?)?)?;
    let v = mixed.narrow(1, 2 * keys, values)?.reshape((seq_len, heads, value_dim))?;
    let beta = sigmoid(&b)?; // [S, Hv]
    let time = a.broadcast_add(get("dt_bias")?)?;
    let softplus = (time.exp()? + 1.0)?.log()?;
    let decay = softplus.broadcast_mul(&get("A_log")?.exp()?)?.neg()?.exp()?;

    let out = delta_rule([&q, &k, &v], &decay.unsqueeze(2)?, &beta, &documents)?;
    let mean_square = (out.sqr()?.sum_keepdim(D::Minus1)? / value_dim as f64)?;
    let normed = out.broadcast_div(&(mean_square + config.rms_norm_eps)?.sqrt()?)?;
    let normed = normed.broadcast_mul(get("norm.weight")?)?.reshape((seq_len, values))?;
    let gated = (normed * (&z * sigmoid(&z)?)?)?;
    Ok(gated.matmul(&get("out_proj.weight")?.t()?)?)
}

/// Queries, keys and values `[S, H, D]`, decays `[S, H, D]` of the rows of the state, or `[S, H, 1]` of all, rates `[S, H]` → `[S, H, D]`.
pub fn delta_rule(
    [q, k, v]: [&Tensor; 3],
    decay: &Tensor,
    beta: &Tensor,
    documents: &[usize],
) -> Result<Tensor> {
    let ((_, heads, key_dim), value_dim) = (k.dims3()?, v.dim(2)?);
    let mut outputs = Vec::new();
    let zeros = Tensor::zeros((heads, key_dim, value_dim), DType::F64, &Device::Cpu)?;
    let mut state = zeros.clone();
    for token in 0..documents.len() {
        if token > 0 && documents[token] != documents[token - 1] {
            state = zeros.clone();
        }
        let of_token = |x: &Tensor| x.narrow(0, token, 1)?.squeeze(0);
        let (q, k) = (of_token(q)?.unsqueeze(2)?, of_token(k)?.unsqueeze(2)?); // [H, Dk, 1]
        state = state.broadcast_mul(&of_token(decay)?.unsqueeze(2)?)?;
        let recalled = state.broadcast_mul(&k)?.sum(1)?; // [H, Dv]
        let change = (of_token(v)? - recalled)?.broadcast_mul(&of_token(beta)?.unsqueeze(1)?)?;
        state = (state + k.broadcast_mul(&change.unsqueeze(1)?)?)?;
        outputs.push(state.broadcast_mul(&q)?.sum(1)?);
    }
    Ok(Tensor::stack(&outputs, 0)?)
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
pub fn unit(x: &Tensor) -> Result<Tensor> {
    Ok(x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?)?)
}

/// `1 / (1 + exp(−x))`
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    Ok((x.neg()?.exp()? + 1.0)?.recip()?)
}
