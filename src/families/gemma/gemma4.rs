//! Gemma 4, its dense text model: as Gemma 3 with plain norms, a norm on values, and a constant factor on every layer. Layers
//! without a window have larger and fewer KV heads, of which a part rotates, and values that may be the keys before their norm.

use super::{ACTIVATION, SANDWICH, softcap, with_embedding_factor};
use crate::families::hf::{FULL, WINDOWED, rope_to_hf};
use crate::families::read::{MUST_BE_GIVEN, remove_fields, write_windows};
use crate::families::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionConfig, QkNorm};
use serde_json::{Value, json};
use ulysses_kernels::rope::{Rope, Scaling};

pub(in crate::families) static GEMMA4: Family = Family {
    model_type: "gemma4_text",
    class: "Gemma4ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[KnownModel::new("gemma-4-31b", 30_697_345_340, 262_144, || {
        published([5376, 60, 32, 16, 21504], 4)
    })],
};

const PARTS: DecoderParts = DecoderParts { scalar: Some("layer_scalar"), ..SANDWICH };

/// The window of the first models, for files without one.
const WINDOW: usize = 512;

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    check_parts(file)?;
    let (full_rope, Some(local_rope)) = file.rope_of_layer_types(1_000_000.0)? else {
        return Err(file.error("rope_parameters", MUST_BE_GIVEN));
    };
    let local = AttentionConfig {
        rope: Some(local_rope),
        scale: Some(1.0),
        qk_norm: Some(QkNorm::Head),
        value_norm: true,
        ..file.heads_with_head_dim(256)?
    };
    let values_from_keys = file.flag("attention_k_eq_v")?;
    let global = AttentionConfig { rope: Some(full_rope), values_from_keys, ..local };
    let config = file.decoder(&GEMMA4, global, 1e-6)?;
    let final_softcap = softcap(file, "final_logit_softcapping", None)?;
    let mut config = ModelConfig { final_softcap, ..config };
    let num_layers = config.num_layers();
    let mut windowed = file.windowed_layers(num_layers, |index| (index + 1) % 6 != 0)?;
    // As transformers, whatever the file says.
    windowed.last_mut().into_iter().for_each(|last| *last = false);
    let window = file.window_or(WINDOW)?;
    let window = window.ok_or_else(|| file.error("sliding_window", "it must be a positive integer"))?;
    for (index, (layer, windowed)) in config.attention_layers_mut().zip(windowed).enumerate() {
        if windowed {
            *layer = AttentionConfig { window: Some(window), ..local };
        }
        (layer.head_dim, layer.num_kv_heads) = sizes(file, index, layer)?;
    }
    Ok(with_embedding_factor(file.tied_by_default(config)))
}

/// Refuses what only other models of the family have.
fn check_parts(file: &HfConfig<'_>) -> Result<(), ModelError> {
    file.check_activation("hidden_activation", ACTIVATION)?;
    file.check_biases()?;
    file.require_kv_heads()?;
    if file.flag("enable_moe_block")? {
        return Err(file.error("enable_moe_block", "this version has no experts"));
    }
    if file.optional_size("num_kv_shared_layers")?.is_some_and(|layers| layers > 0) {
        return Err(
            file.error("num_kv_shared_layers", "this version computes keys and values in every layer")
        );
    }
    // Of the first models it is 256.
    if file.optional_size("hidden_size_per_layer_input")? != Some(0) {
        return Err(
            file.error("hidden_size_per_layer_input", "this version has no input per layer: it must be 0")
        );
    }
    // Among tokens of text, attention is causal with "vision" too.
    if file.get("use_bidirectional_attention").is_some_and(|tokens| tokens != "vision") {
        return Err(file.error("use_bidirectional_attention", "this version computes causal attention only"));
    }
    // Without effect where the above is not used.
    file.accept(&[
        "hidden_act",
        "moe_intermediate_size",
        "num_experts",
        "top_k_experts",
        "use_double_wide_mlp",
        "vocab_size_per_layer_input",
    ]);
    Ok(())
}

/// The size and the number of a layer's KV heads: as published, by kind of layer; or by layer, as transformers writes them.
fn sizes(file: &HfConfig<'_>, index: usize, layer: &AttentionConfig) -> Result<(usize, usize), ModelError> {
    const BY_LAYER: &str = "per_layer_config";
    let (global_dim, global_heads) =
        (file.optional_size("global_head_dim")?, file.optional_size("num_global_key_value_heads")?);
    let Some(by_layer) = file.get(BY_LAYER) else {
        return Ok(match layer.window {
            Some(_) => (layer.head_dim, layer.num_kv_heads),
            None => {
                let heads = global_heads.filter(|_| layer.values_from_keys);
                (global_dim.unwrap_or(512), heads.unwrap_or(layer.num_kv_heads))
            }
        });
    };
    let (mut head_dim, mut num_kv_heads) = (layer.head_dim, layer.num_kv_heads);
    let own = by_layer.get(index.to_string()).and_then(Value::as_object);
    for (key, value) in own.into_iter().flatten() {
        match (key.as_str(), value.as_u64()) {
            ("head_dim", Some(size)) => head_dim = size as usize,
            ("num_key_value_heads", Some(size)) => num_kv_heads = size as usize,
            _ => return Err(file.error(BY_LAYER, "layers differ in head_dim and num_key_value_heads only")),
        }
    }
    Ok((head_dim, num_kv_heads))
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_windows(config, json);
    remove_fields(json, &["hidden_act", "rope_theta", "rope_scaling", "partial_rotary_factor"]);
    let layer = |windowed: bool| config.attention_layers().find(|layer| layer.window.is_some() == windowed);
    let (Some(global), Some(local)) = (layer(false).or(layer(true)), layer(true).or(layer(false))) else {
        return;
    };
    for (key, value) in [
        ("hidden_activation", json!(ACTIVATION)),
        ("final_logit_softcapping", json!(config.final_softcap)),
        ("hidden_size_per_layer_input", json!(0)),
        ("sliding_window", json!(local.window.unwrap_or(WINDOW))),
        ("head_dim", json!(local.head_dim)),
        ("num_key_value_heads", json!(local.num_kv_heads)),
        ("attention_k_eq_v", json!(global.values_from_keys)),
        ("global_head_dim", json!(global.head_dim)),
        ("num_global_key_value_heads", json!(global.values_from_keys.then_some(global.num_kv_heads))),
        (
            "rope_parameters",
            json!({ FULL: global.rope.map(rope_to_hf), WINDOWED: local.rope.map(rope_to_hf) }),
        ),
    ] {
        json[key] = value;
    }
}

fn published(sizes: Sizes, global_kv_heads: usize) -> ModelConfig {
    let global_rope = Scaling::Proportional { part: 0.25, factor: 1.0 };
    let mut config = ModelConfig::with_sizes(&GEMMA4, sizes).with_attention(|layer| {
        (layer.scale, layer.qk_norm, layer.value_norm) = (Some(1.0), Some(QkNorm::Head), true);
        layer.head_dim = 256;
    });
    for (index, layer) in config.attention_layers_mut().enumerate() {
        if index % 6 < 5 {
            layer.window = Some(1024);
            continue;
        }
        (layer.head_dim, layer.num_kv_heads, layer.values_from_keys) = (512, global_kv_heads, true);
        layer.rope = Some(Rope { scaling: global_rope, ..1_000_000.0.into() });
    }
    with_embedding_factor(ModelConfig {
        vocab_size: 262_144,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
        final_softcap: Some(30.0),
        ..config
    })
}
