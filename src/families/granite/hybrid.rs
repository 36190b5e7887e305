//! Granite 4, its dense hybrids: Mamba 2 in most layers and attention in the others, mostly without a position embedding, with
//! Granite's constant factors.

use super::{multipliers, write_multipliers};
use crate::families::read::{remove_fields, write_time_step_limits};
use crate::families::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames,
    Multipliers, Sizes,
};
use crate::nn::{
    AttentionConfig, Init, LinearAttentionConfig, LinearAttentionKind, Mamba2Config, MlpProjections,
};
use serde_json::{Value, json};

pub(in crate::families) static GRANITE_HYBRID: Family = Family {
    model_type: "granitemoehybrid",
    class: "GraniteMoeHybridForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("granite-4.0-h-350m", 340_332_224, 32_768, || {
            let factors = [1.0 / 64.0, 0.246, 3.0];
            published([768, 32, 12, 4, 2048], 32, &[10, 13, 17, 27], factors)
        }),
        // Residual and logits factor are those of its relatives, and enter no plan.
        KnownModel::new("granite-4.0-h-1b", 1_461_538_368, 131_072, || {
            let factors = [1.0 / 128.0, 0.22, 6.0];
            published([1536, 40, 12, 4, 4096], 64, &[5, 15, 25, 35], factors)
        }),
    ],
};

const PARTS: DecoderParts = DecoderParts {
    mlp: MlpProjections::FusedGated(["shared_mlp.input_linear", "shared_mlp.output_linear"]),
    ..DecoderParts::LLAMA
};

/// Names of both kinds of layers, in published files and in those of transformers 5.
const MAMBA: [&str; 2] = ["mamba", "linear_attention"];
const ATTENTION: &str = "attention";

/// Fields of experts, which these models do not have, and of kernels and training.
const WITHOUT_EFFECT: [&str; 6] = [
    "init_method",
    "intermediate_size",
    "mamba_chunk_size",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.check_activation("normalization_function", "rmsnorm")?;
    if file.optional_size("num_local_experts")? != Some(0) {
        return Err(file.error("num_local_experts", "this version has no experts: it must be 0"));
    }
    file.accept(&WITHOUT_EFFECT);
    const POSITIONS: &str = "position_embedding_type";
    file.accept_rope();
    let rope = match file.get(POSITIONS).map(Value::as_str) {
        None | Some(Some("nope")) => None,
        Some(Some("rope")) => Some(file.rope()?),
        _ => return Err(file.error(POSITIONS, "this version has \"rope\", or \"nope\" for none")),
    };
    let (multipliers, scale) = multipliers(file)?;
    let layer = AttentionConfig { rope, scale: Some(scale), ..file.heads()? };
    let num_layers = file.num_layers("num_hidden_layers")?;
    let [hidden_size, intermediate_size] =
        [file.size("hidden_size")?, file.size("shared_intermediate_size")?];
    let sizes = [hidden_size, num_layers, layer.num_heads, layer.num_kv_heads, intermediate_size];
    let is_mamba = file.layers_of_type(&MAMBA, num_layers)?.unwrap_or(vec![true; num_layers]);
    let mamba = mamba(file, hidden_size, is_mamba.contains(&true))?;
    let config = ModelConfig::with_sizes(&GRANITE_HYBRID, sizes)
        .with_attention(|attention| *attention = layer)
        .with_mixer(is_mamba, mamba);
    Ok(ModelConfig {
        vocab_size: file.size("vocab_size")?,
        rms_norm_eps: file.number("rms_norm_eps", 1e-6)?,
        initializer_range: file.number("initializer_range", 0.02)?,
        tie_word_embeddings: file.flag("tie_word_embeddings")?,
        multipliers,
        ..config
    })
}

fn mamba(
    file: &HfConfig<'_>,
    hidden_size: usize,
    is_used: bool,
) -> Result<LinearAttentionConfig, ModelError> {
    const HEAD_DIM: &str = "mamba_d_head";
    let size = |key, default| Ok::<_, ModelError>(file.optional_size(key)?.unwrap_or(default));
    let heads = size("mamba_n_heads", 128)?;
    let width = size("mamba_expand", 2)?.saturating_mul(hidden_size);
    let head_dim = match file.get(HEAD_DIM) {
        None => width / heads.max(1),
        Some(automatic) if automatic == "auto" => width / heads.max(1),
        Some(_) => file.size(HEAD_DIM)?,
    };
    if is_used && heads.saturating_mul(head_dim) != width {
        let expected =
            format!("times mamba_n_heads = {heads} it must be mamba_expand · hidden_size = {width}");
        return Err(file.error(HEAD_DIM, &expected));
    }
    Ok(LinearAttentionConfig {
        num_key_heads: size("mamba_n_groups", 1)?,
        num_value_heads: heads,
        key_head_dim: size("mamba_d_state", 256)?,
        value_head_dim: head_dim,
        conv_width: size("mamba_d_conv", 4)?,
        kind: LinearAttentionKind::Mamba2(Mamba2Config {
            time_step_limits: file.time_step_limits()?,
            time_step_bias: Init::Ones,
            conv_bias: file.flag_or_set("mamba_conv_bias")?,
            projection_bias: file.flag("mamba_proj_bias")?,
        }),
    })
}

fn published(
    sizes: Sizes,
    head_dim: usize,
    attention: &[usize],
    [scale, residual, logits_scaling]: [f64; 3],
) -> ModelConfig {
    let mamba = LinearAttentionConfig {
        num_key_heads: 1,
        num_value_heads: 48,
        key_head_dim: 128,
        value_head_dim: head_dim,
        conv_width: 4,
        kind: LinearAttentionKind::Mamba2(Mamba2Config {
            time_step_limits: [0.0, f64::INFINITY],
            time_step_bias: Init::Ones,
            conv_bias: true,
            projection_bias: false,
        }),
    };
    let config = ModelConfig::with_sizes(&GRANITE_HYBRID, sizes)
        .with_attention(|layer| (layer.rope, layer.scale) = (None, Some(scale)))
        .with_mixer((0..sizes[1]).map(|layer| !attention.contains(&layer)), mamba);
    let multipliers = Multipliers { embedding: 12.0, residual, logits: 1.0 / logits_scaling };
    ModelConfig { vocab_size: 100_352, tie_word_embeddings: true, multipliers, ..config }
}

fn write(config: &ModelConfig, json: &mut Value) {
    remove_fields(json, &["intermediate_size"]);
    write_multipliers(config, json);
    let layer_type = |is_attention: bool| if is_attention { ATTENTION } else { MAMBA[0] };
    json["layer_types"] = config.layers.iter().map(|layer| layer_type(layer.attention().is_some())).collect();
    json["shared_intermediate_size"] = json!(config.intermediate_size);
    json["num_local_experts"] = json!(0);
    json["num_experts_per_tok"] = json!(0);
    json["position_embedding_type"] = json!(if config.rope().is_some() { "rope" } else { "nope" });
    let Some((linear, mamba)) =
        config.linear_layers().find_map(|linear| linear.mamba2().map(|mamba| (linear, mamba)))
    else {
        return;
    };
    json["mamba_n_groups"] = json!(linear.num_key_heads);
    json["mamba_n_heads"] = json!(linear.num_value_heads);
    json["mamba_d_state"] = json!(linear.key_head_dim);
    json["mamba_d_head"] = json!(linear.value_head_dim);
    json["mamba_d_conv"] = json!(linear.conv_width);
    json["mamba_expand"] = json!(linear.value_dim() / config.hidden_size.max(1));
    json["mamba_conv_bias"] = json!(mamba.conv_bias);
    json["mamba_proj_bias"] = json!(mamba.projection_bias);
    write_time_step_limits(mamba, json);
}
