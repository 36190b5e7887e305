//! Checks of the sizes in a description; errors call it `origin`.

use super::ModelError;
use crate::nn::{AttentionConfig, LatentConfig, LinearAttentionConfig, LinearAttentionKind};
use ulysses_kernels::causal_conv::MAX_WIDTH;

pub(super) fn check_attention(origin: &str, attention: &AttentionConfig) -> Result<(), ModelError> {
    let AttentionConfig { num_heads, num_kv_heads, head_dim, window, rope, scale, softcap, .. } = *attention;
    let error = |key, got: String, expected: String| Err(refused(origin, key, got, expected));
    check_sizes(
        origin,
        &[
            ("num_attention_heads", num_heads, 1 << 12),
            ("num_key_value_heads", num_kv_heads, 1 << 12),
            ("head_dim", head_dim, 1 << 12),
        ],
    )?;
    if rope.is_some() && attention.latent.is_none() && !head_dim.is_multiple_of(2) {
        return error("head_dim", head_dim.to_string(), "rotary embedding needs an even one".into());
    }
    if let Some(latent) = attention.latent {
        check_latent(origin, latent, head_dim)?;
    }
    if let Some(rope) = rope {
        check_number(origin, "rope_theta", rope.theta, 1.0)?;
        let rotating = attention.latent.map_or(head_dim, |latent| latent.rope_head_dim);
        if let Some((argument, value, expected)) = rope.refused(rotating) {
            return error("rope_scaling", format!("{argument} {value}"), format!("it must be {expected}"));
        }
    }
    check_positive(origin, "attention_multiplier", scale)?;
    check_positive(origin, "attn_logit_softcapping", softcap)?;
    if window == Some(0) {
        return error("sliding_window", "0".into(), "a token sees at least itself: from 1, or null".into());
    }
    if !num_heads.is_multiple_of(num_kv_heads) {
        let expected = format!("it must divide num_attention_heads = {num_heads}");
        return error("num_key_value_heads", num_kv_heads.to_string(), expected);
    }
    Ok(())
}

fn check_latent(origin: &str, latent: LatentConfig, head_dim: usize) -> Result<(), ModelError> {
    let LatentConfig { q_rank, kv_rank, rope_head_dim, value_head_dim, .. } = latent;
    check_sizes(
        origin,
        &[
            ("q_lora_rank", q_rank.unwrap_or(1), 1 << 18),
            ("kv_lora_rank", kv_rank, 1 << 18),
            ("qk_rope_head_dim", rope_head_dim, 1 << 12),
            ("qk_nope_head_dim", head_dim.saturating_sub(rope_head_dim), 1 << 12),
            ("v_head_dim", value_head_dim, 1 << 12),
        ],
    )?;
    if !rope_head_dim.is_multiple_of(2) {
        let expected = "rotary embedding needs an even one".to_owned();
        return Err(refused(origin, "qk_rope_head_dim", rope_head_dim.to_string(), expected));
    }
    match value_head_dim <= head_dim {
        true => Ok(()),
        false => {
            let expected = format!("it must be at most qk_nope_head_dim + qk_rope_head_dim = {head_dim}");
            Err(refused(origin, "v_head_dim", value_head_dim.to_string(), expected))
        }
    }
}

pub(super) fn check_linear_attention(origin: &str, linear: &LinearAttentionConfig) -> Result<(), ModelError> {
    let LinearAttentionConfig {
        num_key_heads,
        num_value_heads,
        key_head_dim,
        value_head_dim,
        conv_width,
        ..
    } = *linear;
    let [keys, values, key_dim, value_dim, width] = match linear.kind {
        LinearAttentionKind::GatedDeltaNet => [
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        ],
        LinearAttentionKind::KimiDelta => [
            "linear_num_heads",
            "linear_num_heads",
            "linear_head_dim",
            "linear_head_dim",
            "linear_conv_kernel_dim",
        ],
        LinearAttentionKind::Mamba2(_) => {
            ["mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv"]
        }
    };
    check_sizes(
        origin,
        &[
            (keys, num_key_heads, 1 << 12),
            (values, num_value_heads, 1 << 12),
            (key_dim, key_head_dim, 1 << 12),
            (value_dim, value_head_dim, 1 << 12),
            (width, conv_width, MAX_WIDTH),
        ],
    )?;
    if !num_value_heads.is_multiple_of(num_key_heads) {
        let expected = format!("it must divide {values} = {num_value_heads}");
        return Err(refused(origin, keys, num_key_heads.to_string(), expected));
    }
    match linear.kind {
        LinearAttentionKind::Mamba2(mamba) => {
            let [least, most] = mamba.time_step_limits;
            let expected = "the lower limit must be at most the upper one".to_owned();
            let refused = || refused(origin, "time_step_limit", format!("[{least}, {most}]"), expected);
            if least <= most { Ok(()) } else { Err(refused()) }
        }
        LinearAttentionKind::KimiDelta if num_key_heads != num_value_heads => {
            let expected =
                format!("queries, keys and values have equally many: it must be {num_value_heads}");
            Err(refused(origin, keys, num_key_heads.to_string(), expected))
        }
        LinearAttentionKind::KimiDelta if key_head_dim != value_head_dim => {
            let expected = format!("keys and values are of the same size: it must be {value_head_dim}");
            Err(refused(origin, key_dim, key_head_dim.to_string(), expected))
        }
        LinearAttentionKind::GatedDeltaNet | LinearAttentionKind::KimiDelta => Ok(()),
    }
}

/// Refuses the first size that is not from 1 to its limit.
pub(super) fn check_sizes(origin: &str, sizes: &[(&'static str, usize, usize)]) -> Result<(), ModelError> {
    match sizes.iter().find(|(_, size, limit)| !(1..=*limit).contains(size)) {
        None => Ok(()),
        Some((key, got, limit)) => {
            Err(refused(origin, key, got.to_string(), format!("it must be from 1 to {limit}")))
        }
    }
}

pub(super) fn check_number(
    origin: &str,
    key: &'static str,
    number: f64,
    least: f64,
) -> Result<(), ModelError> {
    if number.is_finite() && number >= least {
        return Ok(());
    }
    Err(refused(origin, key, number.to_string(), format!("it must be at least {least}")))
}

/// Refuses a number of the logits, if there is one, that is not positive.
pub(super) fn check_positive(origin: &str, key: &'static str, number: Option<f64>) -> Result<(), ModelError> {
    match number.filter(|number| !(number.is_finite() && *number > 0.0)) {
        None => Ok(()),
        Some(number) => Err(refused(origin, key, number.to_string(), "it must be positive".to_owned())),
    }
}

pub(super) fn refused(origin: &str, key: &'static str, got: String, expected: String) -> ModelError {
    ModelError::Config { origin: origin.to_owned(), key, got, expected }
}
