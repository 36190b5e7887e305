//! Models that cannot be loaded: told before a rank starts, by `train` and `verify` alike.

use crate::golden;
use crate::support::cli::{Outcome, Workplace};
use crate::support::reference::{Tensors, load_tensors};
use candle_core::DType;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// A copy of a fixture's model, to be spoiled.
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
fn unknown_presets_are_refused_with_those_there_are() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    let outcome = place.run(&["train", "c.json", "--model", "nanoo"]);
    outcome.assert_refused(2, &["`nanoo`", "nano, tiny, small, base"]);
    let train = |model: &str| place.run(&["train", "c.json", "--model", model]);
    train("./no/such").assert_refused(2, &["`./no/such` is neither a directory nor a preset"]);
    train("llama3-8b").assert_refused(2, &["only its shape is known, for `ulysses plan`"]);
    train("text.txt").assert_refused(2, &["text.txt: this is a file; a model is a directory"]);
}

#[test]
fn descriptions_that_are_missing_or_broken_are_named() {
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

#[test]
fn descriptions_of_other_or_impossible_models_are_refused() {
    for (key, value) in [
        ("model_type", json!("gpt2")),
        ("attention_bias", json!(true)),
        ("hidden_size", json!(0)),
        ("hidden_size", json!("64")),
        ("head_dim", json!(7)),
        ("num_key_value_heads", json!(3)),
        ("vocab_size", json!(10_u64.pow(18))),
        ("num_hidden_layers", json!(10_u64.pow(12))),
        ("num_attention_heads", json!(u64::MAX)),
        ("rms_norm_eps", json!(-1.0)),
        ("rope_parameters", json!({ "rope_theta": 0.0, "rope_type": "default" })),
        ("rope_parameters", json!({ "rope_theta": 1e4, "rope_type": "longrope" })),
    ] {
        let model = ModelDir::new();
        model.set(key, value);
        let named = if key == "rope_parameters" { "rope_" } else { key };
        model.assert_refused(&["model/config.json", named]);
    }
}

#[test]
fn weight_files_that_are_missing_or_broken_are_named() {
    let bytes = std::fs::read(golden("tiny_strong", "model.safetensors")).unwrap();
    let endless_header = [&(1_u64 << 62).to_le_bytes()[..], b"{}"].concat();
    for content in [&bytes[..bytes.len() / 2], &bytes[..3], &endless_header, b"", b"not weights at all"] {
        let model = ModelDir::new();
        model.place.write("model/model.safetensors", content);
        model.assert_refused(&["model/model.safetensors"]);
    }
    let model = ModelDir::new();
    std::fs::remove_file(model.place.path("model/model.safetensors")).unwrap();
    model.assert_refused(&["model: no weights: neither model.safetensors nor model.safetensors.index.json"]);
}

#[test]
fn weights_that_do_not_fit_the_description_are_named() {
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
fn weights_that_are_not_numbers_end_the_run() {
    let model = ModelDir::new();
    model.change(|tensors| {
        let nan = (tensors["lm_head.weight"].clone() * f64::NAN).unwrap();
        tensors.insert("lm_head.weight".to_owned(), nan);
    });
    let [train, verify] = model.both();
    train.assert_refused(1, &["step 1", "NaN", "not finite"]);
    verify.assert_refused(1, &["relative error inf"]);
}

#[test]
fn a_file_is_no_model_directory() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    let file = golden("tiny_strong", "model.safetensors");
    assert!(Path::new(&file).is_file());
    place.run(&["train", "c.json", "--model", &file]).assert_refused(2, &[&file, "config.json"]);
}
