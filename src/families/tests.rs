//! Descriptions and parameters of the families.

mod gemma;
mod gpt;
mod granite;
mod latent;
mod lfm2;
mod llama4;
mod nemotron;
mod qwen_hybrids;
mod rope;

use super::*;
use crate::model::Model;
use crate::nn::tests::{context, random};
use crate::nn::{
    AttentionConfig, Init, LayerError, LinearAttentionConfig, LinearAttentionKind, MixerConfig,
    ParameterSpec, QkNorm, ShortConvConfig,
};
use candle_core::Tensor;
use serde_json::{Value, json};
use ulysses_kernels::rope::{Rope, Scaling, kept_list};

pub(crate) fn config() -> ModelConfig {
    let nano = preset("nano").unwrap().with_attention(|layer| layer.head_dim = 8);
    ModelConfig { hidden_size: 24, intermediate_size: 20, ..nano }
}

/// A description with the defaults of its family.
fn of_family(model_type: &str) -> ModelConfig {
    // The files of GPT-J and Phi have no size of heads, of which a part rotates.
    let hidden_size = if ["gptj", "phi"].contains(&model_type) { 32 } else { 24 };
    read(&ModelConfig { family: family(model_type).unwrap(), hidden_size, ..config() }.to_hf_json()).unwrap()
}

/// A description of each family, and those with layers that differ or with windows.
fn descriptions() -> Vec<ModelConfig> {
    let windowed =
        ["mistral", "phi3"].map(|family| of_family(family).with_attention(|layer| layer.window = Some(7)));
    let upper_windowed = ["qwen2", "qwen3", "gemma2", "gemma3_text", "ministral", "olmo3"].map(|family| {
        let mut config = of_family(family);
        config.attention_layers_mut().nth(1).unwrap().window = Some(7);
        config
    });
    let mut partly_rotated = of_family("smollm3");
    partly_rotated.attention_layers_mut().next().unwrap().rope = None;
    let mut granite = of_family("granite").with_attention(|layer| layer.scale = Some(0.015));
    granite.multipliers = Multipliers { embedding: 12.0, residual: 0.22, logits: 1.0 / 16.0 };
    let capped = of_family("gemma2").with_attention(|layer| layer.softcap = Some(20.5));
    let capped = ModelConfig { final_softcap: Some(12.0), ..capped };
    let gemma = of_family("gemma3_text").with_attention(|layer| layer.scale = Some(1.0 / 168f64.sqrt()));
    let mut gemma4 = of_family("gemma4_text").with_num_layers(3);
    for (index, layer) in gemma4.attention_layers_mut().enumerate() {
        match index {
            1 => (layer.window, layer.head_dim, layer.rope) = (Some(7), 4, Some(500.0.into())),
            _ => (layer.num_kv_heads, layer.values_from_keys) = (1, true),
        }
    }
    let mut exaone = of_family("exaone4");
    exaone.attention_layers_mut().next().unwrap().window = Some(7);
    exaone.attention_layers_mut().nth(1).unwrap().rope = None;
    let glm = of_family("glm4").with_rope(|rope| rope.partial_rotary_factor = 0.5);
    let glm_with_biases = of_family("glm").with_attention(|layer| layer.qkv_bias = true);
    let phi = of_family("phi3").with_rope(|rope| rope.partial_rotary_factor = 0.75);
    let mut qwen = of_family("qwen3_5_text").with_num_layers(3);
    let [num_key_heads, num_value_heads, conv_width] = [2, 6, 3];
    let linear = LinearAttentionConfig {
        num_key_heads,
        num_value_heads,
        key_head_dim: 4,
        value_head_dim: 8,
        conv_width,
        kind: LinearAttentionKind::GatedDeltaNet,
    };
    qwen.layers[0] = MixerConfig::LinearAttention(linear);
    let qwen_next = ModelConfig { family: family("qwen3_next").unwrap(), ..qwen.clone() };
    let lfm = of_family("lfm2").with_num_layers(3);
    let conv = ShortConvConfig { channels: lfm.hidden_size, taps: 4, bias: true };
    let lfm = lfm.with_mixer([true, false, true], conv);
    let hybrids = granite::descriptions().into_iter().chain(nemotron::descriptions());
    let hybrids = hybrids.chain(latent::descriptions()).chain(llama4::descriptions());
    let mut cohere = of_family("cohere2");
    cohere.attention_layers_mut().next().unwrap().rope = Some(Rope { interleaved: true, ..300.0.into() });
    cohere.attention_layers_mut().next().unwrap().window = Some(7);
    cohere.multipliers.logits = 0.25;
    let phi1 = of_family("phi").with_rope(|rope| rope.partial_rotary_factor = 0.75);
    let phi1 = phi1.with_attention(|layer| layer.qk_norm = Some(QkNorm::Head));
    let gptj = of_family("gptj").with_rope(|rope| rope.partial_rotary_factor = 0.5);
    let neox = of_family("gpt_neox")
        .with_attention(|layer| (layer.qkv_bias, layer.o_bias) = (false, false))
        .with_rope(|rope| rope.partial_rotary_factor = 0.67);
    let [ernie, nemotron] = ["ernie4_5", "nemotron"].map(|family| {
        let config = of_family(family).with_attention(|layer| (layer.qkv_bias, layer.o_bias) = (true, true));
        ModelConfig { mlp_bias: true, ..config }
    });
    let starcoder = of_family("starcoder2")
        .with_attention(|layer| (layer.window, layer.qkv_bias, layer.o_bias) = (Some(7), false, false));
    let starcoder = ModelConfig { mlp_bias: false, ..starcoder };
    let others =
        [cohere, partly_rotated, granite, capped, gemma, gemma4, exaone, glm, glm_with_biases, phi, qwen];
    let others = others
        .into_iter()
        .chain([qwen_next, phi1, gptj, neox, ernie, nemotron, starcoder, lfm])
        .chain(hybrids);
    let plain = FAMILIES.iter().map(|family| of_family(family.model_type));
    plain.chain(windowed).chain(upper_windowed).chain(others).collect()
}

fn read(json: &Value) -> std::result::Result<ModelConfig, ModelError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    ModelConfig::from_hf_dir(dir.path())
}

/// A family's description, changed by one key; `None` removes it.
fn changed(model_type: &str, key: &str, value: Option<Value>) -> Value {
    let mut json = of_family(model_type).to_hf_json();
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
    for config in descriptions() {
        let AttentionConfig { head_dim, latent, .. } = *config.attention();
        let head_dim = latent.map_or(head_dim, |latent| latent.rope_head_dim);
        let pairs = config.rope().map_or(head_dim, |rope| rope.rotary_dim(head_dim)) / 2;
        // The factor is that of transformers for four times the positions, or another.
        let long = [(1.0 + 4f64.ln() / 128f64.ln()).sqrt(), 1.75].map(|attention_factor| {
            let [short_factor, long_factor] = [[1.0, 1.5, 2.0, 4.0], [1.25, 2.0, 8.0, 16.0]];
            let [short_factor, long_factor] =
                [short_factor, long_factor].map(|list| kept_list(&list[..pairs]));
            Scaling::LongRope { short_factor, long_factor, attention_factor, original_len }
        });
        for scaling in scalings.into_iter().chain(long) {
            match (config.family.model_type, scaling) {
                ("phi3", Scaling::None | Scaling::LongRope { .. })
                | ("ministral3", Scaling::Yarn { .. })
                | ("gptj", Scaling::None) => {}
                // They have no others.
                ("phi3" | "ministral3" | "gptj", _)
                | ("llama4_text", Scaling::Yarn { .. } | Scaling::LongRope { .. }) => continue,
                _ => {}
            }
            // Of these, layers with a window have no scaling.
            let config = config.clone().with_attention(|layer| match &mut layer.rope {
                Some(rope)
                    if rope.rotates()
                        && (layer.window.is_none()
                            || !["gemma3_text", "gemma4_text", "olmo3"]
                                .contains(&config.family.model_type)) =>
                {
                    rope.scaling = scaling;
                }
                _ => {}
            });
            assert_eq!(read(&config.to_hf_json()).unwrap(), config);
        }
    }
}

#[test]
fn the_families_differ_in_their_parameters() {
    let added = |config: &ModelConfig| {
        let layer = (config.family.block)(config, 1);
        let added = layer.parameters()[9..].iter();
        added.map(|spec| (spec.name.clone(), spec.shape.clone(), spec.init)).collect::<Vec<_>>()
    };
    let spec = |part: &str, size, init| (format!("model.layers.1.self_attn.{part}"), vec![size], init);
    let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } =
        *config().attention_layers().nth(1).unwrap();
    let (q, kv) = (num_heads * head_dim, num_kv_heads * head_dim);
    let biases =
        [("q_proj.bias", q), ("k_proj.bias", kv), ("v_proj.bias", kv)].map(|(p, n)| spec(p, n, Init::Zeros));
    let norms = ["q_norm.weight", "k_norm.weight"].map(|p| spec(p, head_dim, Init::Ones));
    let families = ["llama", "mistral", "qwen2", "qwen3", "granite", "smollm3"];
    let found = families.map(|family| added(&of_family(family)));
    assert_eq!(found, [vec![], vec![], biases.to_vec(), norms.to_vec(), vec![], vec![]]);
}

#[test]
fn another_number_of_parameters_is_refused() {
    for config in descriptions() {
        let layer = (config.family.block)(&config, 0);
        let mut params: Vec<Tensor> = layer.parameters().iter().map(|spec| random(&spec.shape, 0)).collect();
        let x = random(&[1, 3, config.hidden_size], 1);
        layer.forward(&params, &x, &context(1, 3)).unwrap();
        params.push(x.clone());
        let more = layer.forward(&params, &x, &context(1, 3)).err().unwrap();
        params.truncate(params.len() - 2);
        let fewer = layer.forward(&params, &x, &context(1, 3)).err().unwrap();
        for error in [more, fewer] {
            assert!(matches!(error, LayerError::ParameterCount { .. }), "{:?}: {error}", config.family);
        }
    }
}

#[test]
fn every_family_has_the_parameters_of_its_published_checkpoints() {
    let names = |family| {
        let config = of_family(family);
        let (layer, prefix) = ((config.family.block)(&config, 1), format!("{}.", config.layer_name(1)));
        let name = |spec: &ParameterSpec| spec.name.replace(&prefix, "").replace(".weight", "");
        layer.parameters().iter().map(name).collect::<Vec<_>>().join(" ")
    };
    let projections = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj";
    let qk_norms = "self_attn.q_norm self_attn.k_norm";
    let sandwich =
        "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm";
    let side_by_side = format!("{projections} input_layernorm");
    assert_eq!([names("cohere"), names("cohere2")], [side_by_side.clone(), side_by_side]);
    assert_eq!(names("gemma2"), format!("{projections} {sandwich}"));
    assert_eq!(names("gemma3_text"), format!("{projections} {sandwich} {qk_norms}"));
    assert_eq!(names("gemma4_text"), format!("{projections} {sandwich} {qk_norms} layer_scalar"));
    let after = "post_attention_layernorm post_feedforward_layernorm";
    assert_eq!(names("olmo2"), format!("{projections} {after} {qk_norms}"));
    let glm = "input_layernorm post_self_attn_layernorm post_attention_layernorm post_mlp_layernorm";
    let projections =
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj";
    assert_eq!(names("glm4"), format!("{projections} {glm}"));
    let fused = "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj";
    assert_eq!(names("phi3"), format!("{fused} input_layernorm post_attention_layernorm"));
    for (family, projections, norm) in [
        (
            "phi",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.dense mlp.fc1 mlp.fc2",
            "input_layernorm",
        ),
        ("gptj", "attn.q_proj attn.k_proj attn.v_proj attn.out_proj mlp.fc_in mlp.fc_out", "ln_1"),
    ] {
        let is_biased = |name: &&str| family == "phi" || name.starts_with("mlp");
        let biases: String =
            projections.split(' ').filter(is_biased).map(|name| format!(" {name}.bias")).collect();
        assert_eq!(names(family), format!("{projections} {norm} {norm}.bias{biases}"));
        let model = Model::new(&of_family(family)).unwrap();
        let head: Vec<_> = model.objective.parameters().iter().map(|spec| spec.name.clone()).collect();
        let norm = if family == "phi" { "model.final_layernorm" } else { "transformer.ln_f" };
        let parts = ["weight", "bias"];
        let expected = parts.map(|part| [format!("{norm}.{part}"), format!("lm_head.{part}")]).concat();
        assert_eq!(head, expected);
    }
}

#[test]
fn soft_caps_are_those_of_the_first_model_by_default_and_none_if_null() {
    let caps = |json: &Value| {
        let config = read(json).unwrap();
        (config.attention().softcap, config.final_softcap)
    };
    let mut json = changed("gemma2", "attn_logit_softcapping", None);
    json.as_object_mut().unwrap().shift_remove("final_logit_softcapping");
    assert_eq!(caps(&json), (Some(50.0), Some(30.0)));
    json["attn_logit_softcapping"] = json!(null);
    json["final_logit_softcapping"] = json!(15);
    assert_eq!(caps(&json), (None, Some(15.0)));
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        for invalid in [json!(0), json!(-2.0), json!("50")] {
            assert_refused(&changed("gemma2", key, Some(invalid)), key);
        }
    }
}

#[test]
fn command_has_layer_norm_and_no_position_embedding_without_a_window() {
    let mut json = of_family("cohere2").to_hf_json();
    for key in ["layer_types", "logit_scale", "layer_norm_eps"] {
        json.as_object_mut().unwrap().shift_remove(key);
    }
    json["sliding_window"] = json!(9);
    json["sliding_window_pattern"] = json!(2);
    let config = read(&json).unwrap();
    assert_eq!((config.multipliers.logits, config.rms_norm_eps), (0.0625, 1e-5));
    assert!(config.norm().centered);
    let layers =
        config.attention_layers().map(|layer| (layer.window, layer.rope.map(|rope| rope.interleaved)));
    assert_eq!(layers.collect::<Vec<_>>(), [(Some(9), Some(true)), (None, None)]);
    assert_refused(&changed("cohere", "use_qk_norm", Some(json!(true))), "use_qk_norm");
    assert_refused(&changed("cohere", "logit_scale", Some(json!(0))), "logit_scale");
}

#[test]
fn families_that_are_tied_by_default_are_tied_without_the_field() {
    for (family, tied) in
        [("gemma3_text", true), ("smollm3", true), ("gemma", true), ("olmo2", false), ("granite", false)]
    {
        assert_eq!(read(&changed(family, "tie_word_embeddings", None)).unwrap().tie_word_embeddings, tied);
    }
}

#[test]
fn an_unused_window_of_qwen_is_none() {
    for family in ["qwen2", "qwen3"] {
        let mut json = changed(family, "sliding_window", Some(json!(4096)));
        assert_eq!(read(&json).unwrap(), of_family(family));
        json["layer_types"] = json!(["full_attention", "full_attention"]);
        assert_eq!(read(&json).unwrap(), of_family(family));
        let mixed = json!(["full_attention", "sliding_attention"]);
        assert_refused(&changed(family, "layer_types", Some(mixed.clone())), "layer_types");

        json["use_sliding_window"] = json!(true);
        let windows = |json: &Value| {
            read(json).unwrap().attention_layers().map(|layer| layer.window).collect::<Vec<_>>()
        };
        json["layer_types"] = mixed;
        assert_eq!(windows(&json), [None, Some(4096)]);
        json.as_object_mut().unwrap().shift_remove("layer_types");
        assert_eq!(windows(&json), [None, None], "the first 28 layers have none");
        json["max_window_layers"] = json!(0);
        assert_eq!(windows(&json), [Some(4096), Some(4096)]);
        json["layer_types"] = json!(["full_attention"]);
        assert_refused(&json, "layer_types");
    }
}

#[test]
fn mistral_has_the_window_of_its_first_model_by_default() {
    let window =
        |value: Option<Value>| read(&changed("mistral", "sliding_window", value)).unwrap().attention().window;
    assert_eq!(window(None), Some(4096));
    assert_eq!(window(Some(Value::Null)), None);
    assert_refused(&changed("mistral", "sliding_window", Some(json!(0))), "sliding_window");
}

#[test]
fn sizes_that_a_family_takes_from_its_first_model_must_be_given() {
    assert_refused(&changed("qwen2", "num_key_value_heads", None), "num_key_value_heads");
    assert_refused(&changed("qwen3", "head_dim", None), "head_dim");
    assert!(read(&changed("qwen2", "head_dim", None)).is_ok());
}

#[test]
fn a_class_that_is_not_the_familys_is_refused() {
    let classes = json!(["Qwen2ForSequenceClassification"]);
    assert_refused(&changed("qwen2", "architectures", Some(classes)), "architectures");
    assert_refused(&changed("qwen2", "model_type", Some(json!("llama"))), "architectures");
}

/// A family of which every other layer has a window.
static ALTERNATING: Family = Family {
    model_type: "alternating",
    class: "AlternatingForCausalLM",
    names: ModelNames::LLAMA,
    read: |file| {
        let mut config = file.decoder(&ALTERNATING, file.attention()?, 1e-6)?;
        let window = file.optional_size("sliding_window")?;
        config.attention_layers_mut().step_by(2).for_each(|layer| layer.window = window);
        Ok(config)
    },
    write: |config, json| json["sliding_window"] = json!(config.attention().window),
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[],
};

#[test]
fn layers_may_differ_as_far_as_the_familys_file_says_so() {
    let mut config = ModelConfig { family: &ALTERNATING, ..config() }.with_num_layers(3);
    config.attention_layers_mut().next().unwrap().window = Some(5);
    config.attention_layers_mut().nth(2).unwrap().window = Some(5);
    config.validate("alternating").unwrap();
    assert_eq!(config.distinct_layers().len(), 2);
    let model = Model::new(&config).unwrap();
    let windows: Vec<_> =
        model.layers.iter().map(|layer| layer.attention_extent().unwrap().mask.window).collect();
    assert_eq!(windows, [Some(5), None, Some(5)]);

    config.attention_layers_mut().nth(1).unwrap().window = Some(6);
    let error = config.validate("alternating").unwrap_err().to_string();
    assert!(error.contains("`model_type` is alternating"), "{error}");
    config.family = family("llama").unwrap();
    assert!(config.validate("llama").is_err());
}

#[test]
fn the_language_model_of_a_larger_model_is_described_by_its_text_config() {
    let larger =
        |model_type: &str, text: Value| json!({ "model_type": model_type, "text_config": text, "other": 1 });
    let mut text = of_family("mistral").to_hf_json();
    assert_eq!(
        read(&larger("mistral3", text.clone())).unwrap(),
        ModelConfig { tie_word_embeddings: true, ..of_family("mistral") }
    );
    let untied = |mut json: Value| {
        json["tie_word_embeddings"] = json!(false);
        json
    };
    assert_eq!(read(&untied(larger("mistral3", text.clone()))).unwrap(), of_family("mistral"));

    // The sizes of Gemma 3 4B, of which its file leaves some out.
    let gemma = json!({
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": { "rope_type": "linear", "factor": 8.0 }, "sliding_window": 1024,
    });
    let gemma = read(&larger("gemma3", gemma)).unwrap();
    let AttentionConfig { num_heads, num_kv_heads, head_dim, window, .. } = *gemma.attention();
    assert_eq!((num_heads, num_kv_heads, head_dim, window), (8, 4, 256, Some(1024)));
    assert_eq!((gemma.vocab_size, gemma.num_parameters()), (262_208, 3_880_263_168));

    let mut qwen = of_family("qwen3").to_hf_json();
    qwen["model_type"] = json!("qwen3_vl_text");
    qwen["rope_scaling"] =
        json!({ "rope_type": "default", "mrope_section": [1, 1, 1], "mrope_interleaved": true });
    assert_eq!(read(&larger("qwen3_vl", qwen)).unwrap(), of_family("qwen3"));

    let mut ministral = of_family("ministral3").with_rope(|rope| rope.query_growth = 0.3);
    ministral.tie_word_embeddings = true;
    assert_eq!(read(&larger("mistral3", ministral.to_hf_json())).unwrap(), ministral);

    text["model_type"] = json!("llama");
    assert_refused(&larger("mistral3", text), "text_config");
    assert_refused(&json!({ "model_type": "gemma3" }), "text_config");
}

#[test]
fn defaults_that_are_a_familys_own_are_those_of_transformers() {
    let windows = |family, changes: Value| {
        let mut json = of_family(family).to_hf_json();
        for key in ["layer_types", "sliding_window", "rope_parameters"] {
            json.as_object_mut().unwrap().shift_remove(key);
        }
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        json["num_hidden_layers"] = json!(6);
        let config = read(&json).unwrap();
        config.attention_layers().map(|layer| (layer.window, layer.rope.is_some())).collect::<Vec<_>>()
    };
    let (windowed, full) = ((Some(4096), true), (None, true));
    assert_eq!(windows("gemma3_text", json!({})), [[windowed; 5].as_slice(), &[full]].concat());
    let theta = json!({ "rope_theta": 500_000.0 });
    assert_eq!(windows("olmo3", theta), [windowed, windowed, windowed, full, windowed, windowed]);
    let no_position = (None, false);
    assert_eq!(
        windows("exaone4", json!({})),
        [windowed, windowed, windowed, no_position, windowed, windowed]
    );
    assert_eq!(windows("exaone4", json!({ "sliding_window": null })), [full; 6]);
    assert_eq!(windows("ministral", json!({})), [windowed; 6]);
    for family in ["gemma3_text", "olmo3"] {
        let mut json = changed(family, "sliding_window", Some(Value::Null));
        json["layer_types"] = json!(["sliding_attention", "full_attention"]);
        assert_refused(&json, "sliding_window");
        assert_refused(
            &changed(family, "rope_parameters", Some(json!({ "rope_theta": 5.0 }))),
            "rope_parameters",
        );
    }
    assert_refused(
        &changed("phi3", "rope_scaling", Some(json!({ "rope_type": "linear", "factor": 2.0 }))),
        "rope_scaling",
    );
    assert_refused(&changed("smollm3", "no_rope_layer_interval", Some(json!(0))), "no_rope_layer_interval");
}
