//! The fields of multi-head latent attention in a `config.json`, as DeepSeek, and with it transformers, names them.

use super::read::{MUST_BE_GIVEN, remove_fields};
use super::{HfConfig, ModelConfig, ModelError};
use crate::nn::{AttentionConfig, LatentConfig};
use serde_json::{Value, json};
use ulysses_kernels::rope::{Rope, Scaling};

const MSCALE: &str = "mscale_all_dim";

/// The attention of a layer.
pub(super) fn read(
    file: &HfConfig<'_>,
    rope: Option<Rope>,
    value_head_dim: usize,
) -> Result<AttentionConfig, ModelError> {
    file.check_biases()?;
    let heads = file.heads()?;
    if heads.num_kv_heads != heads.num_heads {
        let expected = format!("latent attention has as many as query heads: it must be {}", heads.num_heads);
        return Err(file.error("num_key_value_heads", &expected));
    }
    let [kv_rank, rope_head_dim] = [file.size("kv_lora_rank")?, file.size("qk_rope_head_dim")?];
    let nope_head_dim = file.size("qk_nope_head_dim")?;
    if !file.has("q_lora_rank") {
        return Err(file.error("q_lora_rank", &format!("{MUST_BE_GIVEN}, or null")));
    }
    let head_dim = nope_head_dim.saturating_add(rope_head_dim);
    // transformers writes both, of its own.
    for (key, expected) in [("head_dim", rope_head_dim), ("qk_head_dim", head_dim)] {
        if file.optional_size(key)?.is_some_and(|size| size != expected) {
            return Err(file.error(key, &format!("it must be {expected} for these heads, or left out")));
        }
    }
    let q_rank = file.optional_size("q_lora_rank")?;
    let mscale_all_dim = file.scaling_number(MSCALE)?.unwrap_or(0.0);
    let scaling = rope.map_or(Scaling::None, |rope| rope.scaling);
    let scale = scale(file, scaling, head_dim, mscale_all_dim)?;
    let mscale_all_dim = if scale.is_some() { mscale_all_dim } else { 0.0 };
    let latent = Some(LatentConfig { q_rank, kv_rank, rope_head_dim, value_head_dim, mscale_all_dim });
    Ok(AttentionConfig { head_dim, rope, scale, latent, ..heads })
}

/// The factor on the logits, if the rotary embedding changes it.
fn scale(
    file: &HfConfig<'_>,
    scaling: Scaling,
    head_dim: usize,
    mscale_all_dim: f64,
) -> Result<Option<f64>, ModelError> {
    match scaling {
        _ if mscale_all_dim == 0.0 => Ok(None),
        Scaling::None => Ok(None),
        Scaling::Yarn { factor, .. } => {
            let grown = if factor <= 1.0 { 1.0 } else { 0.1 * mscale_all_dim * factor.ln() + 1.0 };
            Ok(Some(1.0 / (head_dim as f64).sqrt() * grown * grown))
        }
        _ => {
            let expected =
                "its field `mscale_all_dim` is computed for the rope_type \"yarn\" only: leave it out";
            Err(file.error("rope_scaling", expected))
        }
    }
}

/// Whether neighbors rotate as a pair, as they do unless the file says otherwise.
pub(super) fn interleaved(file: &HfConfig<'_>, rope: Rope) -> Result<Rope, ModelError> {
    Ok(Rope { interleaved: file.flag_or_set("rope_interleave")?, ..rope })
}

/// The inverse of [`read`].
pub(super) fn write(config: &ModelConfig, json: &mut Value) {
    let Some(layer) = config.attention_layers().next() else { return };
    let latent = layer.latent.unwrap_or_else(|| of_heads(layer));
    let LatentConfig { q_rank, kv_rank, rope_head_dim, value_head_dim, mscale_all_dim } = latent;
    remove_fields(json, &["head_dim"]);
    for (key, value) in [
        ("num_key_value_heads", json!(layer.num_heads)),
        ("q_lora_rank", json!(q_rank)),
        ("kv_lora_rank", json!(kv_rank)),
        ("qk_nope_head_dim", json!(layer.head_dim.saturating_sub(rope_head_dim))),
        ("qk_rope_head_dim", json!(rope_head_dim)),
        ("v_head_dim", json!(value_head_dim)),
        ("attention_bias", json!(false)),
    ] {
        json[key] = value;
    }
    if mscale_all_dim != 0.0 {
        json["rope_scaling"][MSCALE] = json!(mscale_all_dim);
    }
}

/// Sizes for a description that is not of latent attention.
fn of_heads(layer: &AttentionConfig) -> LatentConfig {
    let half = (layer.head_dim / 2).max(2);
    let (q_rank, kv_rank) = (Some(3 * half), 2 * half);
    LatentConfig { q_rank, kv_rank, rope_head_dim: half, value_head_dim: half, mscale_all_dim: 0.0 }
}
