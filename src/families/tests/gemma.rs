//! Descriptions of Gemma 3 and 4.

use super::*;

#[test]
fn gemma_is_read_as_written_by_every_version_of_transformers() {
    let first = of_family("gemma3_text");
    assert_eq!((first.norm_offset, first.multipliers.embedding), (1.0, 24f64.sqrt()));
    let old = json!({
        "sliding_window_pattern": 2, "sliding_window": 9, "rope_local_base_freq": 500,
        "rope_theta": 2e6, "rope_scaling": { "rope_type": "linear", "factor": 8.0 },
    });
    let new = json!({
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
        "rope_parameters": {
            "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 2e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 500.0 },
        },
    });
    let [old, new] = [old, new].map(|fields| {
        let mut json = first.to_hf_json();
        for key in ["layer_types", "rope_theta", "sliding_window"] {
            json.as_object_mut().unwrap().shift_remove(key);
        }
        json.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        read(&json).unwrap()
    });
    assert_eq!(old, new);
    let layers = old.attention_layers().map(|layer| (layer.window, layer.rope.unwrap())).collect::<Vec<_>>();
    let rope = |theta: f64, scaling| Rope { scaling, ..theta.into() };
    let (local, global) = (rope(500.0, Scaling::None), rope(2e6, Scaling::Linear { factor: 8.0 }));
    assert_eq!(layers, [(Some(9), local), (None, global)]);
    let capped = changed("gemma3_text", "final_logit_softcapping", Some(json!(30.0)));
    assert_eq!(read(&capped).unwrap().final_softcap, Some(30.0));
    assert_refused(
        &changed("gemma3_text", "attn_logit_softcapping", Some(json!(30.0))),
        "attn_logit_softcapping",
    );
}

#[test]
fn gemma4_has_two_sizes_of_heads_as_published_or_as_transformers_writes_them() {
    let mut json = of_family("gemma4_text").to_hf_json();
    for key in ["layer_types", "global_head_dim", "num_global_key_value_heads"] {
        json.as_object_mut().unwrap().shift_remove(key);
    }
    let changes = json!({
        "num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
        "attention_k_eq_v": true, "use_bidirectional_attention": "vision", "sliding_window": 9,
        "rope_parameters": {
            "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
        },
    });
    json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let with = |changes: Value| {
        let mut json = json.clone();
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        json
    };
    let published = read(&with(json!({ "global_head_dim": 32, "num_global_key_value_heads": 2 }))).unwrap();
    let sizes = |config: &ModelConfig| {
        let layers = config.attention_layers();
        layers.map(|layer| (layer.window, layer.head_dim, layer.num_kv_heads)).collect::<Vec<_>>()
    };
    let (local, global) = ((Some(9), 16, 4), (None, 32, 2));
    // The last layer has no window, whatever its index.
    assert_eq!(sizes(&published), [local, local, local, local, local, global, global]);
    let is_rotating = |frequency: &&f64| **frequency > 0.0;
    let frequencies = published.rope().unwrap().frequencies(32, 0);
    assert_eq!((frequencies.len(), frequencies.iter().filter(is_rotating).count()), (16, 4));
    let own = json!({ "head_dim": 32, "num_key_value_heads": 2 });
    assert_eq!(read(&with(json!({ "per_layer_config": { "5": own, "6": own } }))).unwrap(), published);
    let defaults = read(&json).unwrap();
    assert_eq!(sizes(&defaults)[6], (None, 512, 4));
    for (key, value) in [
        ("per_layer_config", json!({ "0": { "intermediate_size": 3 } })),
        ("enable_moe_block", json!(true)),
        ("num_kv_shared_layers", json!(2)),
        ("hidden_size_per_layer_input", json!(256)),
        ("use_bidirectional_attention", json!("all")),
        ("sliding_window", json!(null)),
        ("rope_parameters", json!({})),
    ] {
        assert_refused(&with(json!({ key: value })), key);
    }
}
