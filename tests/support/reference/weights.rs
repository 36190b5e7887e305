//! Configuration, parameter names and shapes, and weights.

use super::families::{Family, NUM_POSITIONS};
use super::{kimi_delta, latent_attention, linear_attention, mamba2, short_conv};
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors by Hugging Face name.
pub type Tensors = BTreeMap<String, Tensor>;
/// Trainable f64 parameters by Hugging Face name.
pub type Weights = BTreeMap<String, Var>;

/// The parameter of this name.
pub fn weight<'a>(weights: &'a Weights, name: &str) -> Result<&'a Var> {
    weights.get(name).with_context(|| format!("no weight {name}"))
}

/// The shape of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceConfig {
    pub family: Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// The part of a head that rotates, as in GLM-4 and Phi-4 mini.
    pub partial_rotary_factor: f64,
    pub rms_norm_eps: f64,
    pub tie_word_embeddings: bool,
    /// Biases on q, k and v, as in Qwen2; in LFM2, of the convolutions; in hybrids, of Mamba 2, and of MLPs in Nemotron-H.
    pub qkv_bias: bool,
    /// Norms over each head of q and k, as in Qwen3.
    pub qk_norm: bool,
    /// Size of the sliding attention window, as in Mistral.
    pub sliding_window: Option<usize>,
}

/// Scaling of the rotary embedding, with the names of Hugging Face's `rope_scaling`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    Default,
    Linear {
        factor: f64,
    },
    /// The first pairs rotate, those of Gemma 4.
    Proportional {
        part: f64,
    },
    Dynamic {
        factor: f64,
        max_position_embeddings: usize,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original: usize,
    },
    /// With the paper's `beta_fast` 32, `beta_slow` 1 and attention factor.
    Yarn {
        factor: f64,
        original: usize,
    },
    LongRope {
        short_factor: &'static [f64],
        long_factor: &'static [f64],
        attention_factor: f64,
        original: usize,
    },
}

/// The fields of a Hugging Face `config.json` that this model needs.
#[derive(Deserialize)]
struct HuggingFaceConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    rms_norm_eps: f64,
    tie_word_embeddings: bool,
    rope_parameters: RopeParameters,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: f64,
}

impl ReferenceConfig {
    /// Reads the `config.json` that `save_pretrained` of transformers 5 writes.
    pub fn from_hugging_face(path: &Path) -> Result<Self> {
        let json = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let hf: HuggingFaceConfig =
            serde_json::from_str(&json).with_context(|| path.display().to_string())?;
        Ok(Self {
            family: Family::Llama,
            vocab_size: hf.vocab_size,
            hidden_size: hf.hidden_size,
            intermediate_size: hf.intermediate_size,
            num_layers: hf.num_hidden_layers,
            num_heads: hf.num_attention_heads,
            num_kv_heads: hf.num_key_value_heads,
            head_dim: hf.head_dim,
            rope_theta: hf.rope_parameters.rope_theta,
            rope_scaling: RopeScaling::Default,
            partial_rotary_factor: 1.0,
            rms_norm_eps: hf.rms_norm_eps,
            tie_word_embeddings: hf.tie_word_embeddings,
            qkv_bias: false,
            qk_norm: false,
            sliding_window: None,
        })
    }

    /// Every parameter's name and shape; matrices are `[out, in]`, those of GPT-2's layers `[in, out]`.
    pub fn parameter_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let (hidden, intermediate) = (self.hidden_size, self.intermediate_size);
        let mut shapes = BTreeMap::new();
        let (outer, block) = (self.family.outer_names(), self.family.block_names());
        shapes.insert(format!("{}.weight", outer.embedding), vec![self.vocab_size, hidden]);
        if self.family == Family::Gpt2 {
            shapes.insert("transformer.wpe.weight".to_owned(), vec![NUM_POSITIONS, hidden]);
        }
        for layer in 0..self.num_layers {
            let own = self.of_layer(layer);
            let q_size = self.num_heads * own.head_dim;
            let kv_size = own.num_kv_heads * own.head_dim;
            let mut add_bias = |part: &str, size: usize| {
                shapes.insert(format!("{}.{layer}.{part}.bias", block.layers), vec![size]);
            };
            if self.family.has_norm_bias() {
                self.family.norms().into_iter().flatten().for_each(|norm| add_bias(norm, hidden));
                let of_heads = own.qk_norm_sizes().filter(|_| self.has_attention(layer));
                of_heads
                    .into_iter()
                    .flatten()
                    .zip(block.qk_norms)
                    .for_each(|(size, norm)| add_bias(norm, size));
            }
            match block.qkv.filter(|_| self.all_biases()) {
                Some(qkv) => add_bias(qkv, q_size + 2 * kv_size),
                None if self.has_qkv_bias() => {
                    for (part, size) in [("q", q_size), ("k", kv_size), ("v", kv_size)] {
                        add_bias(&format!("{}.{part}_proj", block.attention), size);
                    }
                }
                None => {}
            }
            if self.all_biases() {
                add_bias(block.o, hidden);
            }
            if self.mlp_bias() && self.has_mlp(layer) {
                match block.plain_mlp {
                    Some([first, second]) => {
                        add_bias(first, intermediate);
                        add_bias(second, hidden);
                    }
                    None => {
                        add_bias("mlp.gate_proj", intermediate);
                        add_bias("mlp.up_proj", intermediate);
                        add_bias("mlp.down_proj", hidden);
                    }
                }
            }
            if self.family == Family::Gemma4 {
                shapes.insert(layer_scalar(layer), vec![1]);
            }
            if self.family == Family::GptOss {
                shapes.insert(sinks_name(layer), vec![self.num_heads]);
            }
            let mut add = |part: &str, mut shape: Vec<usize>| {
                // GPT-2's are `[in, out]`.
                if self.family == Family::Gpt2 {
                    shape.reverse();
                }
                shapes.insert(format!("{}.{layer}.{part}.weight", block.layers), shape);
            };
            if let Some([q_norm, k_norm]) = own.qk_norm_sizes().filter(|_| self.has_attention(layer)) {
                add(block.qk_norms[0], vec![q_norm]);
                add(block.qk_norms[1], vec![k_norm]);
            }
            self.family.norms().into_iter().flatten().for_each(|norm| add(norm, vec![hidden]));
            if let Some(qkv) = block.qkv {
                add(qkv, vec![q_size + 2 * kv_size, hidden]);
            } else if self.has_attention(layer) && !self.family.is_latent() {
                let gated = if self.family.has_delta_net() { 2 } else { 1 };
                add(&format!("{}.q_proj", block.attention), vec![gated * q_size, hidden]);
                add(&format!("{}.k_proj", block.attention), vec![kv_size, hidden]);
                if !self.is_global(layer) {
                    add(&format!("{}.v_proj", block.attention), vec![kv_size, hidden]);
                }
            }
            if self.has_attention(layer) && !self.family.is_latent() {
                add(block.o, vec![hidden, q_size]);
            }
            let mlp = match (block.plain_mlp, block.fused_gate_up) {
                _ if !self.has_mlp(layer) => vec![],
                (Some([first, second]), _) => {
                    vec![(first, [intermediate, hidden]), (second, [hidden, intermediate])]
                }
                (None, Some(gate_up)) => {
                    vec![(gate_up, [2 * intermediate, hidden]), (block.gated_mlp[2], [hidden, intermediate])]
                }
                (None, None) => {
                    let [gate, up, down] = block.gated_mlp;
                    let inner = [gate, up].map(|name| (name, [intermediate, hidden]));
                    inner.into_iter().chain([(down, [hidden, intermediate])]).collect()
                }
            };
            mlp.into_iter().for_each(|(name, shape)| add(name, shape.to_vec()));
            let (module, parts) = match (self.is_linear(layer), self.is_conv(layer)) {
                (true, _) if self.family == Family::KimiLinear => {
                    (block.attention, kimi_delta::parameter_shapes(hidden))
                }
                (true, _) => ("linear_attn", linear_attention::parameter_shapes(self)),
                (_, true) => ("conv", short_conv::parameter_shapes(hidden, self.conv_bias())),
                _ if self.family.is_latent() => (block.attention, latent_attention::parameter_shapes(self)),
                _ if self.is_mamba(layer) => (block.mamba, mamba2::parameter_shapes(self)),
                _ => continue,
            };
            for (part, shape) in parts {
                shapes.insert(format!("{}.{layer}.{module}.{part}", block.layers), shape);
            }
        }
        shapes.insert(format!("{}.weight", outer.norm), vec![hidden]);
        if self.family.has_norm_bias() {
            shapes.insert(format!("{}.bias", outer.norm), vec![hidden]);
        }
        if self.family.has_head_bias() {
            shapes.insert(format!("{}.bias", outer.head), vec![self.vocab_size]);
        }
        if !self.tie_word_embeddings {
            shapes.insert(format!("{}.weight", outer.head), vec![self.vocab_size, hidden]);
        }
        shapes
    }
}

/// The constant factor on a layer of Gemma 4.
pub fn layer_scalar(layer: usize) -> String {
    format!("model.layers.{layer}.layer_scalar")
}

/// Whether a weight is never trained.
pub fn is_constant(name: &str) -> bool {
    name.ends_with("layer_scalar")
}

/// The sinks of a layer of gpt-oss.
pub fn sinks_name(layer: usize) -> String {
    format!("model.layers.{layer}.self_attn.sinks")
}

/// Returns weights large enough that any error affects the loss and every gradient.
///
/// With the usual standard deviation of 0.02 attention is nearly uniform and the
/// logits nearly zero, so rounding would hide swapped heads or a wrong mask.
/// Here activations, attention scores and logits are of order 1. All values are
/// f32 numbers, so a model in f32 starts from exactly the same ones.
pub fn random_weights(config: &ReferenceConfig, seed: u64) -> Result<Weights> {
    const STRENGTH: f64 = 1.25;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let random_tensor = |(name, shape): (String, Vec<usize>)| {
        let num_elements: usize = shape.iter().product();
        let fan_in = shape[shape.len() - 1] as f64;
        let mut element = || match (shape.len(), name.as_str()) {
            (1, name) if name.ends_with("bias") => rng.random_range(-0.7..0.7),
            (1, name) if is_constant(name) => rng.random_range(0.5..1.5),
            (1, name) if name.ends_with("sinks") => rng.random_range(-1.0..2.0),
            (_, name) if name.ends_with("A_log") => rng.random_range(-2.0..0.5),
            (1, name) if name.ends_with("linear_attn.norm.weight") => 1.0 + rng.random_range(-0.3..0.3),
            (1, _) => 1.0 - config.family.norm_offset() + rng.random_range(-0.3..0.3),
            // Looked up, not multiplied: the rows themselves are of order 1. A tied
            // embedding is the head as well, so it takes the scale of a matrix.
            (
                _,
                "model.embed_tokens.weight"
                | "gpt_neox.embed_in.weight"
                | "transformer.wte.weight"
                | "backbone.embeddings.weight",
            ) if !config.tie_word_embeddings => standard_normal(&mut rng),
            _ => STRENGTH / fan_in.sqrt() * standard_normal(&mut rng),
        };
        let elements: Vec<f64> = (0..num_elements).map(|_| f64::from(element() as f32)).collect();
        Ok((name.clone(), Var::from_vec(elements, shape.as_slice(), &Device::Cpu)?))
    };
    config.parameter_shapes().into_iter().map(random_tensor).collect()
}

/// Box–Muller.
fn standard_normal(rng: &mut impl Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
}

/// Reads a safetensors file without conversion.
pub fn load_tensors(path: &Path) -> Result<Tensors> {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu);
    Ok(tensors.with_context(|| path.display().to_string())?.into_iter().collect())
}

/// Reads the weights of a model from a safetensors file of any float type.
pub fn load_weights(config: &ReferenceConfig, path: &Path) -> Result<Weights> {
    weights_from(config, &load_tensors(path)?)
}

/// Returns trainable f64 copies of tensors, which must match `config` exactly.
pub fn weights_from(config: &ReferenceConfig, tensors: &Tensors) -> Result<Weights> {
    let shapes: BTreeMap<_, _> =
        tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec())).collect();
    let expected = config.parameter_shapes();
    ensure!(shapes == expected, "parameters {shapes:?} do not match the configuration's {expected:?}");
    let variable = |(name, tensor): (&String, &Tensor)| {
        Ok((name.clone(), Var::from_tensor(&tensor.to_dtype(DType::F64)?.copy()?)?))
    };
    tensors.iter().map(variable).collect()
}

/// Returns the weights as plain tensors, for comparison and conversion.
pub fn as_tensors(weights: &Weights) -> Tensors {
    weights.iter().map(|(name, weight)| (name.clone(), weight.as_detached_tensor())).collect()
}
