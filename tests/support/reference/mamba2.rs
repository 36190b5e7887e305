//! Mamba 2 (arXiv 2405.21060), token by token, in the letters of the paper.

use super::batch::document_ids;
use super::families::Family;
use super::linear_attention::{convolution, sigmoid};
use super::weights::{ReferenceConfig, Weights, weight};
use anyhow::Result;
use candle_core::{DType, Device, Tensor};

/// Heads.
pub const HEADS: usize = 4;

/// Elements of a head.
pub const HEAD_DIM: usize = 12;

/// Elements of B and of C.
pub const STATE: usize = 5;

/// Tokens that the convolution reads.
pub const CONV_WIDTH: usize = 4;

/// Bounds of the time steps, which clamp some.
const TIME_STEP_LIMITS: [f64; 2] = [0.3, 1.4];

/// Those of a model: Nemotron-H has the lower one alone.
pub fn time_step_limits(config: &ReferenceConfig) -> [f64; 2] {
    let [least, most] = TIME_STEP_LIMITS;
    [least, if config.family == Family::NemotronH { f64::INFINITY } else { most }]
}

/// Elements of all heads.
const INNER: usize = HEADS * HEAD_DIM;

/// Names below the module, and shapes.
pub fn parameter_shapes(config: &ReferenceConfig) -> Vec<(&'static str, Vec<usize>)> {
    let hidden = config.hidden_size;
    let channels = INNER + 2 * config.mamba_groups() * STATE;
    let rows = INNER + channels + HEADS;
    let biases = [("in_proj.bias", vec![rows]), ("out_proj.bias", vec![hidden])];
    let weights = [
        ("in_proj.weight", vec![rows, hidden]),
        ("conv1d.weight", vec![channels, 1, CONV_WIDTH]),
        ("conv1d.bias", vec![channels]),
        ("dt_bias", vec![HEADS]),
        ("A_log", vec![HEADS]),
        ("D", vec![HEADS]),
        ("norm.weight", vec![INNER]),
        ("out_proj.weight", vec![hidden, INNER]),
    ];
    weights.into_iter().chain(biases.into_iter().filter(|_| config.mamba_biases())).collect()
}

/// The output `[S, E]` of a layer's Mamba 2 for the normalized input `h`. `module`: before the names of its parameters.
pub fn mamba2(
    config: &ReferenceConfig,
    weights: &Weights,
    module: &str,
    h: &Tensor,
    position_ids: &[u32],
) -> Result<Tensor> {
    let get = |name: &str| weight(weights, &format!("{module}.{name}"));
    let project = |x: &Tensor, name: &str| {
        let y = x.matmul(&get(&format!("{name}.weight"))?.t()?)?;
        anyhow::Ok(match config.mamba_biases() {
            true => y.broadcast_add(get(&format!("{name}.bias"))?)?,
            false => y,
        })
    };
    let groups = config.mamba_groups();
    let documents = document_ids(position_ids);
    let (seq_len, keys) = (documents.len(), groups * STATE);

    let all = project(h, "in_proj")?;
    let gate = all.narrow(1, 0, INNER)?;
    let xbc = all.narrow(1, INNER, INNER + 2 * keys)?;
    let time = all.narrow(1, 2 * INNER + 2 * keys, HEADS)?;
    let sums = convolution(&xbc, get("conv1d.weight")?, &documents)?.broadcast_add(get("conv1d.bias")?)?;
    let xbc = (&sums * sigmoid(&sums)?)?;
    let x = xbc.narrow(1, 0, INNER)?.reshape((seq_len, HEADS, HEAD_DIM))?;
    // Neighboring heads share B and C.
    let of_head: Vec<u32> = (0..HEADS).map(|head| (head * groups / HEADS) as u32).collect();
    let of_head = Tensor::new(of_head, &Device::Cpu)?;
    let per_head = |start: usize| {
        anyhow::Ok(xbc.narrow(1, start, keys)?.reshape((seq_len, groups, STATE))?.index_select(&of_head, 1)?)
    };
    let (b, c) = (per_head(INNER)?, per_head(INNER + keys)?); // [S, H, N]
    let [least, most] = time_step_limits(config);
    let step = (time.broadcast_add(get("dt_bias")?)?.exp()? + 1.0)?.log()?.clamp(least, most)?; // [S, H]
    let decay = step.broadcast_mul(&get("A_log")?.exp()?)?.neg()?.exp()?;

    let mut outputs = Vec::new();
    let zeros = Tensor::zeros((HEADS, HEAD_DIM, STATE), DType::F64, &Device::Cpu)?;
    let mut state = zeros.clone();
    for token in 0..seq_len {
        if token > 0 && documents[token] != documents[token - 1] {
            state = zeros.clone();
        }
        let of_token = |x: &Tensor| x.narrow(0, token, 1)?.squeeze(0);
        let x = of_token(&x)?; // [H, P]
        let input = x.broadcast_mul(&of_token(&step)?.unsqueeze(1)?)?.unsqueeze(2)?; // [H, P, 1]
        state = (state.broadcast_mul(&of_token(&decay)?.reshape((HEADS, 1, 1))?)?
            + input.broadcast_mul(&of_token(&b)?.unsqueeze(1)?)?)?;
        let read = state.broadcast_mul(&of_token(&c)?.unsqueeze(1)?)?.sum(2)?; // [H, P]
        outputs.push((read + x.broadcast_mul(&get("D")?.unsqueeze(1)?)?)?);
    }
    let y = Tensor::stack(&outputs, 0)?.reshape((seq_len, INNER))?;
    let gated = (y * (&gate * sigmoid(&gate)?)?)?;
    let by_group = gated.reshape((seq_len, groups, INNER / groups))?;
    let mean_square = (by_group.sqr()?.sum_keepdim(2)? / (INNER / groups) as f64)?;
    let normed = by_group.broadcast_div(&(mean_square + config.rms_norm_eps)?.sqrt()?)?;
    project(&normed.reshape((seq_len, INNER))?.broadcast_mul(get("norm.weight")?)?, "out_proj")
}
