//! Llama 4's text model, without experts: layers with a rotary embedding, whose documents are attended in chunks, and layers without
//! one, whose queries grow with their position.

use crate::families::{DecoderLayer, DecoderParts, Family, HfConfig, ModelConfig, ModelError, ModelNames};
use crate::nn::{AttentionConfig, MlpProjections, QkNorm};
use serde_json::{Value, json};
use ulysses_kernels::rope::{Rope, Scaling};

pub(in crate::families) static LLAMA4: Family = Family {
    model_type: "llama4_text",
    class: "Llama4ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    // The published models have experts.
    models: &[],
};

const PARTS: DecoderParts = DecoderParts {
    mlp: MlpProjections::Gated(["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"]),
    ..DecoderParts::LLAMA
};

const CHUNKED: &str = "chunked_attention";
const CHUNK: &str = "attention_chunk_size";
const TUNING: &str = "attn_temperature_tuning";

/// Fields of experts, for models without any.
const EXPERT_FIELDS: [&str; 8] = [
    "for_llm_compressor",
    "interleave_moe_layer_step",
    "intermediate_size",
    "num_experts_per_tok",
    "num_local_experts",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    file.require_kv_heads()?;
    check_experts(file)?;
    let rope = Rope { interleaved: true, ..file.rope_with_default(500_000.0)? };
    let has_norm = file.flag_or_set("use_qk_norm")?;
    if has_norm && rope.amplitude(0) != 1.0 {
        // Norms follow the rotation, and would undo the factor.
        let key = if file.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
        let expected = "with `use_qk_norm`, this version computes no scaling with a factor on the rotation";
        return Err(file.error(key, expected));
    }
    let bias = file.flag("attention_bias")?;
    let heads = AttentionConfig { qkv_bias: bias, o_bias: bias, ..file.heads_with_head_dim(128)? };
    let mut config = file.decoder_with_mlp(&LLAMA4, heads, 1e-5, file.size("intermediate_size_mlp")?)?;
    let num_layers = config.num_layers();
    let rotates = match file.get("no_rope_layers") {
        // As transformers reads an empty list.
        Some(layers) if *layers == json!([]) => file.rotating_layers_by_interval(num_layers)?,
        _ => file.rotating_layers(num_layers)?,
    };
    let growth = growth(file)?;
    let chunked = chunked_layers(file, &rotates)?;
    for ((layer, rotates), chunk) in config.attention_layers_mut().zip(rotates).zip(chunked) {
        let qk_norm = (rotates && has_norm).then_some(QkNorm::HeadWithoutWeight);
        *layer = AttentionConfig { rope: if rotates { Some(rope) } else { growth }, qk_norm, chunk, ..heads };
    }
    Ok(config)
}

fn check_experts(file: &HfConfig<'_>) -> Result<(), ModelError> {
    file.accept(&EXPERT_FIELDS);
    let is_dense = match file.get("moe_layers") {
        Some(layers) => *layers == json!([]),
        None => file.interval("interleave_moe_layer_step", 1)? > file.size("num_hidden_layers")?,
    };
    match is_dense {
        true => Ok(()),
        false => Err(file.error("moe_layers", "this version has no experts: it must be an empty list")),
    }
}

/// The growth of queries in layers that do not rotate, if there is one.
fn growth(file: &HfConfig<'_>) -> Result<Option<Rope>, ModelError> {
    let (query_growth, interval) = (file.number("attn_scale", 0.1)?, file.interval("floor_scale", 8192)?);
    // Published models have the number 4.
    let is_tuned = match file.get(TUNING) {
        None => true,
        Some(Value::Bool(is_tuned)) => *is_tuned,
        Some(number) if number.is_u64() => *number != json!(0),
        Some(_) => return Err(file.error(TUNING, "it must be true or false")),
    };
    let original_len = u32::try_from(interval)
        .map_err(|_| file.error("floor_scale", "it must be a number of tokens below 2^32"))?;
    let scaling = Scaling::Unrotated { original_len };
    Ok(is_tuned.then(|| Rope { scaling, query_growth, ..Rope::from(10_000.0) }))
}

/// The chunks of each layer: by `layer_types`, or else of those that rotate.
fn chunked_layers(file: &HfConfig<'_>, rotates: &[bool]) -> Result<Vec<Option<u32>>, ModelError> {
    let size = match file.has(CHUNK) {
        true => file.optional_size(CHUNK)?,
        false => Some(8192),
    };
    let invalid = || file.error(CHUNK, "it must be a number of tokens from 1, below 2^32");
    let size = size.map(|size| u32::try_from(size).ok().filter(|size| *size > 0).ok_or_else(invalid));
    let size = size.transpose()?;
    match (file.layers_of_type(&[CHUNKED], rotates.len())?, size) {
        (Some(types), None) if types.contains(&true) => {
            Err(file.error(CHUNK, "there are layers with chunks: it must be given"))
        }
        (Some(types), size) => Ok(types.into_iter().map(|chunked| size.filter(|_| chunked)).collect()),
        (None, size) => Ok(rotates.iter().map(|rotates| size.filter(|_| *rotates)).collect()),
    }
}

fn write(config: &ModelConfig, json: &mut Value) {
    let layers = || config.attention_layers();
    let rotates = |layer: &AttentionConfig| layer.rope.is_some_and(|rope| rope.rotates());
    let growth = layers().find_map(|layer| layer.rope.filter(|rope| !rope.rotates()));
    json["moe_layers"] = json!([]);
    json["intermediate_size_mlp"] = json!(config.intermediate_size);
    json["no_rope_layers"] = layers().map(|layer| u8::from(rotates(layer))).collect();
    json["layer_types"] =
        layers().map(|layer| if layer.chunk.is_some() { CHUNKED } else { "full_attention" }).collect();
    json[CHUNK] = json!(layers().find_map(|layer| layer.chunk));
    json["use_qk_norm"] = json!(layers().any(|layer| layer.qk_norm.is_some()));
    json["attention_bias"] = json!(layers().any(|layer| layer.qkv_bias));
    json[TUNING] = json!(growth.is_some());
    if let Some(Rope { scaling: Scaling::Unrotated { original_len }, query_growth, .. }) = growth {
        json["attn_scale"] = json!(query_growth);
        json["floor_scale"] = json!(original_len);
    }
}
