//! Angles of the rotary embedding, position by position.

use super::batch::document_ids;
use super::weights::{ReferenceConfig, RopeScaling};
use anyhow::Result;
use candle_core::{Device, Tensor};
use std::f64::consts::PI;

/// cos and sin of `position · inv_freq(i)`, `[S, rotating elements]`, both halves alike as in Hugging Face's Llama.
pub fn rope_tables(config: &ReferenceConfig, theta: f64, position_ids: &[u32]) -> Result<(Tensor, Tensor)> {
    let config = &ReferenceConfig { rope_theta: theta, ..config.clone() };
    let rotary_dim = rotary_dim(config);
    let documents = document_ids(position_ids);
    let mut angles = Vec::with_capacity(position_ids.len() * rotary_dim);
    for (&position, document) in position_ids.iter().zip(&documents) {
        let document_len = documents.iter().filter(|other| *other == document).count();
        for i in 0..rotary_dim {
            angles.push(f64::from(position) * inv_freq(config, i % (rotary_dim / 2), document_len));
        }
    }
    let angles = Tensor::from_vec(angles, (position_ids.len(), rotary_dim), &Device::Cpu)?;
    let factor = match config.rope_scaling {
        RopeScaling::Yarn { factor, .. } => 0.1 * factor.ln() + 1.0,
        RopeScaling::LongRope { attention_factor, .. } => attention_factor,
        _ => 1.0,
    };
    Ok(((angles.cos()? * factor)?, (angles.sin()? * factor)?))
}

/// Elements of a head that rotate.
fn rotary_dim(config: &ReferenceConfig) -> usize {
    (config.head_dim as f64 * config.partial_rotary_factor) as usize
}

/// Radians per position of pair `i`.
fn inv_freq(config: &ReferenceConfig, i: usize, document_len: usize) -> f64 {
    let dim = rotary_dim(config) as f64;
    let power = |base: f64| 1.0 / base.powf(2.0 * i as f64 / dim);
    let plain = power(config.rope_theta);
    match config.rope_scaling {
        RopeScaling::Default => plain,
        RopeScaling::Linear { factor } => plain / factor,
        RopeScaling::Proportional { part } if (i as f64) < part * dim / 2.0 => plain,
        RopeScaling::Proportional { .. } => 0.0,
        RopeScaling::Dynamic { factor, max_position_embeddings } => {
            let max = max_position_embeddings as f64;
            let len = max.max(document_len as f64);
            power(config.rope_theta * (factor * len / max - (factor - 1.0)).powf(dim / (dim - 2.0)))
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
            let original = original as f64;
            let wavelength = 2.0 * PI / plain;
            if wavelength < original / high_freq_factor {
                plain
            } else if wavelength > original / low_freq_factor {
                plain / factor
            } else {
                let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * plain / factor + smooth * plain
            }
        }
        RopeScaling::LongRope { short_factor, long_factor, original, .. } => {
            plain / if document_len > original { long_factor[i] } else { short_factor[i] }
        }
        RopeScaling::Yarn { factor, original } => {
            let dim_of = |rotations: f64| {
                dim * (original as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * config.rope_theta.ln())
            };
            let low = dim_of(32.0).floor().max(0.0);
            let high = dim_of(1.0).ceil().min(dim - 1.0);
            let high = if low == high { high + 0.001 } else { high };
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            plain / factor * ramp + plain * (1.0 - ramp)
        }
    }
}
