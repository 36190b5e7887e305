//! Descriptions of Nemotron-H.

use super::*;
use crate::model::{RandomWeights, WeightSource};
use crate::nn::Mamba2Config;

/// All kinds of layers, with and without biases.
pub(super) fn descriptions() -> [ModelConfig; 2] {
    let config = of_family("nemotron_h").with_num_layers(4);
    [(false, 2), (true, 1)].map(|(biases, groups)| {
        let least = if biases { 0.25 } else { 0.0 };
        let mamba = LinearAttentionConfig {
            num_key_heads: groups,
            num_value_heads: 6,
            key_head_dim: 5,
            value_head_dim: 8,
            conv_width: 3,
            kind: LinearAttentionKind::Mamba2(Mamba2Config {
                time_step_limits: [least, f64::INFINITY],
                time_step_bias: Init::TimeSteps { bounds: [least, 0.4], floor: 0.02 },
                conv_bias: !biases,
                projection_bias: biases,
            }),
        };
        let config = config.clone().with_mixer([true, false, false, true], mamba);
        let config = config.with_mixer([false, biases, !biases, false], MixerConfig::Mlp);
        ModelConfig { mlp_bias: biases, ..config }
    })
}

#[test]
fn the_factor_on_a_branch_is_that_of_attention_and_mlps_too() {
    let config = &descriptions()[0];
    for index in 0..4 {
        let run = |residual: f64, recomputed: bool| {
            let multipliers = Multipliers { residual, ..config.multipliers };
            let layer = (config.family.block)(&ModelConfig { multipliers, ..config.clone() }, index);
            let params: Vec<_> = layer.parameters().iter().map(|spec| random(&spec.shape, 0)).collect();
            let grads: Vec<_> = params.iter().map(|param| Some(param.zeros_like().unwrap())).collect();
            let (x, dy) = (random(&[1, 3, config.hidden_size], 1), random(&[1, 3, config.hidden_size], 2));
            let (ctx, saved_dy) = (context(1, 3), dy.copy().unwrap());
            let (y, dx) = if recomputed {
                let (y, checkpoint) = layer.forward_checkpointed(&params, x.clone(), &ctx).unwrap();
                (y, layer.backward_checkpointed(&params, checkpoint, dy, &grads, &ctx).unwrap())
            } else {
                let (y, saved) = layer.forward(&params, &x, &ctx).unwrap();
                (y, layer.backward(&params, saved, dy, &grads, &ctx).unwrap())
            };
            let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let gradients: Vec<f32> = grads.into_iter().flatten().flat_map(values).collect();
            [values((y - x).unwrap()), values((dx - saved_dy).unwrap()), gradients]
        };
        let whole = run(1.0, false);
        for halved in [run(0.5, false), run(0.5, true)] {
            for (whole, halved) in whole.iter().zip(&halved) {
                let largest = whole.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                assert!(largest > 0.1, "{:?}", config.layers[index]);
                let is_half = |(whole, halved): (&f32, &f32)| (halved - 0.5 * whole).abs() < 1e-4 * largest;
                assert!(whole.iter().zip(halved).all(is_half), "{:?}", config.layers[index]);
            }
        }
    }
}

/// With fields of kernels, of initial values and of code of its own, as Python writes it.
const PUBLISHED: &str = r#"{
    "architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attention_head_dim": 128, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2,
    "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "initializer_range": 0.02, "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "license": "\"Infinity\\",
    "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": false,
    "max_position_embeddings": 8192, "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
    "n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8,
    "num_logits_to_keep": 1, "rescale_prenorm_residual": true, "residual_in_fp32": false, "rms_norm_eps": 1e-05,
    "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001, "use_bias": false,
    "use_conv_bias": true, "use_mamba_kernels": true, "vocab_size": 131072
}"#;

fn published() -> Value {
    serde_json::from_str(&PUBLISHED.replace(", Infinity]", r#", {"__float__": "Infinity"}]"#)).unwrap()
}

/// The names of layer types, in the versions of transformers.
fn types(pattern: &str, [mamba, attention]: [&str; 2]) -> Value {
    let name = |kind| match kind {
        'M' => mamba,
        '*' => attention,
        _ => "mlp",
    };
    pattern.chars().map(name).collect()
}

#[test]
fn the_published_file_is_the_known_model() {
    let expected = shape("nvidia/Nemotron-H-8B-Base-8K").unwrap();
    assert_eq!(read(&published()).unwrap(), expected);
    for names in [["mamba", "attention"], ["linear_attention", "full_attention"]] {
        let mut json = published();
        json["layers_block_type"] = types(json["hybrid_override_pattern"].as_str().unwrap(), names);
        for key in ["hybrid_override_pattern", "num_hidden_layers", "time_step_limit"] {
            json.as_object_mut().unwrap().shift_remove(key);
        }
        assert_eq!(read(&json).unwrap(), expected);
        // A second name, which counts if both are there.
        json["layer_types"] = std::mem::replace(&mut json["layers_block_type"], json!(["mlp", "attention"]));
        assert_eq!(read(&json).unwrap(), expected);
    }
    let names = |index| {
        let layer = (expected.family.block)(&expected, index);
        let prefix = format!("backbone.layers.{index}.");
        let name = |spec: &ParameterSpec| spec.name.replace(&prefix, "").replace(".weight", "");
        layer.parameters().iter().map(name).collect::<Vec<_>>().join(" ")
    };
    let mamba = "in_proj out_proj conv1d conv1d.bias dt_bias A_log D norm".replace(' ', " mixer.");
    assert_eq!(names(0), format!("mixer.{mamba} norm"));
    assert_eq!(names(1), "mixer.up_proj mixer.down_proj norm");
    assert_eq!(names(7), "mixer.q_proj mixer.k_proj mixer.v_proj mixer.o_proj norm");
}

/// As transformers draws them; Granite's are softplus(1).
#[test]
fn time_steps_of_a_new_model_are_log_uniform_within_their_bounds() {
    let steps = |least: f64, floor: f64| {
        let mut json = published();
        (json["time_step_min"], json["time_step_floor"]) = (json!(least), json!(floor));
        let config = read(&json).unwrap();
        let layer = (config.family.block)(&config, 0);
        let spec = layer.parameters().iter().find(|spec| spec.name.ends_with("dt_bias")).unwrap();
        let mut biases = vec![0.0; spec.numel()];
        RandomWeights { seed: 1 }.read(spec, 0..spec.numel(), &mut biases).unwrap();
        biases.into_iter().map(|bias| f64::from(bias).exp().ln_1p()).collect::<Vec<_>>()
    };
    let drawn = steps(0.001, 1e-4);
    assert!(drawn.iter().all(|step| (0.000_999..0.1001).contains(step)), "{drawn:?}");
    // Half of the logarithms are below the mean of those of the bounds: of 128, 64 ± 23 are.
    let small = drawn.iter().filter(|step| **step < 0.01).count();
    assert!((41..=87).contains(&small), "{small}");
    let clamped = steps(0.001, 0.02);
    let pairs = || drawn.iter().zip(&clamped);
    assert!(pairs().all(|(drawn, clamped)| (drawn.max(0.02) / clamped - 1.0).abs() < 1e-4), "{clamped:?}");
    assert!(steps(0.0, 0.02).iter().all(|step| (0.0199..0.1001).contains(step)));
}

#[test]
fn heads_that_do_not_rotate_may_have_an_odd_size() {
    let mut json = published();
    (json["head_dim"], json["attention_head_dim"]) = (json!(127), json!(127));
    assert_eq!(read(&json).unwrap().attention().head_dim, 127);
    assert_refused(&changed("llama", "head_dim", Some(json!(7))), "head_dim");
}

/// In strings it is a word as any other.
#[test]
fn an_infinity_as_python_writes_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    assert!(serde_json::from_str::<Value>(PUBLISHED).is_err());
    std::fs::write(dir.path().join("config.json"), PUBLISHED).unwrap();
    assert_eq!(ModelConfig::from_hf_dir(dir.path()).unwrap(), read(&published()).unwrap());
}

#[test]
fn what_is_not_a_dense_hybrid_of_nemotron_is_refused() {
    for (key, value) in [
        ("hybrid_override_pattern", json!("ME*E")),
        ("hybrid_override_pattern", json!("M-M-")),
        ("hybrid_override_pattern", json!("M-*x")),
        ("hybrid_override_pattern", json!(null)),
        ("layers_block_type", json!(["mamba", "moe", "attention"])),
        ("layers_block_type", json!(["mamba", "conv", "attention"])),
        ("layers_block_type", json!("M-*")),
        ("layer_types", json!(["mamba", "moe", "attention"])),
        ("layer_types", json!(["mlp"])),
        ("layer_norm_epsilon", json!(-1e-5)),
        ("num_hidden_layers", json!(51)),
        ("attention_bias", json!(true)),
        ("attention_head_dim", json!(64)),
        ("conv_kernel", json!(9)),
        ("mamba_hidden_act", json!("gelu")),
        ("mamba_num_heads", json!(0)),
        ("mlp_hidden_act", json!("silu")),
        ("n_groups", json!(5)),
        ("norm_eps", json!(1e-6)),
        ("num_nextn_predict_layers", json!(1)),
        ("residual_in_fp32", json!(true)),
        ("rms_norm_eps", json!(1e-6)),
        ("sliding_window", json!(512)),
        ("tie_word_embeddings", json!(true)),
        ("time_step_limit", json!([0.0, 0.1])),
        ("time_step_floor", json!(0.0)),
        ("time_step_max", json!(-0.1)),
        ("time_step_min", json!(-1.0)),
    ] {
        let mut json = published();
        json[key] = value;
        assert_refused(&json, key);
    }
}
