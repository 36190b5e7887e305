//! Kimi Linear (Moonshot AI, arXiv 2510.26692), of layers without experts: linear attention with decays per channel, and in some
//! layers latent attention without positions.

use super::latent;
use super::read::{MUST_BE_GIVEN, remove_fields, write_layer_types};
use super::{DecoderLayer, Family, HfConfig, ModelConfig, ModelError, ModelNames};
use crate::nn::{LinearAttentionConfig, LinearAttentionKind};
use serde_json::{Value, json};

pub(super) static KIMI_LINEAR: Family = Family {
    model_type: "kimi_linear",
    class: "KimiLinearForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[],
};

const LINEAR: &str = "linear_attention";
const MLPS: &str = "mlp_layer_types";

/// The linear attention of the published model.
const LINEAR_ATTENTION: LinearAttentionConfig = LinearAttentionConfig {
    num_key_heads: 32,
    num_value_heads: 32,
    key_head_dim: 128,
    value_head_dim: 128,
    conv_width: 4,
    kind: LinearAttentionKind::KimiDelta,
};

/// Fields of experts, which these models do not have, and the longest sequence, by both names.
const WITHOUT_EFFECT: [&str; 11] = [
    "max_position_embeddings",
    "model_max_length",
    "moe_intermediate_size",
    "moe_renormalize",
    "num_expert_group",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "output_router_logits",
    "routed_scaling_factor",
    "topk_group",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    check_mlps(file)?;
    file.accept(&WITHOUT_EFFECT);
    let attention = latent::read(file, None, file.size("v_head_dim")?)?;
    let config = file.decoder(&KIMI_LINEAR, attention, 1e-5)?;
    let size = |key, default| Ok::<_, ModelError>(file.optional_size(key)?.unwrap_or(default));
    let heads = size("linear_num_heads", LINEAR_ATTENTION.num_value_heads)?;
    let head_dim = size("linear_head_dim", LINEAR_ATTENTION.value_head_dim)?;
    let linear = LinearAttentionConfig {
        num_key_heads: heads,
        num_value_heads: heads,
        key_head_dim: head_dim,
        value_head_dim: head_dim,
        conv_width: size("linear_conv_kernel_dim", LINEAR_ATTENTION.conv_width)?,
        kind: LinearAttentionKind::KimiDelta,
    };
    // As in transformers: every fourth layer from the fifth on has attention.
    let by_default =
        || (0..config.num_layers()).map(|layer| layer == 0 || !layer.is_multiple_of(4)).collect();
    let is_linear = file.layers_of_type(&[LINEAR], config.num_layers())?.unwrap_or_else(by_default);
    Ok(config.with_mixer(is_linear, linear))
}

/// Refuses experts.
fn check_mlps(file: &HfConfig<'_>) -> Result<(), ModelError> {
    let expected = "this version has no experts: it must be a list of \"dense\", for all layers";
    let Some(mlps) = file.get(MLPS) else {
        return Err(file.error(MLPS, &format!("{MUST_BE_GIVEN}; {expected}")));
    };
    let num_layers = file.num_layers("num_hidden_layers")?;
    match mlps.as_array() {
        Some(mlps) if mlps.len() == num_layers && mlps.iter().all(|mlp| mlp == "dense") => Ok(()),
        _ => Err(file.error(MLPS, expected)),
    }
}

fn write(config: &ModelConfig, json: &mut Value) {
    latent::write(config, json);
    remove_fields(json, &["rope_theta"]);
    write_layer_types(config, json, LINEAR);
    json[MLPS] = vec!["dense"; config.num_layers()].into();
    let linear = config.linear_layers().next().unwrap_or(&LINEAR_ATTENTION);
    json["linear_num_heads"] = json!(linear.num_value_heads);
    json["linear_head_dim"] = json!(linear.value_head_dim);
    json["linear_conv_kernel_dim"] = json!(linear.conv_width);
}
