//! The gated short convolution of LFM2.

use super::batch::document_ids;
use super::linear_attention::convolution;
use super::weights::{ReferenceConfig, Weights, weight};
use anyhow::Result;
use candle_core::Tensor;

/// Tokens that the convolution reads.
pub const TAPS: usize = 3;

/// Names below `model.layers.N.conv`, and shapes.
pub fn parameter_shapes(hidden: usize, bias: bool) -> Vec<(&'static str, Vec<usize>)> {
    let weights = [
        ("in_proj.weight", vec![3 * hidden, hidden]),
        ("conv.weight", vec![hidden, 1, TAPS]),
        ("out_proj.weight", vec![hidden, hidden]),
    ];
    let biases =
        [("in_proj.bias", vec![3 * hidden]), ("conv.bias", vec![hidden]), ("out_proj.bias", vec![hidden])];
    weights.into_iter().chain(biases.into_iter().filter(|_| bias)).collect()
}

/// The output `[S, E]` of a layer's convolution for the normalized input `h`.
pub fn short_conv(
    config: &ReferenceConfig,
    weights: &Weights,
    layer: usize,
    h: &Tensor,
    position_ids: &[u32],
) -> Result<Tensor> {
    let get = |name: &str| weight(weights, &format!("model.layers.{layer}.conv.{name}"));
    let biased = |y: Tensor, name: &str| match config.conv_bias() {
        true => Ok(y.broadcast_add(get(&format!("{name}.bias"))?)?),
        false => anyhow::Ok(y),
    };
    let project = |x: &Tensor, name: &str| biased(x.matmul(&get(&format!("{name}.weight"))?.t()?)?, name);
    let all = project(h, "in_proj")?;
    let part = |index: usize| all.narrow(1, index * config.hidden_size, config.hidden_size);
    let (b, c, x) = (part(0)?, part(1)?, part(2)?);
    let convolved = convolution(&(b * x)?, get("conv.weight")?, &document_ids(position_ids))?;
    project(&(c * biased(convolved, "conv")?)?, "out_proj")
}
