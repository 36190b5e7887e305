//! Descriptions of Qwen3.5 and Qwen3-Next.

use super::*;
use crate::nn::TensorRank;

/// As published, but for the experts.
fn dense() -> Value {
    json!({
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 160, "hidden_size": 24,
        "intermediate_size": 20, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "attention_bias": false, "attention_dropout": 0.0, "decoder_sparse_step": 1,
        "full_attention_interval": 4, "hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 7, "mlp_only_layers": [],
        "moe_intermediate_size": 512, "norm_topk_prob": true, "num_experts": 0, "num_experts_per_tok": 10,
        "output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": null,
        "rope_theta": 10_000_000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262_144, "tie_word_embeddings": false, "use_cache": true,
        "use_sliding_window": false,
    })
}

fn with(changes: &Value) -> Value {
    let mut json = dense();
    json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    json
}

#[test]
fn it_is_qwen3_5_with_other_parameters() {
    let next = read(&dense()).unwrap();
    let is_linear = next.layers.iter().map(|layer| layer.linear_attention().is_some());
    assert_eq!(is_linear.collect::<Vec<_>>(), [true, true, true, false, true]);
    let other = ModelConfig { family: family("qwen3_5_text").unwrap(), ..next.clone() };
    assert_eq!(next.num_parameters(), other.num_parameters());
    let mut json = other.to_hf_json();
    json["model_type"] = json!("qwen3_next");
    json["architectures"] = json!(["Qwen3NextForCausalLM"]);
    json["num_experts"] = json!(0);
    assert_eq!(read(&json).unwrap(), next);

    let shapes: Vec<_> =
        parameters(&next, None).into_iter().filter(|(name, _)| name.contains("in_proj")).collect();
    // Two key heads, with 4 elements and three value heads of 7 each.
    let expected = [
        ("linear_attn.in_proj_qkvz", vec![2 * (2 * 4 + 2 * 3 * 7), 24]),
        ("linear_attn.in_proj_ba", vec![12, 24]),
    ];
    assert_eq!(shapes, expected.map(|(name, shape)| (name.to_owned(), shape)));
}

/// Names and shapes of the parameters of the first layer, of a rank of tp.
fn parameters(config: &ModelConfig, tp: Option<TensorRank>) -> Vec<(String, Vec<usize>)> {
    let layer = (config.family.block)(config, 0);
    let layer = match tp {
        None => layer,
        Some(tp) => layer.tensor_parallel(tp).unwrap(),
    };
    let name = |spec: &ParameterSpec| spec.name.replace("model.layers.0.", "").replace(".weight", "");
    layer.parameters().iter().map(|spec| (name(spec), spec.shape.clone())).collect()
}

#[test]
fn ranks_of_tp_have_key_heads_or_share_whole_parameters() {
    let config = read(&dense()).unwrap();
    let rows = |size: usize, rank: usize, part: &str| {
        let parameters = parameters(&config, Some(TensorRank { size, rank }));
        parameters.iter().find(|(name, _)| *name == format!("linear_attn.in_proj_{part}")).unwrap().1[0]
    };
    for rank in 0..2 {
        assert_eq!([rows(2, rank, "qkvz"), rows(2, rank, "ba")], [50, 6]);
    }
    // Of three ranks two share a key head.
    for rank in 0..3 {
        assert_eq!([rows(3, rank, "qkvz"), rows(3, rank, "ba")], [100, 12]);
    }
}

#[test]
fn experts_are_refused_in_any_layer() {
    let with_experts = |changes: Value| {
        let mut json = with(&changes);
        json["num_experts"] = json!(512);
        json
    };
    for dense in [
        with_experts(json!({ "mlp_only_layers": [0, 1, 2, 3, 4] })),
        with_experts(json!({ "decoder_sparse_step": 6 })),
        with_experts(json!({ "decoder_sparse_step": 2, "mlp_only_layers": [3, 1, 17] })),
        with(&json!({ "mlp_only_layers": null, "decoder_sparse_step": 3 })),
    ] {
        assert_eq!(read(&dense).unwrap(), read(&self::dense()).unwrap());
    }
    let mut by_default = dense();
    by_default.as_object_mut().unwrap().shift_remove("num_experts");
    for (json, layer) in [
        (by_default, 0),
        (with_experts(json!({})), 0),
        (with_experts(json!({ "mlp_only_layers": [0, 1, 2, 4] })), 3),
        (with_experts(json!({ "decoder_sparse_step": 5 })), 4),
    ] {
        let error = read(&json).unwrap_err().to_string();
        let reason = format!("no experts, which layer {layer} would have");
        assert!(error.contains("`num_experts`") && error.contains(&reason), "{error}");
    }
}

#[test]
fn what_is_not_qwen3_next_is_refused() {
    for (key, value) in [
        ("mlp_only_layers", json!("all")),
        ("mlp_only_layers", json!([-1])),
        ("decoder_sparse_step", json!(0)),
        ("full_attention_interval", json!(0)),
        ("layer_types", json!(vec!["linear_attention"; 5])),
        ("layer_types", json!(vec!["sliding_attention"; 5])),
        ("linear_num_key_heads", json!(4)),
        ("linear_conv_kernel_dim", json!(9)),
        ("use_sliding_window", json!(true)),
        ("attention_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("attn_output_gate", json!(true)),
    ] {
        assert_refused(&with(&json!({ key: value })), key);
    }
}

#[test]
fn qwen3_5_has_linear_attention_in_the_layers_that_its_file_says() {
    let mut json = changed("qwen3_5_text", "layer_types", None);
    json["num_hidden_layers"] = json!(5);
    let is_linear = |json: &Value| {
        let config = read(json).unwrap();
        config.layers.iter().map(|layer| layer.linear_attention().is_some()).collect::<Vec<_>>()
    };
    assert_eq!(is_linear(&json), [true, true, true, false, true]);
    json["full_attention_interval"] = json!(2);
    assert_eq!(is_linear(&json), [true, false, true, false, true]);
    for (key, value) in [
        ("attn_output_gate", json!(false)),
        ("layer_types", json!(vec!["linear_attention"; 5])),
        ("layer_types", json!(vec!["sliding_attention"; 5])),
        ("linear_num_key_heads", json!(5)),
        ("linear_conv_kernel_dim", json!(9)),
        ("mlp_only_layers", json!([1])),
        ("attention_bias", json!(true)),
    ] {
        let mut json = json.clone();
        json[key] = value;
        assert_refused(&json, key);
    }
    json["attn_output_gate"] = json!(true);
    json["mamba_ssm_dtype"] = json!("float32");
    let larger = json!({ "model_type": "qwen3_5", "text_config": json });
    assert_eq!(read(&larger).unwrap(), read(&json).unwrap());
}
