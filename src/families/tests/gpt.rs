//! GPT-2, GPT-NeoX and their relatives.

use super::*;

#[test]
fn the_blocks_of_gpt_have_the_parameters_of_their_published_checkpoints() {
    let shapes = |config: ModelConfig| {
        let layer = (config.family.block)(&config, 1);
        let shape = |spec: &ParameterSpec| format!("{} {:?}", spec.name, spec.shape);
        layer.parameters().iter().map(shape).collect::<Vec<_>>()
    };
    let weights_of_gpt2 = [
        ("attn.c_attn", "24, 72"),
        ("attn.c_proj", "24, 24"),
        ("mlp.c_fc", "24, 20"),
        ("mlp.c_proj", "20, 24"),
    ];
    let biases_of_gpt2 = [("attn.c_attn", 72), ("attn.c_proj", 24), ("mlp.c_fc", 20), ("mlp.c_proj", 24)];
    let expected = |layer: &str, weights: [(&str, &str); 4], norms: [&str; 2], biases: [(&str, usize); 4]| {
        let weights = weights.map(|(name, shape)| format!("{layer}.{name}.weight [{shape}]"));
        let norms = norms
            .into_iter()
            .flat_map(|norm| ["weight", "bias"].map(|part| format!("{layer}.{norm}.{part} [24]")));
        let biases = biases.map(|(name, size)| format!("{layer}.{name}.bias [{size}]"));
        weights.into_iter().chain(norms).chain(biases).collect::<Vec<_>>()
    };
    assert_eq!(
        shapes(of_family("gpt2")),
        expected("transformer.h.1", weights_of_gpt2, ["ln_1", "ln_2"], biases_of_gpt2)
    );
    let weights = [
        ("attention.query_key_value", "72, 24"),
        ("attention.dense", "24, 24"),
        ("mlp.dense_h_to_4h", "20, 24"),
        ("mlp.dense_4h_to_h", "24, 20"),
    ];
    let biases = [72, 24, 20, 24].into_iter().zip(weights).map(|(size, (name, _))| (name, size));
    let biases: Vec<_> = biases.collect();
    let norms = ["input_layernorm", "post_attention_layernorm"];
    let expected = expected("gpt_neox.layers.1", weights, norms, biases.try_into().unwrap());
    let neox = read(&changed("gpt_neox", "attention_bias", None)).unwrap();
    assert_eq!(shapes(neox), expected);
}

#[test]
fn what_gpt_and_its_relatives_do_not_compute_here_is_refused() {
    let cases = [
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true)),
        ("gpt2", "scale_attn_weights", json!(false)),
        ("gpt2", "activation_function", json!("relu")),
        ("gpt2", "n_head", json!(5)),
        ("gpt_neox", "use_parallel_residual", json!(false)),
        ("gpt_neox", "hidden_act", json!("gelu_fast")),
        ("gpt_neox", "rope_theta", json!(1e6)),
        ("gpt_neox", "num_attention_heads", json!(7)),
        ("gptj", "activation_function", json!("gelu")),
        ("gptj", "n_head", json!(5)),
        ("gptj", "rotary_dim", json!(null)),
        ("gptj", "rotary_dim", json!(0)),
        ("gptj", "rotary_dim", json!(3)),
        ("gptj", "rotary_dim", json!(10)),
        ("gptj", "rope_scaling", json!({ "rope_type": "linear", "factor": 2.0 })),
        ("phi", "hidden_act", json!("gelu")),
        ("phi", "num_attention_heads", json!(5)),
        ("starcoder2", "hidden_act", json!("gelu")),
        ("nemotron", "hidden_act", json!("silu")),
        ("stablelm", "use_parallel_residual", json!(true)),
        ("stablelm", "qk_layernorm", json!(true)),
        ("stablelm", "num_attention_heads", json!(5)),
    ];
    for (family, key, value) in cases {
        assert_refused(&changed(family, key, Some(value)), key);
    }
    for (family, key) in [
        ("gpt2", "layer_norm_epsilon"),
        ("gptj", "layer_norm_epsilon"),
        ("gpt_neox", "layer_norm_eps"),
        ("starcoder2", "norm_epsilon"),
        ("nemotron", "norm_eps"),
        ("stablelm", "layer_norm_eps"),
        ("phi", "layer_norm_eps"),
        ("cohere", "layer_norm_eps"),
        ("lfm2", "norm_eps"),
        ("llama", "rms_norm_eps"),
    ] {
        assert_refused(&changed(family, key, Some(json!(-1e-5))), key);
    }
    assert_eq!(
        read(&changed("phi", "partial_rotary_factor", None)).unwrap().rope().unwrap().partial_rotary_factor,
        0.5
    );
    assert!(read(&changed("starcoder2", "use_bias", None)).unwrap().mlp_bias, "by default");
}
