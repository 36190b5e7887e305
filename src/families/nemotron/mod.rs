//! Nemotron and Minitron (arXiv 2402.16819, 2407.14679; dense): LayerNorm with weights around 0, an MLP without a gate with
//! squared ReLU, and rotation of half of each head. The hybrids that followed are in `hybrid.rs`.

mod hybrid;

pub(super) use hybrid::NEMOTRON_H;

use super::read::remove_fields;
use super::{DecoderLayer, DecoderParts, Family, HfConfig, ModelConfig, ModelError, ModelNames};
use crate::nn::{AttentionConfig, MlpProjections};
use serde_json::{Value, json};
use ulysses_kernels::glu::Activation;

pub(super) static NEMOTRON: Family = Family {
    model_type: "nemotron",
    class: "NemotronForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[],
};

const PARTS: DecoderParts = DecoderParts {
    mlp: MlpProjections::Plain(["mlp.up_proj", "mlp.down_proj"]),
    activation: Activation::SquaredRelu,
    ..DecoderParts::LLAMA
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "relu2")?;
    let bias = file.flag("attention_bias")?;
    let rope = Some(file.partial_rope(10_000.0, 0.5)?);
    let layer = AttentionConfig { rope, qkv_bias: bias, o_bias: bias, ..file.heads()? };
    let config = file.decoder(&NEMOTRON, layer, 1e-5)?;
    file.check_full_attention(&config)?;
    Ok(ModelConfig {
        rms_norm_eps: file.eps("norm_eps", 1e-5)?,
        norm_offset: 1.0,
        centered_norms: true,
        norm_bias: true,
        mlp_bias: file.flag("mlp_bias")?,
        initializer_range: file.number("initializer_range", 0.0134)?,
        ..config
    })
}

fn write(config: &ModelConfig, json: &mut Value) {
    remove_fields(json, &["rms_norm_eps"]);
    json["hidden_act"] = json!("relu2");
    json["norm_eps"] = json!(config.rms_norm_eps);
    json["partial_rotary_factor"] = json!(config.rope().map(|rope| rope.partial_rotary_factor));
    json["attention_bias"] = json!(config.attention_layers().next().is_some_and(|layer| layer.o_bias));
    json["mlp_bias"] = json!(config.mlp_bias);
}
