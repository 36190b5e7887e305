//! Exports, read back by the reader of Hugging Face's layout.

use super::training::{Setup, model, on_mesh, setup};
use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;
use ulysses::checkpoint::{
    Checkpoint, Comparison, Difference, ExportDtype, ExportOptions, LocalStorage, diff, export, step_name,
};
use ulysses::model::{HfWeights, Model, ModelConfig, WeightSource};
use ulysses::tensor::to_vec;

/// Returns a checkpoint that two stages of a pipeline trained, and its parameters by name.
fn trained() -> (TempDir, BTreeMap<String, Vec<f32>>) {
    let dir = tempfile::tempdir().unwrap();
    let pipeline = Setup { extra: r#"{ "pipeline_parallel_size": 2 }"#, ..setup(3, 1, 3) };
    let parameters = on_mesh(pipeline, |rank| {
        rank.train(2)?;
        rank.save(dir.path())?;
        let parameters = rank.engine.gather_parameters()?;
        parameters.into_iter().map(|(name, tensor)| Ok((name, to_vec(&tensor)?))).collect()
    });
    (dir, parameters.into_iter().next().unwrap())
}

fn export_to(dir: &Path, output: &Path, dtype: ExportDtype, max_file_bytes: u64, tokenizer: Option<&Path>) {
    let checkpoint = Checkpoint::open(&dir.join(step_name(2))).unwrap();
    let options = ExportOptions { max_file_bytes, tokenizer, ..ExportOptions::new(dtype) };
    export(&checkpoint, output, options, &LocalStorage).unwrap();
}

#[test]
fn an_export_round_trips() {
    let (dir, expected) = trained();
    let output = dir.path().join("exported");
    fs::write(dir.path().join("tok.json"), "a tokenizer").unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), "its config").unwrap();
    fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    let companions = ["tekken.json", "additional_chat_templates/tool_use.jinja"];
    companions.iter().for_each(|file| fs::write(dir.path().join(file), file).unwrap());
    export_to(dir.path(), &output, ExportDtype::F32, u64::MAX, Some(&dir.path().join("tok.json")));
    let config = ModelConfig::from_hf_dir(&output).unwrap();
    assert_eq!(config, model());
    let weights = HfWeights::open(&output).unwrap();
    assert_eq!(weights.names().count(), expected.len());
    for spec in Model::new(&config).unwrap().units().iter().flat_map(|unit| &unit.parameters) {
        let mut values = vec![0.0; spec.numel()];
        weights.read(spec, 0..spec.numel(), &mut values).unwrap();
        assert_eq!(values, expected[&spec.name], "{}", spec.name);
    }
    assert_eq!(fs::read_to_string(output.join("tokenizer.json")).unwrap(), "a tokenizer");
    assert_eq!(fs::read_to_string(output.join("tokenizer_config.json")).unwrap(), "its config");
    companions.iter().for_each(|file| assert_eq!(&fs::read_to_string(output.join(file)).unwrap(), file));
    let config: Value = serde_json::from_slice(&fs::read(output.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["torch_dtype"], &config["max_position_embeddings"]), (&"float32".into(), &8.into()));
}

#[test]
fn exports_above_the_size_limit_have_numbered_files_and_an_index() {
    let (dir, expected) = trained();
    let output = dir.path().join("exported");
    const LIMIT: u64 = 1500;
    export_to(dir.path(), &output, ExportDtype::Bf16, LIMIT, None);
    assert!(!output.join("model.safetensors").exists());
    let index = fs::read(output.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let (mut files, mut total) = (BTreeMap::new(), 0);
    for (name, values) in &expected {
        let file = index["weight_map"][name].as_str().unwrap();
        let bytes = files.entry(file).or_insert_with(|| fs::read(output.join(file)).unwrap());
        let tensors = SafeTensors::deserialize(bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::BF16);
        let rounded: Vec<u8> = values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
        assert_eq!(tensor.data(), rounded, "{name}");
        total += rounded.len();
    }
    assert!(
        files.len() > 2
            && files.contains_key(format!("model-00001-of-{:05}.safetensors", files.len()).as_str())
    );
    assert_eq!(index["metadata"]["total_size"], total);
    for (file, bytes) in &files {
        let tensors = SafeTensors::deserialize(bytes).unwrap();
        let data: usize = tensors.iter().map(|(_, tensor)| tensor.data().len()).sum();
        assert!(data as u64 <= LIMIT || tensors.len() == 1, "{file}: {data} bytes");
    }
}

#[test]
fn an_export_of_a_language_model_has_the_other_tensors_of_its_larger_model() {
    let (dir, expected) = trained();
    // Names of transformers before version 5, and those of newer checkpoints.
    for (number, prefix) in ["language_model.model.", "model.language_model."].into_iter().enumerate() {
        let source = dir.path().join(format!("source{number}"));
        fs::create_dir(&source).unwrap();
        let pixels: Vec<u8> = (0..24).collect();
        let other = || TensorView::new(Dtype::I64, vec![3], &pixels).unwrap();
        let stored = |name: &str| name.replace("model.", prefix);
        let parameters = expected.keys().map(|name| (stored(name), other()));
        let tensors = parameters.chain([("vision_tower.pixels".to_owned(), other())]);
        safetensors::serialize_to_file(tensors, None, &source.join("model.safetensors")).unwrap();

        let weights = HfWeights::open(&source).unwrap();
        let output = dir.path().join(format!("exported{number}"));
        let options = ExportOptions { larger_model: Some(&weights), ..ExportOptions::new(ExportDtype::F32) };
        let checkpoint = Checkpoint::open(&dir.path().join(step_name(2))).unwrap();
        export(&checkpoint, &output, options, &LocalStorage).unwrap();

        let bytes = fs::read(output.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(tensors.len(), expected.len() + 1);
        for (name, values) in &expected {
            let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(tensors.tensor(&stored(name)).unwrap().data(), values, "{name}");
        }
        assert_eq!(tensors.tensor("vision_tower.pixels").unwrap(), other());
    }
}

#[test]
fn an_export_does_not_overwrite() {
    let (dir, _) = trained();
    let output = dir.path().join("exported");
    fs::create_dir(&output).unwrap();
    let checkpoint = Checkpoint::open(&dir.path().join(step_name(2))).unwrap();
    let options = ExportOptions { max_file_bytes: 1, ..ExportOptions::new(ExportDtype::F32) };
    let error = export(&checkpoint, &output, options, &LocalStorage).unwrap_err().to_string();
    assert!(error.contains("exported") && error.contains("exists"), "{error}");
    assert_eq!(fs::read_dir(&output).unwrap().count(), 0);
    // A failure to copy the tokenizer leaves no files.
    let options = ExportOptions { tokenizer: Some(Path::new("nowhere/tokenizer.json")), ..options };
    let other = dir.path().join("other");
    let error = export(&checkpoint, &other, options, &LocalStorage).unwrap_err().to_string();
    assert!(error.contains("nowhere/tokenizer.json"), "{error}");
    assert!(!other.exists() && !dir.path().join(".other.saving").exists());
}

#[test]
fn diff_reports_kind_and_parameter() {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(setup(2, 1, 0), |rank| {
        rank.train(1)?;
        rank.save(dir.path())?;
        rank.train(2)?;
        rank.save(dir.path())
    });
    let open = |step| Checkpoint::open(&dir.path().join(step_name(step))).unwrap();
    let same = diff(&open(1), &open(1)).unwrap();
    assert!(same.values().all(|comparison| *comparison == Comparison::Equal));
    let other = diff(&open(1), &open(3)).unwrap();
    let head = ("parameters".to_owned(), "lm_head.weight".to_owned());
    // Two updates change nearly every element, each by at most the learning rate.
    let Comparison::Differs(Difference { elements, largest, .. }) = other[&head] else { panic!("{other:?}") };
    assert!(elements > 29 * 11 / 2 && 0.0 < largest && largest < 0.02, "{elements} {largest}");
}
