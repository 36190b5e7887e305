//! Descriptions of LFM2.

use super::*;

/// As published with the names of the training program, which transformers does not read.
fn published() -> Value {
    json!({
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 1024,
        "block_dim": 1024, "block_ff_dim": 6656, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": true, "block_norm_eps": 1e-5, "block_use_swiglu": true, "conv_L_cache": 3,
        "conv_bias": false, "conv_dim": 1024, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "norm_eps": 1e-5,
        "num_attention_heads": 16, "num_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 128_000, "rope_theta": 1_000_000.0, "use_pos_enc": true,
    })
}

#[test]
fn the_published_file_is_the_known_model() {
    let expected = shape("LFM2-350M").unwrap();
    assert_eq!(read(&published()).unwrap(), expected);
    let mut by_types = published();
    let attention = [2, 5, 8, 10, 12, 14];
    let layer_type = |layer| if attention.contains(&layer) { "full_attention" } else { "conv" };
    by_types["layer_types"] = (0..16).map(layer_type).collect();
    by_types["full_attn_idxs"] = json!([0]);
    assert_eq!(read(&by_types).unwrap(), expected);
    let names: Vec<_> = (expected.family.block)(&expected, 0)
        .parameters()
        .iter()
        .map(|spec| spec.name.replace("model.layers.0.", "").replace(".weight", ""))
        .collect();
    let modules = "conv.in_proj conv.conv conv.out_proj feed_forward.w1 feed_forward.w3 feed_forward.w2";
    assert_eq!(names.join(" "), format!("{modules} operator_norm ffn_norm"));
}

#[test]
fn the_width_of_the_mlp_is_what_transformers_computes() {
    let width = |changes: Value| {
        let mut json = published();
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(&json).unwrap().intermediate_size
    };
    assert_eq!(width(json!({})), 4608);
    assert_eq!(width(json!({ "block_auto_adjust_ff_dim": false })), 6656);
    assert_eq!(width(json!({ "block_ffn_dim_multiplier": 1.25 })), 5632);
    // Without a multiplier it is not rounded up.
    assert_eq!(width(json!({ "block_ffn_dim_multiplier": null })), 4437);
    assert_eq!(width(json!({ "block_multiple_of": 100, "intermediate_size": 7 })), 4500);
    let stated = json!({ "block_ff_dim": null, "intermediate_size": 384, "block_multiple_of": 1 });
    assert_eq!(width(stated), 256);
}

#[test]
fn what_is_not_lfm2_is_refused() {
    for (key, value) in [
        ("layer_types", json!(vec!["sliding_attention"; 16])),
        ("layer_types", json!(["conv"])),
        ("layer_types", json!(vec!["conv"; 16])),
        ("full_attn_idxs", json!("2")),
        ("conv_L_cache", json!(9)),
        ("block_multiple_of", json!(0)),
        ("conv_bias", json!("no")),
        ("num_key_value_heads", json!(5)),
    ] {
        let mut json = published();
        json[key] = value;
        assert_refused(&json, key);
    }
    let mut untied = published();
    (untied["tie_word_embeddings"], untied["tie_embedding"]) = (json!(true), json!(false));
    assert!(!read(&untied).unwrap().tie_word_embeddings);
}
