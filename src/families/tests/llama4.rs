//! Descriptions of Llama 4's text model.

use super::*;

/// A dense model of five layers, with the fields of the published ones.
fn llama4() -> Value {
    json!({
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "vocab_size": 61, "hidden_size": 24,
        "intermediate_size": 8, "intermediate_size_mlp": 20, "moe_layers": [], "interleave_moe_layer_step": 1,
        "num_experts_per_tok": 1, "num_local_experts": 16, "output_router_logits": false, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "for_llm_compressor": false, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "attention_bias": false, "attention_chunk_size": 8192,
        "attn_scale": 0.1, "floor_scale": 8192, "attn_temperature_tuning": 4, "no_rope_layers": [], "use_qk_norm": true,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "max_position_embeddings": 10_485_760, "tie_word_embeddings": false,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 0.5, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    })
}

fn with(key: &str, value: Value) -> Value {
    let mut json = llama4();
    json[key] = value;
    json
}

/// Biases; chunks of a layer that does not rotate; queries that do not grow.
pub(super) fn descriptions() -> Vec<ModelConfig> {
    let other_layers = json!([
        "full_attention",
        "full_attention",
        "chunked_attention",
        "full_attention",
        "chunked_attention"
    ]);
    let changes = [
        ("attention_bias", json!(true)),
        ("layer_types", other_layers),
        ("attn_temperature_tuning", json!(false)),
        ("attention_chunk_size", json!(null)),
        ("use_qk_norm", json!(false)),
    ];
    changes.map(|(key, value)| read(&with(key, value)).unwrap()).into_iter().collect()
}

#[test]
fn every_fourth_layer_neither_rotates_nor_has_chunks() {
    let config = read(&llama4()).unwrap();
    let layers: Vec<_> = config.attention_layers().collect();
    let scaling =
        Scaling::Llama3 { factor: 16.0, low_freq_factor: 0.5, high_freq_factor: 1.0, original_len: 8192 };
    let rope = Rope { scaling, interleaved: true, ..500_000.0.into() };
    for index in [0, 1, 2, 4] {
        let AttentionConfig { rope: of_layer, chunk, qk_norm, .. } = *layers[index];
        assert_eq!((of_layer, chunk, qk_norm), (Some(rope), Some(8192), Some(QkNorm::HeadWithoutWeight)));
    }
    let growth = layers[3].rope.unwrap();
    assert_eq!((growth.rotates(), layers[3].chunk, layers[3].qk_norm), (false, None, None));
    // The first position is 1.
    let factors = [8190, 8191, 16_382, 16_383].map(|position| growth.amplitude(position));
    assert_eq!(factors, [1.0, 1.0 + 0.1 * 2f64.ln(), 1.0 + 0.1 * 2f64.ln(), 1.0 + 0.1 * 3f64.ln()]);
    assert_eq!((config.intermediate_size, growth.of_keys().amplitude(16_383)), (20, 1.0));
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    for (key, value) in [
        ("moe_layers", json!([3])),
        ("moe_layers", json!(null)),
        ("rope_scaling", yarn),
        ("attention_chunk_size", json!(0)),
        ("attn_temperature_tuning", json!("on")),
        ("floor_scale", json!(0)),
        ("no_rope_layers", json!([1, 0, 1, 2, 1])),
        ("no_rope_layers", json!([1, 0])),
        ("hidden_act", json!("gelu")),
    ] {
        assert_refused(&with(key, value), key);
    }
    let mut without_chunks = with("attention_chunk_size", json!(null));
    without_chunks["layer_types"] = Value::from(["chunked_attention"; 5].map(Value::from).to_vec());
    assert_refused(&without_chunks, "attention_chunk_size");
}
