//! `docs/config.md` and `configs/ulysses.schema.json` are what the code writes, and the schema takes
//! the files that the reader takes.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use ulysses::config::{Config, ConfigError, ConfigFileError, RawConfig, json_schema, reference_markdown};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn json_files(directory: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(directory)).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.retain(|path| !path.ends_with("ulysses.schema.json"));
    files
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_reference_is_up_to_date() {
    let file = std::fs::read_to_string(root().join("docs/config.md")).unwrap();
    assert!(file == reference_markdown(), "run `ulysses config reference > docs/config.md`");
}

#[test]
fn the_schema_is_up_to_date() {
    let file = std::fs::read_to_string(root().join("configs/ulysses.schema.json")).unwrap();
    let written = format!("{:#}\n", json_schema());
    assert!(file == written, "run `ulysses config schema > configs/ulysses.schema.json`");
}

#[test]
fn the_schema_takes_every_ready_config() {
    let (schema, files) = (json_schema(), json_files("configs"));
    assert!(files.len() >= 6, "{files:?}");
    for path in files {
        assert_eq!(faults(&schema, &read_json(&path), ""), Vec::<String>::new(), "{}", path.display());
    }
}

#[test]
fn schema_and_reader_agree_on_the_files_of_deepspeed() {
    let (schema, files) = (json_schema(), json_files("tests/fixtures/ds_configs"));
    assert!(files.len() >= 6, "{files:?}");
    for path in files {
        // Contradictions between keys are beyond a schema.
        let is_taken =
            !matches!(RawConfig::from_file(&path), Err(ConfigError::File(ConfigFileError::Invalid { .. })));
        let faults = faults(&schema, &read_json(&path), "");
        assert_eq!(faults.is_empty(), is_taken, "{}: {faults:#?}", path.display());
    }
}

#[test]
fn the_schema_refuses_what_the_reader_refuses() {
    let schema = json_schema();
    for wrong in [
        json!({ "train_batch_size": 0 }),
        json!({ "train_batch_size": 1.5 }),
        json!({ "train_batch_sise": 1 }),
        json!({ "gradient_clipping": -1 }),
        json!({ "mesh_param": [1, 2, 3] }),
        json!({ "mesh_param": "auto" }),
        json!({ "optimizer": {} }),
        json!({ "optimizer": { "type": "NAdam" } }),
        json!({ "optimizer": { "type": "Adam", "params": { "momentum": 0.5 } } }),
        json!({ "optimizer": { "type": "SGD", "params": { "momentum": 1 } } }),
        json!({ "scheduler": { "type": "WarmupDecayLR" } }),
        json!({ "zero_optimization": { "stage": 4 } }),
        json!({ "zero_optimization": { "offload_param": { "device": "cpu" } } }),
        json!({ "zero_optimization": { "stage": 2, "offload_param": { "device": "nvme" } } }),
        json!({ "zero_optimization": { "stage": 0, "offload_optimizer": { "device": "nvme" } } }),
        json!({ "zero_optimization": { "stage": 3, "offload_optimizer": { "device": "gpu" } } }),
        json!({ "zero_optimization": { "zenflow": {} } }),
        json!({ "zero_optimization": { "cpu_offload": true } }),
        json!({ "zero_optimization": { "stage": 2, "cpu_offload_param": true } }),
        json!({ "compile": { "passes": ["autotp"] } }),
        json!({ "offload_optimizer_device": "cpu" }),
        json!({ "ulysses": { "model": "" } }),
        json!({ "wandb": { "enabled": true } }),
        json!({ "tensorboard": { "output_path": null } }),
    ] {
        assert_ne!(faults(&schema, &wrong, ""), Vec::<String>::new(), "{wrong}");
        let read = Config::from_json_str(&wrong.to_string(), "c.json");
        assert!(matches!(read, Err(ConfigError::File(ConfigFileError::Invalid { .. }))), "{wrong}");
    }
}

#[test]
fn the_schema_takes_the_other_forms_of_a_value() {
    let schema = json_schema();
    for right in [
        json!({ "train_batch_size": "auto", "zero_optimization": true, "steps_per_print": null }),
        json!({ "optimizer": { "type": "SGD", "params": { "momentum": 0.5, "lr": "auto", "dampening": 0.0 } } }),
        json!({ "zero_optimization": { "zenflow": null, "overlap_comm": null, "reduce_bucket_size": 5e8 } }),
        json!({ "zero_optimization": { "stage": 3, "offload_param": { "device": "nvme", "nvme_path": "x" } } }),
        json!({ "zero_optimization": { "stage": 1, "offload_optimizer": { "device": "cpu" }, "offload_param": null } }),
        json!({ "bfloat16": { "enabled": true }, "communication_data_type": "fp32" }),
        json!({ "_comment": "any", "optimizer": { "type": "FusedAdam", "params": { "_lr": 1, "adamw_mode": false } } }),
        json!({ "zero_optimization": { "stage": 1, "cpu_offload": true }, "compile": { "passes": ["autosp"] } }),
    ] {
        assert_eq!(faults(&schema, &right, ""), Vec::<String>::new(), "{right}");
    }
}

/// Faults that a JSON Schema finds in a value, for the keywords that ours uses; any other panics,
/// so that none is passed over. (A whole validator would bring forty crates.)
fn faults(schema: &Value, value: &Value, place: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |is_right: bool, keyword: &str| {
        if !is_right {
            found.push(format!("{place}: {keyword}"));
        }
    };
    let number = |limit: &Value, fits: fn(f64, f64) -> bool| {
        value.as_f64().is_none_or(|number| fits(number, limit.as_f64().unwrap()))
    };
    let size = |limit: &Value| limit.as_u64().unwrap() as usize;
    let takes = |schema: &Value| faults(schema, value, place).is_empty();
    let mut inner = Vec::new();
    for (keyword, argument) in schema.as_object().unwrap() {
        match keyword.as_str() {
            "$schema" | "title" | "description" | "default" | "deprecated" => {}
            "type" => check(has_type(value, argument.as_str().unwrap()), keyword),
            "enum" => check(argument.as_array().unwrap().iter().any(|one| equal(one, value)), keyword),
            "const" => check(equal(argument, value), keyword),
            "minimum" => check(number(argument, |number, limit| number >= limit), keyword),
            "maximum" => check(number(argument, |number, limit| number <= limit), keyword),
            "exclusiveMaximum" => check(number(argument, |number, limit| number < limit), keyword),
            "minLength" => check(value.as_str().is_none_or(|s| s.chars().count() >= size(argument)), keyword),
            "minItems" => check(value.as_array().is_none_or(|a| a.len() >= size(argument)), keyword),
            "maxItems" => check(value.as_array().is_none_or(|a| a.len() <= size(argument)), keyword),
            "anyOf" => check(argument.as_array().unwrap().iter().any(takes), keyword),
            "oneOf" => {
                check(argument.as_array().unwrap().iter().filter(|one| takes(one)).count() == 1, keyword)
            }
            "not" => check(!takes(argument), keyword),
            "required" => {
                let names = argument.as_array().unwrap().iter();
                check(names.into_iter().all(|name| value.get(name.as_str().unwrap()).is_some()), keyword);
            }
            "additionalProperties" => {
                let keys = value.as_object().into_iter().flat_map(|object| object.keys());
                let is_known = |key: &String| key.starts_with('_') || schema["properties"].get(key).is_some();
                check(keys.into_iter().all(is_known), keyword);
            }
            // Comments, with any value; the only pattern there is.
            "patternProperties" => assert_eq!(*argument, json!({ "^_": {} })),
            "properties" => {
                for (key, value) in value.as_object().into_iter().flatten() {
                    if let Some(schema) = argument.get(key) {
                        inner.extend(faults(schema, value, &format!("{place}/{key}")));
                    }
                }
            }
            "items" => {
                for (index, value) in value.as_array().into_iter().flatten().enumerate() {
                    inner.extend(faults(argument, value, &format!("{place}/{index}")));
                }
            }
            other => panic!("the keyword {other} is not known here"),
        }
    }
    found.extend(inner);
    found
}

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        other => panic!("the type {other} is not known here"),
    }
}

/// JSON Schema takes 0 and 0.0 for one number.
fn equal(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some() && a.as_f64() == b.as_f64()
}
