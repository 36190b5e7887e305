//! Descriptions with latent attention.

use super::*;
use crate::nn::LatentConfig;

/// As published, with the fields that do not matter.
fn youtu() -> Value {
    json!({
        "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128_000, "eos_token_id": 128_001, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "kv_lora_rank": 512, "max_position_embeddings": 131_072, "num_attention_heads": 16,
        "num_hidden_layers": 32, "num_key_value_heads": 16, "q_lora_rank": 1536, "qk_head_dim": 192, "head_dim": 64,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_interleave": true,
        "rope_parameters": { "rope_theta": 1_600_000, "rope_type": "default" }, "tie_word_embeddings": true,
        "initializer_range": 0.02, "use_cache": true, "v_head_dim": 128, "vocab_size": 128_256,
    })
}

/// A dense model of two layers, with the scaling and the fields of DeepSeek-V3.
fn deepseek() -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 24,
        "intermediate_size": 20, "moe_intermediate_size": 8, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8,
        "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "first_k_dense_replace": 2, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 6, "rms_norm_eps": 1e-5, "rope_theta": 10_000,
        "max_position_embeddings": 163_840,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    })
}

/// Queries without a latent, and halves that rotate.
pub(super) fn descriptions() -> Vec<ModelConfig> {
    let mut direct = of_family("deepseek_v3").with_rope(|rope| rope.interleaved = false);
    for layer in direct.attention_layers_mut() {
        let latent = LatentConfig {
            q_rank: None,
            kv_rank: 5,
            rope_head_dim: 4,
            value_head_dim: 3,
            mscale_all_dim: 0.0,
        };
        (layer.head_dim, layer.latent) = (7 + 4, Some(latent));
    }
    let mut minicpm = of_family("minicpm3").with_num_layers(3);
    minicpm.multipliers = Multipliers { embedding: 12.0, residual: 1.4 / 3f64.sqrt(), logits: 8.0 / 24.0 };
    vec![direct, minicpm, kimi()]
}

/// Linear attention with decays per channel in the outer ones of three layers.
fn kimi() -> ModelConfig {
    let linear = LinearAttentionConfig {
        num_key_heads: 5,
        num_value_heads: 5,
        key_head_dim: 6,
        value_head_dim: 6,
        conv_width: 3,
        kind: LinearAttentionKind::KimiDelta,
    };
    of_family("kimi_linear").with_num_layers(3).with_mixer([true, false, true], linear)
}

#[test]
fn kimi_linear_has_linear_attention_in_the_layers_that_its_file_says_and_no_experts() {
    let mut json = kimi().to_hf_json();
    json["num_hidden_layers"] = json!(6);
    json["mlp_layer_types"] = json!(vec!["dense"; 6]);
    json.as_object_mut().unwrap().shift_remove("layer_types");
    let config = read(&json).unwrap();
    let is_linear: Vec<_> = config.layers.iter().map(|layer| layer.linear_attention().is_some()).collect();
    assert_eq!(is_linear, [true, true, true, true, false, true]);
    for (key, value) in [
        ("mlp_layer_types", json!(["dense", "sparse", "dense", "dense", "dense", "dense"])),
        ("mlp_layer_types", json!(vec!["dense"; 5])),
        ("mlp_layer_types", json!(null)),
        ("layer_types", json!(vec!["sliding_attention"; 6])),
        ("linear_num_heads", json!(0)),
        ("linear_conv_kernel_dim", json!(9)),
        ("num_key_value_heads", json!(1)),
        ("attention_bias", json!(true)),
    ] {
        let mut json = json.clone();
        json[key] = value;
        assert_refused(&json, key);
    }
}

#[test]
fn the_published_file_is_the_known_model() {
    let expected = shape("Youtu-LLM-2B").unwrap();
    assert_eq!(read(&youtu()).unwrap(), expected);
    let mut by_default = youtu();
    for key in ["rope_interleave", "tie_word_embeddings", "head_dim", "qk_head_dim"] {
        by_default.as_object_mut().unwrap().shift_remove(key);
    }
    assert_eq!(read(&by_default).unwrap(), expected);
    let interleaved = |json: &Value| read(json).unwrap().rope().unwrap().interleaved;
    by_default["rope_interleave"] = json!(null);
    assert!(!interleaved(&by_default), "null is false in Python");
    assert!(interleaved(&changed("deepseek_v2", "use_cache", Some(json!(true)))));
    assert!(!interleaved(&changed("minicpm3", "use_cache", Some(json!(true)))));
    let names: Vec<_> = (expected.family.block)(&expected, 0)
        .parameters()
        .iter()
        .map(|spec| spec.name.replace("model.layers.0.", "").replace(".weight", ""))
        .collect();
    let queries = "self_attn.q_a_proj self_attn.q_a_layernorm self_attn.q_b_proj";
    let others = "self_attn.kv_a_proj_with_mqa self_attn.kv_a_layernorm self_attn.kv_b_proj self_attn.o_proj";
    let rest = "mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm post_attention_layernorm";
    assert_eq!(names.join(" "), format!("{queries} {others} {rest}"));
}

#[test]
fn the_factor_on_the_logits_grows_with_the_scaling_as_in_transformers() {
    let config = read(&deepseek()).unwrap();
    let grown = 0.1 * 40f64.ln() + 1.0;
    let scale = config.attention().scale.unwrap();
    assert!((scale - grown * grown / 10f64.sqrt()).abs() < 1e-15, "{scale}");
    let Scaling::Yarn { attention_factor, .. } = config.rope().unwrap().scaling else { panic!("{config:?}") };
    assert_eq!(attention_factor, 1.0, "the same growth twice");
    assert_eq!(read(&config.to_hf_json()).unwrap(), config, "it comes back from its own file");
    // Without a factor, and without a scaling, which then has no effect.
    let mut json = deepseek();
    json["rope_scaling"]["mscale_all_dim"] = json!(0);
    assert_eq!(read(&json).unwrap().attention().scale, None);
    json["rope_scaling"] = json!({ "type": "default", "mscale_all_dim": 1.0 });
    assert_eq!(read(&json).unwrap().attention().scale, None);
    json["rope_scaling"] = json!({ "type": "linear", "factor": 4.0, "mscale_all_dim": 1.0 });
    assert_refused(&json, "rope_scaling");
}

#[test]
fn experts_and_heads_that_are_not_latent_are_refused() {
    for (key, value) in [
        ("first_k_dense_replace", json!(1)),
        ("first_k_dense_replace", json!(null)),
        ("num_key_value_heads", json!(1)),
        ("head_dim", json!(10)),
        ("qk_head_dim", json!(12)),
        ("qk_rope_head_dim", json!(3)),
        ("qk_nope_head_dim", json!(0)),
        ("v_head_dim", json!(11)),
        ("kv_lora_rank", json!(0)),
        ("attention_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("index_topk", json!(2048)),
    ] {
        let mut json = deepseek();
        json[key] = value;
        assert_refused(&json, key);
    }
    for key in ["q_lora_rank", "first_k_dense_replace", "num_key_value_heads", "v_head_dim"] {
        let mut json = deepseek();
        json.as_object_mut().unwrap().shift_remove(key);
        assert_refused(&json, key);
    }
    let error = shape("deepseek-ai/DeepSeek-V3").unwrap_err().to_string();
    assert!(error.contains("a mixture of experts"), "{error}");
}

#[test]
fn minicpm3_has_the_factors_of_the_first_model_by_default_and_1_if_null() {
    let mut json = of_family("minicpm3").to_hf_json();
    for key in ["scale_emb", "scale_depth", "dim_model_base", "v_head_dim"] {
        json.as_object_mut().unwrap().shift_remove(key);
    }
    let config = read(&json).unwrap();
    let expected = Multipliers { embedding: 12.0, residual: 1.4 / 2f64.sqrt(), logits: 256.0 / 24.0 };
    assert_eq!((config.multipliers, config.attention().value_head_dim()), (expected, 6));
    for key in ["scale_depth", "dim_model_base"] {
        json[key] = json!(null);
    }
    let Multipliers { residual, logits, .. } = read(&json).unwrap().multipliers;
    assert_eq!([residual, logits], [1.0, 1.0]);
    for (key, value) in [("scale_depth", json!(0)), ("dim_model_base", json!(0)), ("scale_emb", json!(-1))] {
        assert_refused(&changed("minicpm3", key, Some(value)), key);
    }
}
