//! StarCoder 2 (arXiv 2402.19173): Mistral with LayerNorm, biases, and an MLP without a gate.

use super::with_layer_norm;
use crate::families::read::remove_fields;
use crate::families::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionConfig, MlpProjections};
use serde_json::{Value, json};
use ulysses_kernels::glu::Activation;

pub(in crate::families) static STARCODER2: Family = Family {
    model_type: "starcoder2",
    class: "Starcoder2ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("starcoder2-3b", 3_030_371_328, 16_384, || {
            published([3072, 30, 24, 2, 12288], 999_999.442_035_881_3)
        }),
        KnownModel::new("starcoder2-7b", 7_173_923_840, 16_384, || {
            published([4608, 32, 36, 4, 18432], 1_000_000.0)
        }),
        KnownModel::new("starcoder2-15b", 15_957_889_024, 16_384, || {
            let config = published([6144, 40, 48, 4, 24576], 100_000.0);
            ModelConfig { tie_word_embeddings: false, ..config }
        }),
    ],
};

const PARTS: DecoderParts = DecoderParts {
    mlp: MlpProjections::Plain(["mlp.c_fc", "mlp.c_proj"]),
    activation: Activation::GeluTanh,
    ..DecoderParts::LLAMA
};

const ACTIVATION: &str = "gelu_pytorch_tanh";

/// Fields of the published files that transformers does not read.
const UNUSED: [&str; 7] = [
    "activation_function",
    "attention_softmax_in_fp32",
    "layer_norm_epsilon",
    "mlp_type",
    "norm_type",
    "scale_attention_softmax_in_fp32",
    "scale_attn_weights",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", ACTIVATION)?;
    file.accept(&UNUSED);
    file.require_kv_heads()?;
    let bias = file.flag_or_set("use_bias")?;
    let window = file.optional_size("sliding_window")?;
    let layer = AttentionConfig { window, qkv_bias: bias, o_bias: bias, ..file.attention()? };
    let config = ModelConfig {
        rms_norm_eps: file.eps("norm_epsilon", 1e-5)?,
        initializer_range: file.number("initializer_range", 0.018_042)?,
        ..with_layer_norm(file.decoder(&STARCODER2, layer, 1e-5)?)
    };
    Ok(file.tied_by_default(ModelConfig { mlp_bias: bias, ..config }))
}

fn write(config: &ModelConfig, json: &mut Value) {
    remove_fields(json, &["rms_norm_eps"]);
    json["hidden_act"] = json!(ACTIVATION);
    json["norm_epsilon"] = json!(config.rms_norm_eps);
    json["use_bias"] = json!(config.mlp_bias);
    json["sliding_window"] = json!(config.attention_layers().next().and_then(|layer| layer.window));
}

fn published(sizes: Sizes, theta: f64) -> ModelConfig {
    let config = ModelConfig::with_sizes(&STARCODER2, sizes)
        .with_attention(|layer| {
            (layer.head_dim, layer.window, layer.qkv_bias, layer.o_bias) = (128, Some(4096), true, true);
        })
        .with_rope(|rope| rope.theta = theta);
    let config = ModelConfig { vocab_size: 49_152, initializer_range: 0.018_042, ..config };
    ModelConfig { tie_word_embeddings: true, ..with_layer_norm(config) }
}
