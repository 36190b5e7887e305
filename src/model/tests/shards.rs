//! Weight directories of several files, and what can be wrong with them.

use super::*;
use candle_core::DType;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// `a` and `b` in one shard, `c` in another.
struct Shards {
    dir: tempfile::TempDir,
    index: Value,
}

fn write(dir: &Path, file: &str, tensors: &[(&str, &Tensor)]) {
    let tensors: HashMap<_, _> = tensors.iter().map(|(name, tensor)| (*name, (*tensor).clone())).collect();
    candle_core::safetensors::save(&tensors, dir.join(file)).unwrap();
}

impl Shards {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "1.safetensors", &[("a", &random(&[2, 3], 0)), ("b", &random(&[5], 1))]);
        let half = random(&[4, 2], 2).to_dtype(DType::BF16).unwrap();
        write(dir.path(), "2.safetensors", &[("c", &half)]);
        let weight_map = json!({ "a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors" });
        Self { dir, index: json!({ "metadata": { "total_size": 60 }, "weight_map": weight_map }) }
    }

    fn open(&self) -> std::result::Result<HfWeights, ModelError> {
        self.open_index(&self.index.to_string())
    }

    fn open_index(&self, index: &str) -> std::result::Result<HfWeights, ModelError> {
        std::fs::write(self.dir.path().join("model.safetensors.index.json"), index).unwrap();
        HfWeights::open(self.dir.path())
    }

    #[track_caller]
    fn assert_refused(&self, expected: &[&str]) {
        assert_names(&self.open().err().unwrap(), expected);
    }
}

#[track_caller]
fn assert_names(error: &ModelError, expected: &[&str]) {
    let error = error.to_string();
    for part in expected {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}

fn read(weights: &HfWeights, name: &str, shape: &[usize], range: std::ops::Range<usize>) -> Vec<f32> {
    let mut out = vec![0.0; range.len()];
    weights.read(&ParameterSpec::new(name, shape, Init::Zeros), range, &mut out).unwrap();
    out
}

#[test]
fn tensors_are_read_from_the_shards_that_the_index_names() {
    let weights = Shards::new().open().unwrap();
    let a: Vec<f32> = to_vec(&random(&[2, 3], 0)).unwrap();
    let c: Vec<f32> =
        to_vec(&random(&[4, 2], 2).to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap()).unwrap();
    assert_eq!(read(&weights, "a", &[2, 3], 2..6), a[2..]);
    assert_eq!(read(&weights, "c", &[4, 2], 0..8), c);
    assert_eq!(read(&weights, "c", &[4, 2], 3..5), c[3..5]);
    assert_eq!(weights.names().count(), 3);
}

#[test]
fn a_range_longer_than_a_read_is_whole() {
    let n = (1 << 18) + 77;
    let dir = tempfile::tempdir().unwrap();
    let values = random(&[n], 3);
    write(dir.path(), "model.safetensors", &[("w", &values)]);
    let weights = HfWeights::open(dir.path()).unwrap();
    let values: Vec<f32> = to_vec(&values).unwrap();
    assert_eq!(read(&weights, "w", &[n], 5..n), values[5..]);
}

#[test]
fn a_shard_that_is_missing_is_named_with_its_index() {
    let shards = Shards::new();
    std::fs::remove_file(shards.dir.path().join("2.safetensors")).unwrap();
    shards.assert_refused(&["2.safetensors: no such file", "model.safetensors.index.json lists"]);
}

#[test]
fn a_listed_tensor_that_its_shard_lacks_is_named() {
    let mut shards = Shards::new();
    shards.index["weight_map"]["d"] = json!("2.safetensors");
    shards.assert_refused(&["index.json", "lists d in 2.safetensors", "no such tensor"]);
}

#[test]
fn a_tensor_that_two_shards_hold_is_named_with_both() {
    let shards = Shards::new();
    let (c, a) = (random(&[4, 2], 2), random(&[2, 3], 0));
    write(shards.dir.path(), "2.safetensors", &[("c", &c), ("a", &a)]);
    shards.assert_refused(&["2.safetensors: it holds a", "1.safetensors"]);
}

#[test]
fn a_tensor_that_is_listed_twice_is_named() {
    let text = r#"{ "weight_map": { "a": "1.safetensors", "c": "2.safetensors", "a": "1.safetensors" } }"#;
    assert_names(&Shards::new().open_index(text).err().unwrap(), &["index.json", "lists a twice"]);
}

#[test]
fn a_sharded_tensor_of_another_shape_is_named_with_its_file() {
    let weights = Shards::new().open().unwrap();
    let error = weights.read(&ParameterSpec::new("b", [6], Init::Zeros), 0..0, &mut []).unwrap_err();
    assert_names(&error, &["1.safetensors", "tensor b", "[5]", "[6]"]);
    let error = weights.read(&ParameterSpec::new("z", [6], Init::Zeros), 0..0, &mut []).unwrap_err();
    assert_names(&error, &["index.json", "no tensor named z", "3 tensors"]);
}

#[test]
fn an_index_names_no_file_outside_its_directory() {
    for shard in ["../1.safetensors", "/etc/passwd", "", "."] {
        let mut shards = Shards::new();
        shards.index["weight_map"]["a"] = json!(shard);
        shards.assert_refused(&["index.json", &format!("{shard:?}"), "not a plain file name"]);
    }
}

#[test]
fn an_invalid_index_is_refused() {
    for text in ["{", "[]", "{}", r#"{ "weight_map": { "a": 1 } }"#] {
        assert_names(&Shards::new().open_index(text).err().unwrap(), &["index.json: not an index"]);
    }
}

#[test]
fn headers_must_account_for_every_byte_of_the_file() {
    let whole = |header: &str, data: usize| {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
    };
    let header = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let overlapping = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
        "v":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    let dir = tempfile::tempdir().unwrap();
    let open = |bytes: Vec<u8>| {
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        HfWeights::open(dir.path())
    };
    open(whole(header, 8)).unwrap();
    let endless = (1_u64 << 62).to_le_bytes().to_vec();
    let damaged = [whole(header, 7), whole(header, 9), whole(overlapping, 12), endless];
    for bytes in damaged.into_iter().chain([b"not weights at all".to_vec(), vec![1, 2, 3], vec![]]) {
        assert_names(&open(bytes).err().unwrap(), &["model.safetensors: "]);
    }
}

#[test]
fn a_directory_of_another_layout_is_named_with_what_to_do() {
    for (file, expected) in [
        ("adapter_config.json", "it is an adapter (LoRA), not a model; merge it"),
        ("pytorch_model.bin", "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"),
        ("pytorch_model.bin.index.json", "AutoModelForCausalLM"),
        ("consolidated.00.pth", "layout of its publisher"),
        ("model_index.json", "a pipeline of diffusers"),
        ("model-Q4.gguf", "model-Q4.gguf is there: only safetensors are read"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(file), "{}").unwrap();
        let errors = [HfDescription::from_dir(dir.path()).err(), HfWeights::open(dir.path()).err()];
        for error in errors.map(|error| error.unwrap().to_string()) {
            assert!(error.contains(file) && error.contains(expected), "{error}");
        }
    }
}

#[test]
fn the_end_of_a_turn_is_added_to_the_ends_of_generation_once() {
    for (ends, expected) in [
        (json!(1), json!([1, 7])),
        (json!([1, 2]), json!([1, 2, 7])),
        (json!([7]), json!([7])),
        (json!(null), json!(7)),
    ] {
        let file = json!({ "eos_token_id": ends, "other": 0 });
        let mut source =
            HfSource { config: file.clone(), generation_config: serde_json::Value::Null, dtype: None };
        assert_eq!(source.stop_at(7), ends != json!([7]));
        assert_eq!((&source.config["eos_token_id"], &source.generation_config), (&expected, &json!(null)));
        let mut source = HfSource { generation_config: file, ..source };
        source.stop_at(7);
        assert_eq!(source.generation_config["eos_token_id"], expected);
        assert!(!source.stop_at(7));
    }
}
