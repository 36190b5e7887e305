//! Descriptions of Granite 4's hybrids.

use super::*;
use crate::nn::Mamba2Config;

/// With Mamba 2 in some layers, with and without a position embedding.
pub(super) fn descriptions() -> [ModelConfig; 2] {
    let mut config = of_family("granitemoehybrid").with_num_layers(3);
    config.multipliers = Multipliers { embedding: 12.0, residual: 0.22, logits: 1.0 / 16.0 };
    let mamba = |time_step_limits, projection_bias: bool| LinearAttentionConfig {
        num_key_heads: 2,
        num_value_heads: 6,
        key_head_dim: 5,
        value_head_dim: 8,
        conv_width: 3,
        kind: LinearAttentionKind::Mamba2(Mamba2Config {
            time_step_limits,
            time_step_bias: Init::Ones,
            conv_bias: !projection_bias,
            projection_bias,
        }),
    };
    let without_positions = config.clone().with_attention(|layer| layer.rope = None);
    [
        config.with_mixer([true, false, true], mamba([0.0, f64::INFINITY], false)),
        without_positions.with_mixer([false, true, true], mamba([0.1, 2.5], true)),
    ]
}

/// As published: fields of experts and kernels, and earlier names of the layers.
fn published() -> Value {
    let attention = [10, 13, 17, 27];
    let layer_type = |layer| if attention.contains(&layer) { "attention" } else { "mamba" };
    json!({
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100_352,
        "attention_bias": false, "attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_act": "silu",
        "hidden_size": 768, "init_method": "mup", "intermediate_size": 2048, "logits_scaling": 3,
        "layer_types": (0..32).map(layer_type).collect::<Vec<_>>(), "mamba_chunk_size": 256, "mamba_conv_bias": true,
        "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 48, "mamba_proj_bias": false, "max_position_embeddings": 32_768,
        "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 0,
        "num_hidden_layers": 32, "num_key_value_heads": 4, "num_local_experts": 0, "output_router_logits": false,
        "position_embedding_type": "nope", "residual_multiplier": 0.246, "rms_norm_eps": 1e-5, "rope_scaling": null,
        "rope_theta": 10_000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 2048,
        "tie_word_embeddings": true,
    })
}

#[test]
fn the_published_file_is_the_known_model() {
    let expected = shape("granite-4.0-h-350m").unwrap();
    assert_eq!(read(&published()).unwrap(), expected);
    let mut new = published();
    for layer_type in new["layer_types"].as_array_mut().unwrap() {
        *layer_type = json!(if *layer_type == "mamba" { "linear_attention" } else { "full_attention" });
    }
    (new["mamba_d_head"], new["position_embedding_type"]) = (json!("auto"), json!(null));
    new["time_step_limit"] = json!([0.0, { "__float__": "Infinity" }]);
    assert_eq!(read(&new).unwrap(), expected);
    let names: Vec<_> = (expected.family.block)(&expected, 0)
        .parameters()
        .iter()
        .map(|spec| spec.name.replace("model.layers.0.", "").replace(".weight", ""))
        .collect();
    let mamba = "mamba.in_proj mamba.out_proj mamba.conv1d mamba.conv1d.bias mamba.dt_bias mamba.A_log mamba.D mamba.norm";
    let mlp = "shared_mlp.input_linear shared_mlp.output_linear";
    assert_eq!(names.join(" "), format!("{mamba} {mlp} input_layernorm post_attention_layernorm"));
}

#[test]
fn a_hybrid_of_granite_has_rotation_if_its_file_says_so() {
    let mut json = published();
    json["position_embedding_type"] = json!("rope");
    assert_eq!(read(&json).unwrap().attention().rope, Some(10_000.0.into()));
}

#[test]
fn what_is_not_a_dense_hybrid_of_granite_is_refused() {
    for (key, value) in [
        ("num_local_experts", json!(62)),
        ("num_local_experts", json!(null)),
        ("layer_types", json!(vec!["mamba"; 32])),
        ("layer_types", json!(vec!["sliding_attention"; 32])),
        ("layer_types", json!(["mamba"])),
        ("mamba_d_head", json!(64)),
        ("mamba_n_groups", json!(5)),
        ("mamba_d_conv", json!(9)),
        ("position_embedding_type", json!("alibi")),
        ("normalization_function", json!("layernorm")),
        ("attention_bias", json!(true)),
        ("time_step_limit", json!([1.0, 0.5])),
        ("time_step_limit", json!([0.0])),
        ("residual_multiplier", json!(0)),
    ] {
        let mut json = published();
        json[key] = value;
        assert_refused(&json, key);
    }
}
