//! Phi-1 (arXiv 2306.11644), Phi-1.5 and Phi-2: attention and MLP side by side behind one LayerNorm, a part of each head rotates, and
//! biases everywhere, also in the output projection.

use crate::families::read::remove_fields;
use crate::families::{
    DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, ParallelDecoderLayer,
    Sizes,
};
use crate::nn::{AttentionConfig, AttentionProjections, BranchNorms, MlpProjections, QkNorm};
use serde_json::{Value, json};
use ulysses_kernels::glu::Activation;

pub(in crate::families) static PHI: Family = Family {
    model_type: "phi",
    class: "PhiForCausalLM",
    names: ModelNames { norm: "model.final_layernorm", ..ModelNames::LLAMA },
    read,
    write,
    block: |config, index| Box::new(ParallelDecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("phi-1", 1_418_270_720, 2048, || published([2048, 24, 32, 32, 8192], 0.5)),
        KnownModel::new("phi-1_5", 1_418_270_720, 2048, || published([2048, 24, 32, 32, 8192], 0.5)),
        KnownModel::new("phi-2", 2_779_683_840, 2048, || published([2560, 32, 32, 32, 10_240], 0.4)),
    ],
};

const PARTS: DecoderParts = DecoderParts {
    mlp_norms: BranchNorms { before: None, after: None },
    attention: AttentionProjections {
        o: "self_attn.dense",
        qk_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
        ..AttentionProjections::LLAMA
    },
    mlp: MlpProjections::Plain(["mlp.fc1", "mlp.fc2"]),
    activation: Activation::GeluTanh,
    ..DecoderParts::LLAMA
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "gelu_new")?;
    let heads = file.heads()?;
    if heads.num_heads * heads.head_dim != file.size("hidden_size")? {
        return Err(file.error("num_attention_heads", "it must divide hidden_size, and head_dim be left out"));
    }
    let rope = Some(file.partial_rope(10_000.0, 0.5)?);
    let qk_norm = file.flag("qk_layernorm")?.then_some(QkNorm::Head);
    let config = file.decoder(&PHI, AttentionConfig { rope, qk_norm, ..heads }, 1e-5)?;
    Ok(with_biases(ModelConfig { rms_norm_eps: file.eps("layer_norm_eps", 1e-5)?, ..config }))
}

fn write(config: &ModelConfig, json: &mut Value) {
    remove_fields(json, &["rms_norm_eps", "head_dim"]);
    json["hidden_act"] = json!("gelu_new");
    json["layer_norm_eps"] = json!(config.rms_norm_eps);
    json["partial_rotary_factor"] = json!(config.rope().map(|rope| rope.partial_rotary_factor));
    json["qk_layernorm"] =
        json!(config.attention_layers().next().is_some_and(|layer| layer.qk_norm.is_some()));
}

fn with_biases(config: ModelConfig) -> ModelConfig {
    let config = config.with_attention(|layer| (layer.qkv_bias, layer.o_bias) = (true, true));
    ModelConfig { centered_norms: true, norm_bias: true, mlp_bias: true, head_bias: true, ..config }
}

fn published(sizes: Sizes, partial_rotary_factor: f64) -> ModelConfig {
    let config = ModelConfig::with_sizes(&PHI, sizes)
        .with_rope(|rope| rope.partial_rotary_factor = partial_rotary_factor);
    with_biases(ModelConfig { vocab_size: 51_200, ..config })
}
