//! The decoder, one sequence at a time.
//!
//! Shape legend: S tokens of the sequence, E hidden size, H heads, D head dimension,
//! F intermediate size, V vocabulary.

use super::batch::document_ids;
use super::families::{Family, GRANITE, LOGIT_SCALE, QUERY_GROWTH};
use super::linear_attention::{linear_attention, sigmoid};
use super::rope::rope_tables;
use super::weights::{ReferenceConfig, RopeScaling, Weights};
use anyhow::{Context, Result};
use candle_core::{D, Device, Tensor};

/// Returns the logits `[S, V]` of one sequence.
pub fn row_logits(
    config: &ReferenceConfig,
    weights: &Weights,
    input_ids: &[u32],
    position_ids: &[u32],
) -> Result<Tensor> {
    let get = |name: &str| weights.get(name).with_context(|| format!("no weight {name}"));
    let family = config.family;
    let norm = |x: &Tensor, weight: &Tensor| {
        let x = if family.is_cohere() { &x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x };
        rms_norm(x, &(weight + family.norm_offset())?, config.rms_norm_eps)
    };
    let [attention_cap, final_cap] = family.softcaps();
    let [embedding_factor, residual_factor, logits_factor] = match family {
        Family::Granite => [GRANITE[0], GRANITE[1], GRANITE[3]],
        family if family.is_gemma() => [(config.hidden_size as f64).sqrt(), 1.0, 1.0],
        family if family.is_cohere() => [1.0, 1.0, LOGIT_SCALE],
        _ => [1.0; 3],
    };

    let embedding = get("model.embed_tokens.weight")?; // [V, E]
    let x = embedding.index_select(&Tensor::new(input_ids, &Device::Cpu)?, 0)?; // [S, E]
    let mut x = (x * embedding_factor)?;
    for layer in 0..config.num_layers {
        let part = |part: &str| get(&format!("model.layers.{layer}.{part}.weight"));
        let maybe_norm = |x: Tensor, name: Option<&str>| match name {
            Some(name) => norm(&x, part(name)?),
            None => Ok(x),
        };
        let [before_attention, after_attention, before_mlp, after_mlp] = family.norms();
        let mask = document_causal_mask(position_ids, config.window(layer))?;
        let tables = config.theta(layer).map(|theta| rope_tables(config, theta, position_ids)).transpose()?;
        let rotated = |heads: Tensor| match &tables {
            Some((cos, sin)) if family.is_interleaved() => rotate_neighbors(&heads, cos, sin),
            Some((cos, sin)) => rotate(&heads, cos, sin),
            None => Ok(heads),
        };

        let h = maybe_norm(x.clone(), before_attention)?;
        let biased = |name: &str| {
            let y = match family {
                Family::Phi3 => linear(&h, &rows(config, part("self_attn.qkv_proj")?, name)?)?,
                _ => linear(&h, part(&format!("self_attn.{name}_proj"))?)?,
            };
            if !config.qkv_bias {
                return Ok(y);
            }
            let bias = get(&format!("model.layers.{layer}.self_attn.{name}_proj.bias"))?;
            anyhow::Ok(y.broadcast_add(bias)?)
        };
        let heads = |name: &str, num_heads: usize| {
            let y = biased(name)?;
            let weight = || part(&format!("self_attn.{name}_norm"));
            match config.qk_norm_sizes() {
                Some([size, _]) if size > config.head_dim => split_heads(&norm(&y, weight()?)?, num_heads),
                Some(_) => norm(&split_heads(&y, num_heads)?, weight()?),
                None => split_heads(&y, num_heads),
            }
        };
        let attend = || {
            // Of gated attention, every head's queries and then its gate.
            let (q, gate) = match family {
                Family::Qwen35 => {
                    let joint = split_heads(&biased("q")?, config.num_heads)?; // [H, S, 2·D]
                    let half =
                        |index| joint.narrow(2, index * config.head_dim, config.head_dim)?.contiguous();
                    (norm(&half(0)?, part("self_attn.q_norm")?)?, Some(half(1)?))
                }
                _ => (heads("q", config.num_heads)?, None),
            };
            let q = grown(config, rotated(q)?, position_ids)?; // [H, S, D]
            let k = repeat_kv(&rotated(heads("k", config.num_kv_heads)?)?, config)?;
            let v = repeat_kv(&split_heads(&biased("v")?, config.num_kv_heads)?, config)?;
            let mut attended = attention(&q, &k, &v, &mask, (config.attention_scale(), attention_cap))?;
            if let Some(gate) = gate {
                attended = (attended * sigmoid(&gate)?)?;
            }
            linear(&merge_heads(&attended)?, part("self_attn.o_proj")?)
        };
        let output = match config.is_linear(layer) {
            true => linear_attention(config, weights, layer, &h, position_ids)?,
            false => attend()?,
        };
        let output = maybe_norm(output, after_attention)?;
        x = (x + (output * residual_factor)?)?;

        let h = if family.is_cohere() { h } else { maybe_norm(x.clone(), before_mlp)? };
        let (gate, up) = match family.has_fused_gate_up() {
            true => {
                let gate_up = linear(&h, part("mlp.gate_up_proj")?)?; // [S, 2·F]
                let size = config.intermediate_size;
                (gate_up.narrow(1, 0, size)?, gate_up.narrow(1, size, size)?)
            }
            false => (linear(&h, part("mlp.gate_proj")?)?, linear(&h, part("mlp.up_proj")?)?), // [S, F]
        };
        let activated = if family.is_gemma() { gelu_tanh(&gate)? } else { silu(&gate)? };
        let output = maybe_norm(linear(&(activated * up)?, part("mlp.down_proj")?)?, after_mlp)?;
        x = (x + (output * residual_factor)?)?;
    }
    let h = norm(&x, get("model.norm.weight")?)?;
    let head = if config.tie_word_embeddings { embedding } else { get("lm_head.weight")? };
    capped((linear(&h, head)? * logits_factor)?, final_cap)
}

/// `cap · tanh(x / cap)`
fn capped(x: Tensor, cap: Option<f64>) -> Result<Tensor> {
    Ok(match cap {
        Some(cap) => ((x / cap)?.tanh()? * cap)?,
        None => x,
    })
}

/// The rows of queries, keys or values in the weight that has all three, in this order.
fn rows(config: &ReferenceConfig, weight: &Tensor, name: &str) -> Result<Tensor> {
    let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
    let (start, len) = match name {
        "q" => (0, q),
        "k" => (q, kv),
        _ => (q + kv, kv),
    };
    Ok(weight.narrow(0, start, len)?)
}

/// `x · wᵀ`: `[S, in]`, `[out, in]` → `[S, out]`.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    Ok(x.matmul(&weight.t()?)?)
}

/// `x / sqrt(mean(x²) + eps) · weight` over the last dimension.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let size = x.dim(D::Minus1)? as f64;
    let mean_square = (x.sqr()?.sum_keepdim(D::Minus1)? / size)?;
    let normalised = x.broadcast_div(&(mean_square + eps)?.sqrt()?)?;
    Ok(normalised.broadcast_mul(weight)?)
}

/// `x · sigmoid(x)`
fn silu(x: &Tensor) -> Result<Tensor> {
    Ok((x / (x.neg()?.exp()? + 1.0)?)?)
}

/// `x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2`
fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    let cubed = (x.sqr()? * x)?;
    let inner = ((x + (cubed * 0.044_715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
    Ok(((inner.tanh()? + 1.0)? * x)?.affine(0.5, 0.0)?)
}

/// `[S, H·D]` → `[H, S, D]`
fn split_heads(x: &Tensor, num_heads: usize) -> Result<Tensor> {
    let (seq_len, size) = x.dims2()?;
    Ok(x.reshape((seq_len, num_heads, size / num_heads))?.transpose(0, 1)?.contiguous()?)
}

/// `[H, S, D]` → `[S, H·D]`
fn merge_heads(x: &Tensor) -> Result<Tensor> {
    let (num_heads, seq_len, head_dim) = x.dims3()?;
    Ok(x.transpose(0, 1)?.contiguous()?.reshape((seq_len, num_heads * head_dim))?)
}

/// Gives every query head `h` its own copy of KV head `h · num_kv_heads / num_heads`.
fn repeat_kv(x: &Tensor, config: &ReferenceConfig) -> Result<Tensor> {
    let kv_head = |head: usize| (head * config.num_kv_heads / config.num_heads) as u32;
    let kv_heads: Vec<u32> = (0..config.num_heads).map(kv_head).collect();
    Ok(x.index_select(&Tensor::new(kv_heads, &Device::Cpu)?, 0)?)
}

/// Rotary embedding of the first elements of `[H, S, D]`, as many as `cos` has; the others pass: `x · cos + rotate_half(x) · sin`,
/// where `rotate_half` turns the halves (a, b) of each head into (−b, a).
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (size, rotating) = (x.dim(D::Minus1)?, cos.dim(D::Minus1)?);
    if rotating < size {
        let rotated = rotate(&x.narrow(D::Minus1, 0, rotating)?, cos, sin)?;
        return Ok(Tensor::cat(&[rotated, x.narrow(D::Minus1, rotating, size - rotating)?], D::Minus1)?);
    }
    let half = size / 2;
    let (a, b) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
    let rotate_half = Tensor::cat(&[&b.neg()?, &a.contiguous()?], D::Minus1)?;
    Ok((x.broadcast_mul(cos)? + rotate_half.broadcast_mul(sin)?)?)
}

/// Queries `[H, S, D]` of Ministral 3 grow with their position.
fn grown(config: &ReferenceConfig, queries: Tensor, position_ids: &[u32]) -> Result<Tensor> {
    let (Family::Ministral3, RopeScaling::Yarn { original, .. }) = (config.family, config.rope_scaling)
    else {
        return Ok(queries);
    };
    let lens = position_ids.iter().map(|position| *position as usize / original);
    let factors: Vec<f64> = lens.map(|lens| 1.0 + QUERY_GROWTH * (1.0 + lens as f64).ln()).collect();
    Ok(queries.broadcast_mul(&Tensor::from_vec(factors, (position_ids.len(), 1), &Device::Cpu)?)?)
}

/// As [`rotate`], with neighboring elements as pairs: sorted by even and odd index, they are halves.
fn rotate_neighbors(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (size, rotating) = (x.dim(D::Minus1)? as u32, cos.dim(D::Minus1)? as u32);
    let half = rotating / 2;
    let sorted = (0..rotating).step_by(2).chain((1..rotating).step_by(2)).chain(rotating..size);
    let back = (0..rotating).map(|i| i / 2 + i % 2 * half).chain(rotating..size);
    let [sorted, back]: [Vec<u32>; 2] = [sorted.collect(), back.collect()];
    let select = |x: &Tensor, order: Vec<u32>| {
        x.contiguous()?.index_select(&Tensor::new(order, &Device::Cpu)?, D::Minus1)
    };
    Ok(select(&rotate(&select(x, sorted)?, cos, sin)?, back)?)
}

/// Returns the attention mask `[S, S]` (query, key): 0 if the key is in the query's document, not after it and less
/// than `window` tokens before it; −∞ otherwise.
fn document_causal_mask(position_ids: &[u32], window: Option<usize>) -> Result<Tensor> {
    let documents = document_ids(position_ids);
    let seq_len = documents.len();
    let mut mask = Vec::with_capacity(seq_len * seq_len);
    for query in 0..seq_len {
        for key in 0..seq_len {
            let near = window.is_none_or(|window| key + window > query);
            let visible = key <= query && near && documents[key] == documents[query];
            mask.push(if visible { 0.0 } else { f64::NEG_INFINITY });
        }
    }
    Ok(Tensor::from_vec(mask, (seq_len, seq_len), &Device::Cpu)?)
}

/// `softmax(capped(scale · q · kᵀ) + mask) · v` for `[H, S, D]` each.
fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &Tensor,
    (scale, cap): (f64, Option<f64>),
) -> Result<Tensor> {
    let scores = capped((q.matmul(&k.transpose(1, 2)?.contiguous()?)? * scale)?, cap)?;
    let scores = scores.broadcast_add(mask)?;
    Ok(softmax(&scores)?.matmul(v)?)
}

/// Softmax over the last dimension. The shift by the maximum cancels, so it carries no gradient.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
}
