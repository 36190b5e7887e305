//! The decoder, one sequence at a time.
//!
//! Shape legend: S tokens of the sequence, E hidden size, H heads, D head dimension,
//! F intermediate size, V vocabulary.

use super::batch::document_ids;
use super::families::{Family, GRANITE, LLAMA4_GROWTH, LOGIT_SCALE, QUERY_GROWTH};
use super::kimi_delta::kimi_delta;
use super::latent_attention::latent_attention;
use super::linear_attention::{linear_attention, sigmoid};
use super::mamba2::mamba2;
use super::rope::rope_tables;
use super::short_conv::short_conv;
use super::weights::{ReferenceConfig, RopeScaling, Weights, layer_scalar, sinks_name, weight};
use anyhow::Result;
use candle_core::{D, Device, Tensor};

/// Returns the logits `[S, V]` of one sequence.
pub fn row_logits(
    config: &ReferenceConfig,
    weights: &Weights,
    input_ids: &[u32],
    position_ids: &[u32],
) -> Result<Tensor> {
    let get = |name: &str| weight(weights, name);
    let family = config.family;
    let norm = |x: &Tensor, name: &str| {
        let x = if family.is_centered() { &x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x };
        let weight = (&**get(&format!("{name}.weight"))? + family.norm_offset())?;
        let y = rms_norm(x, &weight, config.rms_norm_eps)?;
        anyhow::Ok(match family.has_norm_bias() {
            true => y.broadcast_add(get(&format!("{name}.bias"))?)?,
            false => y,
        })
    };
    let names = family.outer_names();
    let [attention_cap, final_cap] = family.softcaps();
    let [embedding_factor, residual_factor, logits_factor] = match family {
        Family::Granite | Family::GraniteHybrid => [GRANITE[0], GRANITE[1], GRANITE[3]],
        Family::MiniCpm3 => config.minicpm3_factors(),
        family if family.is_gemma() => [(config.hidden_size as f64).sqrt(), 1.0, 1.0],
        family if family.is_cohere() => [1.0, 1.0, LOGIT_SCALE],
        _ => [1.0; 3],
    };

    let embedding = get(&format!("{}.weight", names.embedding))?; // [V, E]
    let x = embedding.index_select(&Tensor::new(input_ids, &Device::Cpu)?, 0)?; // [S, E]
    let mut x = (x * embedding_factor)?;
    if family == Family::Gpt2 {
        let positions = Tensor::new(position_ids, &Device::Cpu)?;
        x = (x + get("transformer.wpe.weight")?.index_select(&positions, 0)?)?;
    }
    let block = family.block_names();
    for layer in 0..config.num_layers {
        let config = &config.of_layer(layer);
        let name = |part: &str| format!("{}.{layer}.{part}", block.layers);
        // As `[out, in]`.
        let part = |part: &str| {
            let weight = &**get(&format!("{}.weight", name(part)))?;
            anyhow::Ok(if family == Family::Gpt2 { weight.t()?.contiguous()? } else { weight.clone() })
        };
        let linear_of = |x: &Tensor, part_name: &str, has_bias: bool| {
            let y = linear(x, &part(part_name)?)?;
            anyhow::Ok(match has_bias {
                true => y.broadcast_add(get(&format!("{}.bias", name(part_name)))?)?,
                false => y,
            })
        };
        let project = |x: &Tensor, part: &str| linear_of(x, part, config.all_biases());
        let maybe_norm = |x: Tensor, part: Option<&str>| match part {
            Some(part) => norm(&x, &name(part)),
            None => Ok(x),
        };
        let [before_attention, after_attention, before_mlp, after_mlp] = family.norms();
        let mask = match (family, config.window(layer)) {
            (Family::Llama4, Some(chunk)) => {
                let in_chunks: Vec<u32> =
                    position_ids.iter().map(|position| position % chunk as u32).collect();
                document_causal_mask(&in_chunks, None)?
            }
            (_, window) => document_causal_mask(position_ids, window)?,
        };
        let tables = config.theta(layer).map(|theta| rope_tables(config, theta, position_ids)).transpose()?;
        let rotated = |heads: Tensor| match &tables {
            Some((cos, sin)) if family == Family::Llama4 => {
                let weight = Tensor::ones(config.head_dim, heads.dtype(), heads.device())?;
                rms_norm(&rotate_neighbors(&heads, cos, sin)?, &weight, config.rms_norm_eps)
            }
            Some((cos, sin)) if family.is_interleaved() => rotate_neighbors(&heads, cos, sin),
            Some((cos, sin)) => rotate(&heads, cos, sin),
            None => Ok(heads),
        };

        let h = maybe_norm(x.clone(), before_attention)?;
        let biased = |letter: &str| {
            if let Some(qkv) = block.qkv {
                return columns(config, &project(&h, qkv)?, letter);
            }
            let projection = format!("{}.{letter}_proj", block.attention);
            if config.all_biases() || !config.has_qkv_bias() {
                return project(&h, &projection);
            }
            let bias = get(&format!("{}.bias", name(&projection)))?;
            anyhow::Ok(project(&h, &projection)?.broadcast_add(bias)?)
        };
        let heads = |letter: &str, num_heads: usize| {
            let y = biased(letter)?;
            let norm_name = name(block.qk_norms[usize::from(letter == "k")]);
            match config.qk_norm_sizes() {
                Some([size, _]) if size > config.head_dim => split_heads(&norm(&y, &norm_name)?, num_heads),
                Some(_) => norm(&split_heads(&y, num_heads)?, &norm_name),
                None => split_heads(&y, num_heads),
            }
        };
        let attend = || {
            // Of gated attention, every head's queries and then its gate.
            let (q, gate) = match family {
                family if family.has_delta_net() => {
                    let joint = split_heads(&biased("q")?, config.num_heads)?; // [H, S, 2·D]
                    let half =
                        |index| joint.narrow(2, index * config.head_dim, config.head_dim)?.contiguous();
                    (norm(&half(0)?, &name(block.qk_norms[0]))?, Some(half(1)?))
                }
                _ => (heads("q", config.num_heads)?, None),
            };
            let q = grown(config, rotated(q)?, position_ids, tables.is_some())?; // [H, S, D]
            let k = repeat_kv(&rotated(heads("k", config.num_kv_heads)?)?, config)?;
            let v =
                split_heads(&biased(if config.is_global(layer) { "k" } else { "v" })?, config.num_kv_heads)?;
            let v = match family {
                Family::Gemma4 => {
                    rms_norm(&v, &Tensor::ones(config.head_dim, v.dtype(), v.device())?, config.rms_norm_eps)?
                }
                _ => v,
            };
            let v = repeat_kv(&v, config)?;
            let sinks = match family {
                Family::GptOss => Some(&**get(&sinks_name(layer))?),
                _ => None,
            };
            let logits = (config.attention_scale(), attention_cap, sinks);
            let mut attended = attention(&q, &k, &v, &mask, logits)?;
            if let Some(gate) = gate {
                attended = (attended * sigmoid(&gate)?)?;
            }
            project(&merge_heads(&attended)?, block.o)
        };
        let plain_mlp = |h: &Tensor, [first, second]: [&str; 2]| {
            let inner = activation(family, &linear_of(h, first, config.mlp_bias())?)?;
            linear_of(&inner, second, config.mlp_bias())
        };
        if let (Family::NemotronH, Some(names)) = (family, block.plain_mlp) {
            let output = match (config.has_mlp(layer), config.is_mamba(layer)) {
                (true, _) => plain_mlp(&h, names)?,
                (_, true) => mamba2(config, weights, &name(block.mamba), &h, position_ids)?,
                _ => attend()?,
            };
            x = (x + output)?;
            continue;
        }
        let output = match (config.is_linear(layer), config.is_conv(layer)) {
            (true, _) if family == Family::KimiLinear => {
                kimi_delta(config, weights, layer, &h, position_ids)?
            }
            (true, _) => linear_attention(config, weights, layer, &h, position_ids)?,
            (_, true) => short_conv(config, weights, layer, &h, position_ids)?,
            _ if family.is_latent() => latent_attention(config, weights, layer, &h, position_ids)?,
            _ if config.is_mamba(layer) => mamba2(config, weights, &name(block.mamba), &h, position_ids)?,
            _ => attend()?,
        };
        let output = maybe_norm(output, after_attention)?;
        let before = x.clone();
        x = (x + (output * residual_factor)?)?;

        let h = match family {
            family if family.shares_norm() => h,
            Family::GptNeoX => maybe_norm(before, before_mlp)?,
            _ => maybe_norm(x.clone(), before_mlp)?,
        };
        let [gate, up, down] = block.gated_mlp;
        let output = match (block.plain_mlp, block.fused_gate_up) {
            (Some(names), _) => plain_mlp(&h, names)?,
            (None, Some(gate_up)) => {
                let gate_up = project(&h, gate_up)?; // [S, 2·F]
                let size = config.intermediate_size;
                let (gate, up) = (gate_up.narrow(1, 0, size)?, gate_up.narrow(1, size, size)?);
                project(&(activation(family, &gate)? * up)?, down)?
            }
            (None, None) => {
                let (gate, up) = (project(&h, gate)?, project(&h, up)?); // [S, F]
                project(&(activation(family, &gate)? * up)?, down)?
            }
        };
        x = (x + (maybe_norm(output, after_mlp)? * residual_factor)?)?;
        if family == Family::Gemma4 {
            x = x.broadcast_mul(get(&layer_scalar(layer))?)?;
        }
    }
    let h = norm(&x, names.norm)?;
    let head = if config.tie_word_embeddings { embedding } else { get(&format!("{}.weight", names.head))? };
    let mut logits = (linear(&h, head)? * logits_factor)?;
    if family.has_head_bias() {
        logits = logits.broadcast_add(get(&format!("{}.bias", names.head))?)?;
    }
    capped(logits, final_cap)
}

/// `cap · tanh(x / cap)`
fn capped(x: Tensor, cap: Option<f64>) -> Result<Tensor> {
    Ok(match cap {
        Some(cap) => ((x / cap)?.tanh()? * cap)?,
        None => x,
    })
}

/// Queries, keys or values, `[S, H·D]`, in the projection to all three: one after the other, in GPT-NeoX head by head.
fn columns(config: &ReferenceConfig, qkv: &Tensor, letter: &str) -> Result<Tensor> {
    let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
    let (index, start, len) = match letter {
        "q" => (0, 0, q),
        "k" => (1, q, kv),
        _ => (2, q + kv, kv),
    };
    if config.family != Family::GptNeoX {
        return Ok(qkv.narrow(1, start, len)?.contiguous()?);
    }
    let by_head = qkv.reshape((qkv.dim(0)?, config.num_heads, 3, config.head_dim))?;
    Ok(by_head.narrow(2, index, 1)?.contiguous()?.reshape((qkv.dim(0)?, q))?)
}

/// The activation of an MLP.
fn activation(family: Family, x: &Tensor) -> Result<Tensor> {
    match family {
        Family::Gpt2 | Family::GptJ | Family::Phi | Family::StarCoder2 => gelu_tanh(x),
        family if family.is_gemma() => gelu_tanh(x),
        // x · Φ(x)
        Family::GptNeoX => Ok((x * ((x / 2f64.sqrt())?.erf()? + 1.0)?)?.affine(0.5, 0.0)?),
        Family::Nemotron | Family::NemotronH => Ok(x.relu()?.sqr()?),
        _ => silu(x),
    }
}

/// `x · wᵀ`: `[S, in]`, `[out, in]` → `[S, out]`.
pub(super) fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    Ok(x.matmul(&weight.t()?)?)
}

/// `x / sqrt(mean(x²) + eps) · weight` over the last dimension.
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
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
pub(super) fn split_heads(x: &Tensor, num_heads: usize) -> Result<Tensor> {
    let (seq_len, size) = x.dims2()?;
    Ok(x.reshape((seq_len, num_heads, size / num_heads))?.transpose(0, 1)?.contiguous()?)
}

/// `[H, S, D]` → `[S, H·D]`
pub(super) fn merge_heads(x: &Tensor) -> Result<Tensor> {
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
pub(super) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
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

/// Queries `[H, S, D]` of Ministral 3 grow with their position, and those of Llama 4 in layers that do not rotate.
fn grown(config: &ReferenceConfig, queries: Tensor, position_ids: &[u32], rotates: bool) -> Result<Tensor> {
    let (growth, len, offset) = match (config.family, config.rope_scaling) {
        (Family::Ministral3, RopeScaling::Yarn { original, .. }) => (QUERY_GROWTH, original as u32, 0),
        (Family::Llama4, _) if !rotates => (LLAMA4_GROWTH.0, LLAMA4_GROWTH.1, 1),
        _ => return Ok(queries),
    };
    let factor = |position: &u32| 1.0 + growth * (1.0 + f64::from((position + offset) / len)).ln();
    let factors: Vec<f64> = position_ids.iter().map(factor).collect();
    Ok(queries.broadcast_mul(&Tensor::from_vec(factors, (position_ids.len(), 1), &Device::Cpu)?)?)
}

/// As [`rotate`], with neighboring elements as pairs: sorted by even and odd index, they are halves.
pub(super) fn rotate_neighbors(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
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
pub(super) fn document_causal_mask(position_ids: &[u32], window: Option<usize>) -> Result<Tensor> {
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

/// `softmax(capped(scale · q · kᵀ) + mask) · v` for `[H, S, D]` each. Sinks `[H]` are one more logit of every query, without a value.
pub(super) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &Tensor,
    (scale, cap, sinks): (f64, Option<f64>, Option<&Tensor>),
) -> Result<Tensor> {
    let scores = capped((q.matmul(&k.transpose(1, 2)?.contiguous()?)? * scale)?, cap)?;
    let scores = scores.broadcast_add(mask)?;
    let Some(sinks) = sinks else { return Ok(softmax(&scores)?.matmul(v)?) };
    let (heads, queries, keys) = scores.dims3()?;
    let sinks = sinks.reshape((heads, 1, 1))?.broadcast_as((heads, queries, 1))?;
    let weights = softmax(&Tensor::cat(&[&scores, &sinks.contiguous()?], 2)?)?;
    Ok(weights.narrow(2, 0, keys)?.contiguous()?.matmul(v)?)
}

/// Softmax over the last dimension. The shift by the maximum cancels, so it carries no gradient.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
}
