//! Deprecated names, names of DeepSpeed's classes, and comments: files as they are published.

use super::*;
use serde_json::Value;

#[test]
fn deprecated_flags_offload_to_host_memory() {
    let zero = |keys: &str| format!(r#"{{"train_batch_size": 1, "zero_optimization": {{{keys}}}}}"#);
    let read = |keys: &str| Config::from_json_str(&zero(keys), "c.json").unwrap_or_else(|e| panic!("{e}"));
    let both = read(r#""stage": 3, "cpu_offload": true, "cpu_offload_params": true"#);
    assert_eq!((&both.zero.offload_optimizer, &both.zero.offload_param), (&Offload::Cpu, &Offload::Cpu));
    let deprecated = "`zero_optimization.cpu_offload` is deprecated: use `zero_optimization.offload_optimizer.device` \"cpu\"";
    assert!(both.notes.iter().any(|note| note.text == deprecated), "{:?}", both.notes);
    let off = read(r#""cpu_offload": false, "cpu_offload_param": null, "cpu_offload_use_pin_memory": true"#);
    assert_eq!(off.zero, read(r#""stage": 0"#).zero);
    for (keys, expected) in [
        (
            r#""stage": 0, "cpu_offload": true"#,
            "`zero_optimization.stage`: expected 1, 2 or 3 (required by `cpu_offload`)",
        ),
        (
            r#""cpu_offload_param": true"#,
            "`zero_optimization.cpu_offload_param`: expected false, unless `stage` is 3",
        ),
        (
            r#""stage": 3, "cpu_offload": true, "offload_optimizer": {"device": "none"}"#,
            "`zero_optimization.cpu_offload`: expected false, as `offload_optimizer`, which replaces it, is also set",
        ),
    ] {
        assert!(message(&zero(keys)).contains(expected), "{}", message(&zero(keys)));
    }
}

#[test]
fn the_names_of_deepspeeds_classes_select_the_optimizer() {
    let config = |name: &str, params: &str| {
        config_with(&format!(r#""optimizer": {{"type": "{name}", "params": {{{params}}}}}"#))
    };
    for (class, name) in [
        ("FusedAdam", "Adam"),
        ("DeepSpeedCPUAdam", "Adam"),
        ("fusedlamb", "Lamb"),
        ("DeepSpeedCPULion", "Lion"),
        ("DeepSpeedCPUAdagrad", "Adagrad"),
    ] {
        let of_class = config(class, r#""weight_decay": 0.5"#);
        assert_eq!(of_class.optimizer, config(name, r#""weight_decay": 0.5"#).optimizer, "{class}");
        let note = format!("`optimizer.type` \"{class}\" is another name of \"{name}\"");
        assert!(of_class.notes.iter().any(|other| other.text == note), "{:?}", of_class.notes);
    }
    // Decoupled weight decay unless a file says otherwise, as the classes themselves.
    let is_decoupled = |name, params| {
        let OptimizerConfig::Adam(Adam { adam_w_mode, .. }) = config(name, params).optimizer else {
            panic!()
        };
        adam_w_mode
    };
    assert!(is_decoupled("DeepSpeedCPUAdam", "") && is_decoupled("FusedAdam", "\"torch_adam\": true"));
    assert!(!is_decoupled("DeepSpeedCPUAdam", "\"adamw_mode\": false"));
    assert!(!is_decoupled("FusedAdam", "\"adam_w_mode\": false"));
    assert_eq!(explain("cpu_adam").unwrap(), "`optimizer.type` \"cpu_adam\" is another name of \"Adam\"\n");
}

#[test]
fn keys_that_begin_with_an_underscore_are_comments() {
    let text = r#"{
        "_comment": "one", "_comment": ["two"], "train_batch_size": 1,
        "zero_optimization": { "_stage": 7, "stage": 1, "offload_optimizer": { "_": {}, "device": "cpu" } },
        "optimizer": { "type": "Adam", "_why": null, "params": { "_lr": "high", "lr": 1e-3 } },
        "checkpoint": { "_interval": 5, "tag_validation": "Warn" }
    }"#;
    let commented = Config::from_json_str(text, "c.json").unwrap_or_else(|error| panic!("{error}"));
    assert!(
        !commented.notes.iter().any(|note| note.contains('_') && note.contains("`_")),
        "{:?}",
        commented.notes
    );
    let mut file: Value = serde_json::from_str(text).unwrap();
    remove_comments(&mut file);
    let plain = Config::from_json_str(&file.to_string(), "c.json").unwrap();
    assert_eq!(commented, plain);
    assert!(!serde_json::to_string(&commented).unwrap().contains("\"_"));
}

fn remove_comments(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|name, _| !name.starts_with('_'));
        fields.values_mut().for_each(remove_comments);
    }
}

#[test]
fn autosp_is_accepted_and_other_passes_are_refused_with_a_reason() {
    let config = config_with(
        r#""compile": {"deepcompile": true, "passes": ["autosp"]}, "sequence_parallel_size": 2, "zero_optimization": {"stage": 1}"#,
    );
    assert_eq!((config.mesh.sp_size, config.ulysses.zero_partition_axes), (2, PartitionAxes::DpSp));
    let note = "`compile.passes` has no effect: every attention is sequence-parallel";
    assert!(config.notes.iter().any(|other| other.contains(note)), "{:?}", config.notes);
    let other = |pass: &str| {
        message(&format!(r#"{{"train_batch_size": 1, "compile": {{"passes": ["autosp", "{pass}"]}}}}"#))
    };
    assert!(
        other("z3").contains("`compile.passes[1]`: \"z3\": ZeRO needs no compiler: remove it"),
        "{}",
        other("z3")
    );
    assert!(
        other("autotp").contains("`compile.passes[1]`: \"autotp\": tensor parallelism needs no compiler")
    );
    assert!(
        other("z9").contains("`compile.passes[1]`: unknown name \"z9\" (valid here: autosp)"),
        "{}",
        other("z9")
    );
}
