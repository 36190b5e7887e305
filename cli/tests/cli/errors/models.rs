//! Models that cannot be loaded: `train` and `verify` report them before a rank starts.

use crate::golden;
use crate::support::cli::{Outcome, Workplace};
use crate::support::reference::{Tensors, load_tensors};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// A copy of a fixture's model, to be damaged.
struct ModelDir {
    place: Workplace,
}

impl ModelDir {
    fn new() -> Self {
        let place = Workplace::new();
        for file in ["config.json", "model.safetensors"] {
            place.write(&format!("model/{file}"), std::fs::read(golden("tiny_strong", file)).unwrap());
        }
        place.write_config("c.json", json!({ "ulysses": { "model": "model" } }));
        Self { place }
    }

    fn set(&self, key: &str, value: Value) {
        let mut config = self.place.read_json("model/config.json");
        config[key] = value;
        self.place.write("model/config.json", config.to_string());
    }

    /// Changes the weights.
    fn change(&self, change: impl FnOnce(&mut Tensors)) {
        let path = self.place.path("model/model.safetensors");
        let mut tensors = load_tensors(&path).unwrap();
        change(&mut tensors);
        let tensors: HashMap<_, _> = tensors.into_iter().collect();
        candle_core::safetensors::save(&tensors, &path).unwrap();
    }

    fn both(&self) -> [Outcome; 2] {
        let batch = golden("tiny_strong", "inputs.safetensors");
        let verify = ["verify", "--model", "model", "--batch", &batch, "--mesh", "1x2"];
        let train = self.place.run(&["train", "c.json"]);
        [train, self.place.run(&verify)]
    }

    #[track_caller]
    fn assert_refused(&self, expected: &[&str]) {
        for outcome in self.both() {
            outcome.assert_refused(2, expected);
        }
        assert!(!self.place.path("out").exists(), "nothing is written");
    }
}

#[test]
fn the_copied_model_is_accepted() {
    for outcome in ModelDir::new().both() {
        outcome.assert_done();
    }
}

#[test]
fn unknown_presets_are_refused_with_a_list_of_presets() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    let outcome = place.run(&["train", "c.json", "--model", "nanoo"]);
    outcome.assert_refused(2, &["`nanoo`", "nano, tiny, small, base"]);
    let train = |model: &str| place.run(&["train", "c.json", "--model", model]);
    train("./no/such").assert_refused(2, &["`./no/such` is neither a directory nor a preset"]);
    train("llama3-8b").assert_refused(2, &["only `ulysses plan` knows this shape"]);
    train("text.txt").assert_refused(2, &["text.txt: expected a model directory"]);
}

#[test]
fn missing_or_broken_model_configs_are_named() {
    for (text, expected) in [
        (None, "No such file"),
        (Some("{"), "not valid JSON"),
        (Some("[1]"), "expected a JSON object"),
        (Some("{}"), "`model_type` is missing"),
    ] {
        let model = ModelDir::new();
        match text {
            Some(text) => model.place.write("model/config.json", text),
            None => std::fs::remove_file(model.place.path("model/config.json")).unwrap(),
        }
        model.assert_refused(&["model/config.json", expected]);
    }
}

/// `src/model/tests.rs` and `src/families/tests/rope.rs` have every kind.
#[test]
fn unsupported_or_impossible_model_configs_are_refused() {
    for (key, value) in [("model_type", json!("mamba2")), ("num_attention_heads", json!(u64::MAX))] {
        let model = ModelDir::new();
        model.set(key, value);
        model.assert_refused(&["model/config.json", key]);
    }
}

#[test]
fn an_unknown_field_is_refused_with_what_to_do() {
    let model = ModelDir::new();
    model.set("residual_multiplier", json!(0.22));
    model.assert_refused(&["`residual_multiplier` is 0.22", "unknown", "remove it if it has no effect"]);
    model.set("residual_multiplier", Value::Null);
    for outcome in model.both() {
        outcome.assert_done();
    }
}

#[test]
fn fields_without_effect_are_ignored() {
    let model = ModelDir::new();
    for (field, value) in [
        ("_name_or_path", json!("somebody/a-model")),
        ("_attn_implementation_autoset", json!(true)),
        ("torch_dtype", json!("bfloat16")),
        ("eos_token_id", json!([1, 2])),
        ("temperature", json!(0.6)),
        ("max_window_layers", json!(28)),
        ("transformers.js_config", json!({ "kv_cache_dtype": { "q4f16": "float16" } })),
        ("is_llama_config", json!(true)),
        ("rope_interleaved", json!(false)),
        ("use_mrope", json!(false)),
        ("partial_rotary_factor", json!(1.0)),
        ("is_causal", json!(true)),
        ("quantization_config", Value::Null),
        ("pruned_heads", json!({})),
        ("id2label", json!({ "0": "LABEL_0" })),
    ] {
        model.set(field, value);
    }
    for outcome in model.both() {
        assert!(!outcome.assert_done().stderr.contains("config.json: "), "{outcome:?}");
    }
}

#[test]
fn every_command_notes_model_settings_that_are_not_applied() {
    let model = ModelDir::new();
    model.set("attention_dropout", json!(0.1));
    model.set("pad_token_id", json!(7));
    model.set("auto_map", json!({ "AutoModelForCausalLM": "modeling_mine.MyLlama" }));
    model.change(|tensors| {
        for layer in 0..4 {
            let inverse = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
            tensors.insert(format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq"), inverse);
        }
    });
    let [train, verify] = model.both();
    let eval = model.place.run(&["eval", "model", "--data", "text.txt", "--seq-len", "64"]);
    let plan = model.place.run(&["plan", "c.json"]);
    for (outcome, reads_weights) in [(train, true), (verify, true), (eval, true), (plan, false)] {
        let stderr = &outcome.assert_done().stderr;
        for expected in [
            "note: model/config.json: `attention_dropout` is 0.1, which is not applied",
            "note: model/config.json: `pad_token_id` is 7",
            "`auto_map` names code of the model's own, which is not run",
        ] {
            assert!(stderr.contains(expected), "no {expected:?} in {outcome:?}");
        }
        let unused = "note: model/model.safetensors: 4 tensor(s) that the model does not use: \
                      model.layers.0.self_attn.rotary_emb.inv_freq, ";
        assert_eq!(stderr.contains(unused), reads_weights, "{outcome:?}");
    }
}

#[test]
fn a_head_with_other_values_than_the_embedding_is_not_tied() {
    let model = ModelDir::new();
    let logits = |output: &str| {
        let batch = golden("tiny_strong", "inputs.safetensors");
        let verify = ["verify", "--model", "model", "--batch", &batch, "--output", output, "--mesh", "1x2"];
        let outcome = model.place.run(&verify);
        outcome.assert_done();
        (std::fs::read(model.place.path(output)).unwrap(), outcome.stderr)
    };
    let plan = || model.place.run(&["plan", "c.json", "--json"]).assert_done().stdout.clone();
    let ((untied, silence), planned) = (logits("untied.safetensors"), plan());
    assert!(!silence.contains("note: "), "{silence}");
    model.set("tie_word_embeddings", json!(true));
    let (found, note) = logits("found.safetensors");
    assert!(found == untied, "transformers 5 computes with both matrices");
    assert!(note.contains("`tie_word_embeddings` is true, but lm_head.weight differs"), "{note}");
    assert_eq!(plan(), planned);

    // With equal values it is tied: one parameter and one gradient less.
    model.change(|tensors| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".to_owned(), embedding);
    });
    let (tied, silence) = logits("tied.safetensors");
    assert!(tied.len() < untied.len() && !silence.contains("note: "), "{silence}");
}

/// `src/model/tests/shards.rs` has every kind of damage.
#[test]
fn missing_or_broken_weight_files_are_named() {
    let model = ModelDir::new();
    let bytes = std::fs::read(golden("tiny_strong", "model.safetensors")).unwrap();
    model.place.write("model/model.safetensors", &bytes[..bytes.len() / 2]);
    model.assert_refused(&["model/model.safetensors"]);
    std::fs::remove_file(model.place.path("model/model.safetensors")).unwrap();
    model.assert_refused(&["model: no weights: neither model.safetensors nor model.safetensors.index.json"]);
}

#[test]
fn weights_that_do_not_fit_the_model_config_are_named() {
    const NAME: &str = "model.layers.1.mlp.up_proj.weight";
    let shape = ModelDir::new();
    shape.change(|tensors| {
        let cut = tensors[NAME].narrow(0, 0, 171).unwrap();
        tensors.insert(NAME.to_owned(), cut);
    });
    shape.assert_refused(&[NAME, "[171, 64]", "[172, 64]"]);
    let missing = ModelDir::new();
    missing.change(|tensors| drop(tensors.remove(NAME)));
    missing.assert_refused(&["no tensor named", NAME]);
    let dtype = ModelDir::new();
    dtype.change(|tensors| {
        let wide = tensors[NAME].to_dtype(DType::F64).unwrap();
        tensors.insert(NAME.to_owned(), wide);
    });
    dtype.assert_refused(&[NAME, "F64", "f32, bf16 and f16"]);
}

#[test]
fn non_finite_weights_end_the_run() {
    let model = ModelDir::new();
    model.change(|tensors| {
        let nan = (tensors["lm_head.weight"].clone() * f64::NAN).unwrap();
        tensors.insert("lm_head.weight".to_owned(), nan);
    });
    let [train, verify] = model.both();
    train.assert_refused(1, &["step 1", "NaN", "not finite"]);
    verify.assert_refused(1, &["results are not finite"]);
    for arguments in [&["--json"][..], &[]] {
        let eval = ["eval", "model", "--data", "text.txt", "--seq-len", "64"];
        let eval = model.place.run(&[&eval[..], arguments].concat());
        eval.assert_refused(1, &["the loss of model is not finite: NaN"]);
        assert!(eval.stdout.contains("loss"), "{eval:?}");
    }
}

#[test]
fn a_file_as_model_is_refused() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    let file = golden("tiny_strong", "model.safetensors");
    assert!(Path::new(&file).is_file());
    place.run(&["train", "c.json", "--model", &file]).assert_refused(2, &[&file, "config.json"]);
}
