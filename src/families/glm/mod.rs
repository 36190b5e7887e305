//! GLM-4: neighboring elements rotate as pairs, by default those of the first half of each head; gate and up projection are one
//! parameter; biases on queries, keys and values in some models. The second version has norms after the modules as well.

use super::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionConfig, BranchNorms, MlpProjections};
use serde_json::{Value, json};

pub(super) static GLM: Family = Family {
    model_type: "glm",
    class: "GlmForCausalLM",
    names: ModelNames::LLAMA,
    read: |file| read(file, &GLM),
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, GLM_PARTS)),
    models: &[KnownModel::new("glm-4-9b-chat-hf", 9_399_951_360, 131_072, || {
        let config =
            published(&GLM, [4096, 40, 32, 2, 13696], true).with_rope(|rope| rope.theta = 5_000_000.0);
        ModelConfig { rms_norm_eps: DEFAULT_EPS, ..config }
    })],
};

pub(super) static GLM4: Family = Family {
    model_type: "glm4",
    class: "Glm4ForCausalLM",
    names: ModelNames::LLAMA,
    read: |file| read(file, &GLM4),
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, GLM4_PARTS)),
    models: &[
        KnownModel::new("GLM-4-9B-0414", 9_400_094_720, 32_768, || {
            published(&GLM4, [4096, 40, 32, 2, 13696], false)
        }),
        KnownModel::new("GLM-4-32B-0414", 32_566_081_536, 32_768, || {
            published(&GLM4, [6144, 61, 48, 2, 23040], false)
        }),
    ],
};

const GLM_PARTS: DecoderParts = DecoderParts { mlp: MlpProjections::FUSED, ..DecoderParts::LLAMA };

const GLM4_PARTS: DecoderParts = DecoderParts {
    attention_norms: BranchNorms { before: Some("input_layernorm"), after: Some("post_self_attn_layernorm") },
    mlp_norms: BranchNorms { before: Some("post_attention_layernorm"), after: Some("post_mlp_layernorm") },
    ..GLM_PARTS
};

const DEFAULT_EPS: f64 = 1.5625e-7;

fn read(file: &HfConfig<'_>, family: &'static Family) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    file.require_kv_heads()?;
    let mut rope = file.partial_rope(10_000.0, 0.5)?;
    rope.interleaved = true;
    let qkv_bias = file.flag_or_set("attention_bias")?;
    let layer = AttentionConfig { rope: Some(rope), qkv_bias, ..file.heads_with_head_dim(128)? };
    let config = file.decoder(family, layer, DEFAULT_EPS)?;
    file.check_full_attention(&config)?;
    Ok(config)
}

fn write(config: &ModelConfig, json: &mut Value) {
    json["partial_rotary_factor"] = json!(config.rope().map(|rope| rope.partial_rotary_factor));
    json["attention_bias"] = json!(config.attention_layers().next().is_some_and(|layer| layer.qkv_bias));
}

fn published(family: &'static Family, sizes: Sizes, qkv_bias: bool) -> ModelConfig {
    let config = ModelConfig::with_sizes(family, sizes)
        .with_attention(|layer| (layer.head_dim, layer.qkv_bias) = (128, qkv_bias))
        .with_rope(|rope| (rope.partial_rotary_factor, rope.interleaved) = (0.5, true));
    ModelConfig { vocab_size: 151_552, ..config }
}
