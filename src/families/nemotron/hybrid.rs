//! Nemotron-H (arXiv 2504.03624) and Nemotron Nano 2, the dense ones: every layer is one branch, with Mamba 2, attention without a
//! position embedding, or an MLP without a gate.

use super::PARTS;
use crate::families::read::remove_fields;
use crate::families::{
    DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, SingleBranchLayer, Sizes,
};
use crate::nn::{
    AttentionConfig, AttentionProjections, BranchNorms, Init, LinearAttentionConfig, LinearAttentionKind,
    LinearAttentionProjections, Mamba2Config, MixerConfig, MlpProjections, QkvNames,
};
use serde_json::{Value, json};
use ulysses_kernels::causal_conv::MAX_WIDTH;

pub(in crate::families) static NEMOTRON_H: Family = Family {
    model_type: "nemotron_h",
    class: "NemotronHForCausalLM",
    names: ModelNames {
        embedding: "backbone.embeddings.weight",
        layers: "backbone.layers",
        norm: "backbone.norm_f",
        ..ModelNames::LLAMA
    },
    read,
    write,
    block: |config, index| Box::new(SingleBranchLayer::with_parts(config, index, HYBRID)),
    models: &[
        KnownModel::new("Nemotron-H-8B-Base-8K", 8_100_852_736, 8192, || {
            let pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-";
            published([4096, 52, 32, 8, 21_504], 64, pattern)
        }),
        KnownModel::new("NVIDIA-Nemotron-Nano-9B-v2", 8_888_227_328, 131_072, || {
            let pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-";
            published([4480, 56, 40, 8, 15_680], 80, pattern)
        }),
    ],
};

const HYBRID: DecoderParts = DecoderParts {
    attention_norms: BranchNorms { before: Some("norm"), after: None },
    attention: AttentionProjections {
        qkv: QkvNames::Each(["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"]),
        o: "mixer.o_proj",
        ..AttentionProjections::LLAMA
    },
    linear_attention: LinearAttentionProjections { mamba: "mixer", ..PARTS.linear_attention },
    mlp: MlpProjections::Plain(["mixer.up_proj", "mixer.down_proj"]),
    ..PARTS
};

const PATTERN: &str = "hybrid_override_pattern";
/// transformers writes the second one; of two, it reads the first.
const TYPES: [&str; 2] = ["layer_types", "layers_block_type"];
const EPS: &str = "layer_norm_epsilon";

/// The largest and the smallest initial time step, if the file has none.
const MAX_STEP: f64 = 0.1;
const MIN_STEP: f64 = 1e-4;

/// A kind of layers, by its letter and by its names.
const KINDS: [(char, &[&str]); 4] = [
    ('M', &["mamba", "linear_attention"]),
    ('*', &["attention", "full_attention"]),
    ('-', &["mlp"]),
    ('E', &["moe"]),
];

/// Fields of experts, which these models do not have, of kernels, initial values of weights and generation, and `expand` and `mamba_proj_bias`,
/// which transformers does not read.
const WITHOUT_EFFECT: [&str; 21] = [
    "chunk_size",
    "expand",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_logits_to_keep",
    "output_router_logits",
    "rescale_prenorm_residual",
    "routed_scaling_factor",
    "topk_group",
    "use_mamba_kernels",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("mlp_hidden_act", "relu2")?;
    file.check_activation("mamba_hidden_act", "silu")?;
    file.accept(&WITHOUT_EFFECT);
    file.accept_rope();
    for (key, expected) in [
        ("attention_bias", "transformers computes attention without biases here"),
        ("residual_in_fp32", "the residual stream has the dtype of the model"),
        ("tie_word_embeddings", "transformers ties nothing here"),
    ] {
        if file.flag(key)? {
            return Err(file.error(key, &format!("{expected}: it must be false")));
        }
    }
    for (key, what) in
        [("sliding_window", "windows"), ("num_nextn_predict_layers", "predictors of further tokens")]
    {
        if file.optional_size(key)?.is_some_and(|size| size > 0) {
            let expected = format!("this version has no {what} in this model_type: leave it out");
            return Err(file.error(key, &expected));
        }
    }
    file.require_kv_heads()?;
    let layer = file.heads_with_head_dim(128)?;
    check_same(file, "attention_head_dim", layer.head_dim as f64)?;
    let eps = file.eps(EPS, 1e-5)?;
    ["norm_eps", "rms_norm_eps"].into_iter().try_for_each(|key| check_same(file, key, eps))?;
    let kinds = kinds(file)?;
    let [hidden_size, intermediate_size] = [file.size("hidden_size")?, file.size("intermediate_size")?];
    let sizes = [hidden_size, kinds.len(), layer.num_heads, layer.num_kv_heads, intermediate_size];
    Ok(ModelConfig {
        vocab_size: file.size("vocab_size")?,
        rms_norm_eps: eps,
        mlp_bias: file.flag("mlp_bias")?,
        initializer_range: file.number("initializer_range", 0.02)?,
        ..with_layers(sizes, layer, mamba(file, kinds.contains(&'M'))?, &kinds)
    })
}

/// The letters of the layers, by the names in a list or else by the letters in `hybrid_override_pattern`.
fn kinds(file: &HfConfig<'_>) -> Result<Vec<char>, ModelError> {
    let pattern = file.get(PATTERN).and_then(Value::as_str).map(|pattern| pattern.chars().collect());
    let named = |name: &Value| KINDS.iter().find(|(_, names)| names.iter().any(|known| known == name));
    let letter = |name: &Value| named(name).map_or('?', |(letter, _)| *letter);
    let lists = TYPES.map(|key| file.get(key).map(|types| (key, types)));
    let (key, layers): (_, Option<Vec<char>>) = match lists.into_iter().flatten().next() {
        Some((key, types)) => (key, types.as_array().map(|types| types.iter().map(letter).collect())),
        None => (PATTERN, pattern),
    };
    let layers = layers.unwrap_or_default();
    if layers.contains(&'E') {
        return Err(file.error(key, "this version has no experts: no layer may be one of them"));
    }
    if !layers.contains(&'*') || !layers.iter().all(|kind| "M*-".contains(*kind)) {
        let expected =
            "a layer is \"mamba\" (M), \"attention\" (*) or \"mlp\" (-), and at least one must be attention";
        return Err(file.error(key, expected));
    }
    // transformers goes by the list.
    match file.get("num_hidden_layers").is_some() && file.num_layers("num_hidden_layers")? != layers.len() {
        true => Err(file.error("num_hidden_layers", &format!("{key} has {} layers", layers.len()))),
        false => Ok(layers),
    }
}

fn mamba(file: &HfConfig<'_>, is_used: bool) -> Result<LinearAttentionConfig, ModelError> {
    let size = |key, default, most| match file.optional_size(key)?.unwrap_or(default) {
        size if !is_used || (1..=most).contains(&size) => Ok(size),
        _ => Err(file.error(key, &format!("it must be from 1 to {most}"))),
    };
    let (heads, groups) = (size("mamba_num_heads", 128, 1 << 12)?, size("n_groups", 8, 1 << 12)?);
    if is_used && !heads.is_multiple_of(groups) {
        return Err(file.error("n_groups", &format!("it must divide mamba_num_heads = {heads}")));
    }
    // transformers reads the lower limit alone, and from another field.
    if file.time_step_limits()? != [0.0, f64::INFINITY] {
        let expected = "the limits are `time_step_min` and none, as in transformers: leave it out";
        return Err(file.error("time_step_limit", expected));
    }
    let least = file.number("time_step_min", 0.001)?;
    if !(least.is_finite() && least >= 0.0) {
        return Err(file.error("time_step_min", "it must be a number from 0"));
    }
    let positive = |key, default| match file.number(key, default)? {
        number if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err(file.error(key, "it must be positive")),
    };
    let [most, floor] = [positive("time_step_max", MAX_STEP)?, positive("time_step_floor", MIN_STEP)?];
    Ok(LinearAttentionConfig {
        num_key_heads: groups,
        num_value_heads: heads,
        key_head_dim: size("ssm_state_size", 128, 1 << 12)?,
        value_head_dim: size("mamba_head_dim", 64, 1 << 12)?,
        conv_width: size("conv_kernel", 4, MAX_WIDTH)?,
        kind: LinearAttentionKind::Mamba2(Mamba2Config {
            time_step_limits: [least, f64::INFINITY],
            time_step_bias: Init::TimeSteps { bounds: [least, most], floor },
            conv_bias: file.flag_or_set("use_conv_bias")?,
            projection_bias: file.flag("use_bias")?,
        }),
    })
}

/// Refuses another number under a second name, which only code of the model's own reads.
fn check_same(file: &HfConfig<'_>, key: &'static str, expected: f64) -> Result<(), ModelError> {
    match file.get(key).is_none() || file.number(key, expected)? == expected {
        true => Ok(()),
        false => Err(file.error(key, &format!("transformers does not read it: it must be {expected}"))),
    }
}

fn with_layers(
    sizes: Sizes,
    layer: AttentionConfig,
    mamba: LinearAttentionConfig,
    kinds: &[char],
) -> ModelConfig {
    let are = |kind| kinds.iter().map(move |known| *known == kind);
    ModelConfig::with_sizes(&NEMOTRON_H, sizes)
        .with_attention(|attention| *attention = AttentionConfig { rope: None, ..layer })
        .with_mixer(are('M'), mamba)
        .with_mixer(are('-'), MixerConfig::Mlp)
}

fn published(sizes: Sizes, mamba_head_dim: usize, pattern: &str) -> ModelConfig {
    let mamba = LinearAttentionConfig {
        num_key_heads: 8,
        num_value_heads: 128,
        key_head_dim: 128,
        value_head_dim: mamba_head_dim,
        conv_width: 4,
        kind: LinearAttentionKind::Mamba2(Mamba2Config {
            time_step_limits: [0.001, f64::INFINITY],
            time_step_bias: Init::TimeSteps { bounds: [0.001, MAX_STEP], floor: MIN_STEP },
            conv_bias: true,
            projection_bias: false,
        }),
    };
    let layer = AttentionConfig { head_dim: 128, ..*ModelConfig::with_sizes(&NEMOTRON_H, sizes).attention() };
    let config = with_layers(sizes, layer, mamba, &pattern.chars().collect::<Vec<_>>());
    ModelConfig { vocab_size: 131_072, ..config }
}

fn write(config: &ModelConfig, json: &mut Value) {
    remove_fields(json, &["hidden_act", "rms_norm_eps"]);
    let kind = |layer: &MixerConfig| match layer {
        MixerConfig::Mlp => '-',
        MixerConfig::Attention(_) => '*',
        _ => 'M',
    };
    json[PATTERN] = json!(config.layers.iter().map(kind).collect::<String>());
    json["mlp_hidden_act"] = json!("relu2");
    json["mlp_bias"] = json!(config.mlp_bias);
    json[EPS] = json!(config.rms_norm_eps);
    let Some((linear, mamba)) =
        config.linear_layers().find_map(|linear| linear.mamba2().map(|mamba| (linear, mamba)))
    else {
        return;
    };
    json["n_groups"] = json!(linear.num_key_heads);
    json["mamba_num_heads"] = json!(linear.num_value_heads);
    json["ssm_state_size"] = json!(linear.key_head_dim);
    json["mamba_head_dim"] = json!(linear.value_head_dim);
    json["conv_kernel"] = json!(linear.conv_width);
    json["time_step_min"] = json!(mamba.time_step_limits[0]);
    if let Init::TimeSteps { bounds: [_, most], floor } = mamba.time_step_bias {
        json["time_step_max"] = json!(most);
        json["time_step_floor"] = json!(floor);
    }
    json["use_conv_bias"] = json!(mamba.conv_bias);
    json["use_bias"] = json!(mamba.projection_bias);
}
