//! Descriptions and parameters of the families other than Llama.

use super::*;
use serde_json::{Value, json};
use ulysses_kernels::rope::Scaling;

const FAMILIES: [Architecture; 5] = [
    Architecture::Llama,
    Architecture::Mistral { sliding_window: None },
    Architecture::Mistral { sliding_window: Some(7) },
    Architecture::Qwen2,
    Architecture::Qwen3,
];

fn read(json: &Value) -> std::result::Result<LlamaConfig, ModelError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    LlamaConfig::from_hf_dir(dir.path())
}

/// A family's description, changed by one key; `None` removes it.
fn changed(architecture: Architecture, key: &str, value: Option<Value>) -> Value {
    let mut json = LlamaConfig { architecture, ..config() }.to_hf_json();
    let object = json.as_object_mut().unwrap();
    match value {
        Some(value) => drop(object.insert(key.to_owned(), value)),
        None => drop(object.shift_remove(key)),
    }
    json
}

#[track_caller]
fn assert_refused(json: &Value, key: &str) {
    let error = read(json).unwrap_err().to_string();
    assert!(error.contains(&format!("`{key}`")), "{error}");
}

#[test]
fn every_family_and_scaling_round_trips() {
    let original_len = 128;
    let scalings = [
        Scaling::None,
        Scaling::Linear { factor: 2.5 },
        Scaling::Dynamic { factor: 2.0, original_len },
        Scaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len },
        Scaling::Yarn {
            factor: 4.0,
            beta_fast: 16.0,
            beta_slow: 2.0,
            truncate: false,
            attention_factor: 1.25,
            original_len,
        },
    ];
    for architecture in FAMILIES {
        for rope_scaling in scalings {
            let config = LlamaConfig { architecture, rope_scaling, ..config() };
            assert_eq!(read(&config.to_hf_json()).unwrap(), config);
        }
    }
}

#[test]
fn the_families_differ_in_their_parameters() {
    let added = |architecture| {
        let layer = DecoderLayer::new(&LlamaConfig { architecture, ..config() }, 1);
        let added = layer.parameters()[9..].iter();
        added.map(|spec| (spec.name.clone(), spec.shape.clone(), spec.init)).collect::<Vec<_>>()
    };
    let spec = |part: &str, size, init| (format!("model.layers.1.self_attn.{part}"), vec![size], init);
    let LlamaConfig { num_heads, num_kv_heads, head_dim, .. } = config();
    let (q, kv) = (num_heads * head_dim, num_kv_heads * head_dim);
    let biases =
        [("q_proj.bias", q), ("k_proj.bias", kv), ("v_proj.bias", kv)].map(|(p, n)| spec(p, n, Init::Zeros));
    assert_eq!(added(Architecture::Llama), []);
    assert_eq!(added(Architecture::Mistral { sliding_window: Some(7) }), []);
    assert_eq!(added(Architecture::Qwen2), biases);
    assert_eq!(
        added(Architecture::Qwen3),
        ["q_norm.weight", "k_norm.weight"].map(|p| spec(p, head_dim, Init::Ones))
    );
}

#[test]
fn another_number_of_parameters_is_refused() {
    for architecture in FAMILIES {
        let config = LlamaConfig { architecture, ..config() };
        let layer = DecoderLayer::new(&config, 0);
        let mut params: Vec<Tensor> = layer.parameters().iter().map(|spec| random(&spec.shape, 0)).collect();
        let x = random(&[1, 3, config.hidden_size], 1);
        layer.forward(&params, &x, &context(1, 3)).unwrap();
        params.push(x.clone());
        let more = layer.forward(&params, &x, &context(1, 3)).err().unwrap();
        params.truncate(params.len() - 2);
        let fewer = layer.forward(&params, &x, &context(1, 3)).err().unwrap();
        for error in [more, fewer] {
            assert!(matches!(error, LayerError::ParameterCount { .. }), "{architecture:?}: {error}");
        }
    }
}

#[test]
fn an_unused_window_of_qwen_is_none() {
    for architecture in [Architecture::Qwen2, Architecture::Qwen3] {
        let mut json = changed(architecture, "sliding_window", Some(json!(4096)));
        assert_eq!(read(&json).unwrap().architecture, architecture);
        json["layer_types"] = json!(["full_attention", "full_attention"]);
        assert_eq!(read(&json).unwrap().architecture, architecture);
        json["use_sliding_window"] = json!(true);
        assert_refused(&json, "use_sliding_window");
        let mixed = json!(["full_attention", "sliding_attention"]);
        assert_refused(&changed(architecture, "layer_types", Some(mixed)), "layer_types");
    }
}

#[test]
fn mistral_has_the_window_of_its_first_model_by_default() {
    let mistral = Architecture::Mistral { sliding_window: None };
    let window = |json: &Value| read(json).unwrap().architecture.sliding_window();
    assert_eq!(window(&changed(mistral, "sliding_window", None)), Some(4096));
    assert_eq!(window(&changed(mistral, "sliding_window", Some(Value::Null))), None);
    assert_refused(&changed(mistral, "sliding_window", Some(json!(0))), "sliding_window");
}

#[test]
fn sizes_that_a_family_takes_from_its_first_model_must_be_given() {
    assert_refused(&changed(Architecture::Qwen2, "num_key_value_heads", None), "num_key_value_heads");
    assert_refused(&changed(Architecture::Qwen3, "head_dim", None), "head_dim");
    assert!(read(&changed(Architecture::Qwen2, "head_dim", None)).is_ok());
}

#[test]
fn a_class_that_is_not_the_familys_is_refused() {
    let classes = json!(["Qwen2ForSequenceClassification"]);
    assert_refused(&changed(Architecture::Qwen2, "architectures", Some(classes)), "architectures");
    assert_refused(&changed(Architecture::Qwen2, "model_type", Some(json!("llama"))), "architectures");
}

#[test]
fn scaling_is_read_as_written_by_every_version_of_transformers() {
    let llama = |key: &str, value: Value| read(&changed(Architecture::Llama, key, Some(value)));
    let old = llama("rope_scaling", json!({ "type": "linear", "factor": 2 })).unwrap();
    assert_eq!(old.rope_scaling, Scaling::Linear { factor: 2.0 });
    let new = json!({ "rope_type": "linear", "factor": 2.0, "rope_theta": 5e5 });
    let new = llama("rope_parameters", new).unwrap();
    assert_eq!((new.rope_theta, new.rope_scaling), (5e5, Scaling::Linear { factor: 2.0 }));

    // What yarn leaves out has the paper's values, and the model's own length.
    let mut json = changed(Architecture::Qwen3, "max_position_embeddings", Some(json!(2048)));
    json["rope_scaling"] = json!({ "rope_type": "yarn", "factor": 4.0, "beta_fast": null });
    let Scaling::Yarn { beta_fast, beta_slow, truncate, attention_factor, original_len, .. } =
        read(&json).unwrap().rope_scaling
    else {
        panic!("yarn was asked for")
    };
    assert_eq!((beta_fast, beta_slow, truncate, original_len), (32.0, 1.0, true, 2048));
    assert!((attention_factor - 1.138_629_436_111_989).abs() < 1e-15, "{attention_factor}");
}

#[test]
fn scalings_that_are_incomplete_or_unknown_are_refused() {
    for scaling in [
        json!("linear"),
        json!({ "rope_type": "linear" }),
        json!({ "rope_type": "linear", "factor": -1.0 }),
        json!({ "rope_type": "linear", "factor": "4" }),
        json!({ "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64 }),
        json!({ "rope_type": "yarn", "original_max_position_embeddings": 64 }),
        json!({ "rope_type": "longrope", "factor": 8.0 }),
        json!({ "rope_type": "default", "partial_rotary_factor": 0.5 }),
        json!({ "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": null }),
        json!({ "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": 0 }),
        json!({ "rope_type": "linear", "factor": 2.0, "attn_factor": 1.5 }),
        json!({ "full_attention": { "rope_type": "linear", "factor": 2.0 } }),
    ] {
        assert_refused(&changed(Architecture::Llama, "rope_scaling", Some(scaling)), "rope_scaling");
    }
    let dynamic = json!({ "rope_type": "dynamic", "factor": 2.0 });
    assert_refused(&changed(Architecture::Llama, "rope_scaling", Some(dynamic)), "max_position_embeddings");
}

#[test]
fn an_invalid_top_level_length_is_refused_where_it_is_used() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64
    });
    let mut json = changed(Architecture::Llama, "rope_scaling", Some(llama3));
    for length in [json!(null), json!(0), json!("64"), json!(-1)] {
        json["original_max_position_embeddings"] = length;
        assert_refused(&json, "original_max_position_embeddings");
    }
    json["rope_scaling"] = json!({ "rope_type": "linear", "factor": 2.0 });
    assert!(read(&json).is_ok());
}

#[test]
fn a_theta_in_the_object_replaces_a_missing_top_level_one() {
    let mut json = changed(Architecture::Llama, "rope_theta", Some(Value::Null));
    assert_refused(&json, "rope_theta");
    json["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 5e5 });
    assert_eq!(read(&json).unwrap().rope_theta, 5e5);
}
