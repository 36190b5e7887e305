//! Rotary embeddings in `config.json`.

use super::*;

#[test]
fn scaling_is_read_as_written_by_every_version_of_transformers() {
    let llama = |key: &str, value: Value| read(&changed("llama", key, Some(value)));
    let old = llama("rope_scaling", json!({ "type": "linear", "factor": 2 })).unwrap();
    assert_eq!(old.rope().unwrap().scaling, Scaling::Linear { factor: 2.0 });
    let new = json!({ "rope_type": "linear", "factor": 2.0, "rope_theta": 5e5 });
    let new = llama("rope_parameters", new).unwrap().attention_layers().nth(1).unwrap().rope.unwrap();
    assert_eq!((new.theta, new.scaling), (5e5, Scaling::Linear { factor: 2.0 }));

    // What yarn leaves out has the paper's values, and the model's own length.
    let mut json = changed("qwen3", "max_position_embeddings", Some(json!(2048)));
    json["rope_scaling"] = json!({ "rope_type": "yarn", "factor": 4.0, "beta_fast": null });
    let Scaling::Yarn { beta_fast, beta_slow, truncate, attention_factor, original_len, .. } =
        read(&json).unwrap().rope().unwrap().scaling
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
        json!({ "rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 64 }),
        json!({
            "rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 64,
            "short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 1],
        }),
        json!({ "rope_type": "default", "partial_rotary_factor": 0.5 }),
        json!({ "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": null }),
        json!({ "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": 0 }),
        json!({ "rope_type": "linear", "factor": 2.0, "attn_factor": 1.5 }),
        json!({ "full_attention": { "rope_type": "linear", "factor": 2.0 } }),
        json!({ "rope_type": "linear", "factor": 2.0, "warmup": 3 }),
    ] {
        assert_refused(&changed("llama", "rope_scaling", Some(scaling)), "rope_scaling");
    }
    let dynamic = json!({ "rope_type": "dynamic", "factor": 2.0 });
    assert_refused(&changed("llama", "rope_scaling", Some(dynamic)), "max_position_embeddings");
}

#[test]
fn phi_is_read_as_published() {
    let long = json!({ "type": "longrope", "short_factor": [1, 1, 1], "long_factor": [1.5, 2, 4] });
    let mut json = changed("phi3", "rope_scaling", Some(long));
    json["partial_rotary_factor"] = json!(0.75);
    json["max_position_embeddings"] = json!(512);
    assert_refused(&json, "original_max_position_embeddings");
    json["original_max_position_embeddings"] = json!(128);
    let rope = read(&json).unwrap().rope().unwrap();
    let Scaling::LongRope { short_factor, long_factor, attention_factor, original_len } = rope.scaling else {
        panic!("longrope was asked for")
    };
    assert_eq!((rope.partial_rotary_factor, rope.interleaved, original_len), (0.75, false, 128));
    assert_eq!((short_factor, long_factor), (&[1.0; 3][..], &[1.5, 2.0, 4.0][..]));
    assert_eq!(attention_factor, (1.0 + 4f64.ln() / 128f64.ln()).sqrt());
    let written = read(&json).unwrap().to_hf_json();
    assert_eq!(written["max_position_embeddings"], 512);
    assert_eq!(written["rope_scaling"].as_object().unwrap().len(), 3);
    json["partial_rotary_factor"] = json!(1.0);
    assert_refused(&json, "rope_scaling");
}

#[test]
fn ministral_3_is_read_as_published() {
    let mut json = of_family("ministral3").to_hf_json();
    let published = json!({
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6, "rope_type": "yarn",
        "type": "yarn", "max_position_embeddings": 262_144,
    });
    json["rope_parameters"] = published.clone();
    json.as_object_mut().unwrap().shift_remove("rope_scaling");
    assert_eq!(read(&json).unwrap(), of_family("ministral3"), "by default");
    for (key, value) in
        [("llama_4_scaling_beta", json!(null)), ("rope_type", json!("default")), ("attn_factor", json!(2.0))]
    {
        json["rope_parameters"] = published.clone();
        json["rope_parameters"][key] = value;
        assert_refused(&json, "rope_parameters");
    }
    let growth = json!({ "rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1 });
    assert_refused(&changed("mistral", "rope_scaling", Some(growth)), "rope_scaling");
}

#[test]
fn the_part_that_rotates_is_that_of_the_object_the_top_level_or_the_family() {
    let part = |json: &Value| read(json).unwrap().rope().unwrap().partial_rotary_factor;
    let mut json = changed("glm4", "partial_rotary_factor", None);
    assert_eq!(part(&json), 0.5);
    json["partial_rotary_factor"] = json!(0.75);
    assert_eq!(part(&json), 0.75);
    json["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 10.0 });
    assert_eq!(part(&json), 0.75);
    json["rope_parameters"]["partial_rotary_factor"] = json!(0.25);
    assert_eq!(part(&json), 0.25);
    for invalid in [json!(0.4), json!(1.5), json!(0)] {
        let json = changed("glm4", "partial_rotary_factor", Some(invalid));
        assert_refused(&json, "rope_scaling");
    }
    assert_refused(&changed("glm4", "partial_rotary_factor", Some(json!(null))), "partial_rotary_factor");
    assert_refused(&changed("llama", "partial_rotary_factor", Some(json!(0.5))), "partial_rotary_factor");
    let bias = |json: &Value| read(json).unwrap().attention().qkv_bias;
    assert!(bias(&changed("glm4", "attention_bias", None)), "by default");
    assert!(!bias(&changed("glm4", "attention_bias", Some(json!(null)))));
}

#[test]
fn an_invalid_top_level_length_is_refused_where_it_is_used() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64
    });
    let mut json = changed("llama", "rope_scaling", Some(llama3));
    for length in [json!(null), json!(0), json!("64"), json!(-1)] {
        json["original_max_position_embeddings"] = length;
        assert_refused(&json, "original_max_position_embeddings");
    }
    json["rope_scaling"] = json!({ "rope_type": "linear", "factor": 2.0 });
    assert!(read(&json).is_ok());
}

#[test]
fn a_theta_in_the_object_replaces_a_missing_top_level_one() {
    let mut json = changed("llama", "rope_theta", Some(Value::Null));
    assert_refused(&json, "rope_theta");
    json["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 5e5 });
    assert_eq!(read(&json).unwrap().rope().unwrap().theta, 5e5);
}
