//! Every key of the table does what the table says.

use super::*;
use crate::config::config::entries;
use crate::config_file::vocabulary::{
    DefaultValue, Effect, Entry, Harmless, Key, Literal, Max, Value as Kind, find, table_paths,
};
use serde_json::{Value, json};

#[test]
fn every_section_of_deepspeeds_table_is_reached() {
    for path in table_paths() {
        assert!(path.is_empty() || entries().iter().any(|entry| entry.path == path), "`{path}`");
    }
}

/// The keys that are not sections.
fn leaves() -> Vec<Entry> {
    entries().into_iter().filter(|entry| !entry.key.value.is_section()).collect()
}

/// A valid value that is not the default.
fn sample(key: &Key) -> Value {
    let default = match key.default {
        DefaultValue::Is(literal) => literal.to_json(),
        _ => Value::Null,
    };
    let others = match key.value {
        Kind::Boolean => vec![json!(true), json!(false)],
        Kind::Integer { min, .. } => vec![json!(min + 2), json!(min + 3)],
        Kind::Signed => vec![json!(3)],
        Kind::Number(range) => match range.max {
            Max::Unbounded => vec![json!(range.min.max(1e-6) * 3.0)],
            Max::AtMost(max) | Max::Below(max) => vec![json!((range.min + max) / 2.0)],
        },
        Kind::Text if key.name == "chat_date" => vec![json!("2026-01-31")],
        Kind::Text | Kind::AnyText => vec![json!("x")],
        Kind::Choice(names) => names.iter().map(|name| json!(name)).collect(),
        Kind::Array(array) => vec![match array.element {
            Kind::Number(_) => json!([0.25, 0.5]),
            Kind::Array(_) => json!([[10, 2048]]),
            Kind::Rule => json!([["a machine", "1x1", { "seed": 2 }]]),
            Kind::Section(_) => json!([]),
            Kind::Text => json!(["x"]),
            Kind::Anything => json!(["all_reduce"]),
            _ if array.max_len == 2 => json!([2, 2]),
            _ => json!([2, 3]),
        }],
        Kind::Names(names) => vec![json!(names)],
        Kind::Variant { variants, .. } => vec![json!(variants[0].name)],
        Kind::Anything => vec![json!({ "enabled": true })],
        Kind::Section(_) | Kind::SwitchOrSection(_) | Kind::Params(_) => vec![json!({})],
        Kind::TextOrSections(_) => vec![json!(["x", "y"])],
        Kind::Mesh => vec![json!({ "intra": { "sp": 2 }, "inter": { "dp": 2 } })],
        Kind::Rule => vec![json!(["a machine", null])],
    };
    others.into_iter().find(|other| *other != default).unwrap()
}

/// A file around the key, faultless without it, in which it has a part to play.
fn surroundings(entry: &Entry) -> Value {
    let mut file =
        json!({ "train_batch_size": 24, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0 });
    let half = |section: &str| json!({ section: { "enabled": true } });
    let extra = match (entry.path.split('.').next().unwrap(), entry.variant) {
        ("train_batch_size" | "train_micro_batch_size_per_gpu" | "gradient_accumulation_steps", _) => {
            file = json!({ "gradient_clipping": 0.0 });
            match entry.key.name {
                "train_batch_size" => json!({ "train_micro_batch_size_per_gpu": 1 }),
                _ => json!({ "train_batch_size": 24 }),
            }
        }
        // Room for replicas of the partitions.
        ("zero_optimization", _)
            if ["mics_shard_size", "zero_hpz_partition_size"].contains(&entry.key.name) =>
        {
            json!({ "data_parallel_size": 6 })
        }
        ("ulysses", _) if entry.key.name == "ring_size" => json!({ "mesh_param": [1, 6] }),
        // A stage for what the flag offloads.
        ("zero_optimization", _) if entry.key.name.starts_with("cpu_offload") => {
            json!({ "zero_optimization": { "stage": 3 } })
        }
        ("fp16", _) => half("fp16"),
        ("bf16" | "bfloat16", _) => half("bf16"),
        ("optimizer", Some("SGD")) => {
            json!({ "optimizer": { "type": "SGD", "params": { "momentum": 0.875 } } })
        }
        // Room for either bound of the trust ratio.
        ("optimizer", Some("Lamb")) => {
            json!({ "optimizer": { "type": "Lamb", "params": { "min_coeff": 0.0 } } })
        }
        ("optimizer", variant) => json!({ "optimizer": { "type": variant.unwrap_or("SGD"), "params": {} } }),
        ("scheduler", Some("OneCycle")) => {
            let params = json!({ "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2 });
            json!({ "scheduler": { "type": "OneCycle", "params": params } })
        }
        ("scheduler", Some(variant @ ("WarmupDecayLR" | "WarmupCosineLR"))) => {
            json!({ "scheduler": { "type": variant, "params": { "total_num_steps": 5000 } } })
        }
        ("scheduler", variant) => {
            json!({ "scheduler": { "type": variant.unwrap_or("OneCycle"), "params": {} } })
        }
        _ if entry.path.starts_with("zero_optimization.offload_") => {
            let section = entry.path.split('.').nth(1).unwrap();
            let device = if entry.key.name == "device" { "none" } else { "nvme" };
            json!({ "zero_optimization": { "stage": 3, section: { "device": device } } })
        }
        ("activation_checkpointing", _) => json!({ "ulysses": { "activation_checkpointing": true } }),
        _ if ["ulysses.activation_checkpointing_interval", "ulysses.save_attention_output"]
            .contains(&entry.path.as_str()) =>
        {
            json!({ "ulysses": { "activation_checkpointing": true } })
        }
        _ if entry.path == "ulysses.attention" => json!({ "bf16": { "enabled": true } }),
        _ if entry.path.starts_with("ulysses.parameter_groups.") => {
            json!({ "ulysses": { "parameter_groups": [{ "match": "a name" }] } })
        }
        _ if entry.path.starts_with("tensor_parallel.partition_config.layer_specs.") => {
            let spec = json!({ "patterns": ["a name"] });
            json!({ "tensor_parallel": { "partition_config": { "layer_specs": [spec] } } })
        }
        _ if entry.path.starts_with("ulysses.data.") => {
            json!({ "ulysses": { "data": [{ "path": "a path", "weight": 2.0 }] } })
        }
        _ if entry.path == "ulysses.validation.fraction" => json!({}),
        _ if entry.path.starts_with("ulysses.validation.") => {
            json!({ "ulysses": { "validation": { "data": "a path" } } })
        }
        _ => json!({}),
    };
    file.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    file
}

fn with_value(entry: &Entry, value: Value) -> String {
    let mut file = surroundings(entry);
    let mut section = &mut file;
    let (last, sections) =
        entry.path.split('.').collect::<Vec<_>>().split_last().map(|(l, s)| (*l, s.to_vec())).unwrap();
    for name in sections {
        if section[name].is_array() {
            section = &mut section[name][0];
            continue;
        }
        if !section[name].is_object() {
            section[name] = json!({});
        }
        section = &mut section[name];
    }
    section[last] = value;
    file.to_string()
}

/// The path of a key in messages about such a file.
fn shown_path(entry: &Entry) -> String {
    entry.path.replace("layer_specs.", "layer_specs[0].")
}

/// Returns the settings of the config, without notes.
fn settings(text: &str) -> Config {
    let config = Config::from_json_str(text, "c.json").unwrap_or_else(|error| panic!("{text}\n{error}"));
    Config { notes: vec![], autos: vec![], ..config }
}

fn notes(text: &str) -> Vec<Note> {
    Config::from_json_str(text, "c.json").unwrap_or_else(|error| panic!("{text}\n{error}")).notes
}

/// The keys whose second value this version does not have.
const WITHOUT_ALTERNATIVE: [&str; 2] = ["ulysses.backend", "type"];

#[test]
fn every_supported_key_changes_the_config() {
    let mut num_keys = 0;
    for entry in leaves() {
        let is_supported = matches!(entry.key.effect, Effect::Supported);
        let has_alternative = !WITHOUT_ALTERNATIVE.contains(&entry.path.as_str()) && entry.key.name != "type";
        let is_fixed = entry.variant == Some("AdamW") && entry.key.name == "adam_w_mode";
        if is_supported && has_alternative && !is_fixed {
            let changed = match entry.path.as_str() {
                // They are on in the surroundings.
                "fp16.enabled" | "bf16.enabled" => json!(false),
                _ => sample(entry.key),
            };
            let text = with_value(&entry, changed);
            let before = if entry.path == "train_batch_size" {
                with_value(&entry, json!(24))
            } else {
                surroundings(&entry).to_string()
            };
            assert_ne!(settings(&text), settings(&before), "{} {:?}", entry.path, entry.variant);
            num_keys += 1;
        }
    }
    assert!(num_keys > 60, "{num_keys}");
}

#[test]
fn every_key_without_effect_leaves_one_note_and_the_config_as_it_is() {
    let mut num_keys = 0;
    for entry in leaves() {
        let Effect::Ignored(why) = entry.key.effect else { continue };
        let text = with_value(&entry, sample(entry.key));
        let is_note = |note: &&Note| note.contains(&format!("`{}` has no effect: {why}", shown_path(&entry)));
        assert_eq!(notes(&text).iter().filter(is_note).count(), 1, "{text} {:?}", notes(&text));
        let severity = if entry.key.is_missed { Severity::Warning } else { Severity::Info };
        assert_eq!(notes(&text).iter().find(is_note).unwrap().severity, severity, "{text}");
        assert_eq!(settings(&text), settings(&surroundings(&entry).to_string()), "{text}");
        num_keys += 1;
    }
    assert!(num_keys > 100, "{num_keys}");
}

#[test]
fn every_refused_key_is_refused_with_its_reason_and_accepted_when_it_is_off() {
    let mut num_keys = 0;
    for entry in leaves() {
        let Effect::Refused { harmless, reason } = entry.key.effect else { continue };
        let on = message(&with_value(&entry, sample(entry.key)));
        assert!(on.contains(&format!("`{}`: {reason}", shown_path(&entry))), "{on}");
        let off: Vec<_> = match harmless {
            Harmless::Values(values) => values.iter().map(|literal| literal.to_json()).collect(),
            Harmless::NothingEnabled => vec![json!({ "shared": [{ "enabled": false }, 1] })],
        };
        for value in off {
            let text = with_value(&entry, value);
            assert_eq!(settings(&text), settings(&surroundings(&entry).to_string()), "{text}");
        }
        num_keys += 1;
    }
    assert!(num_keys > 50, "{num_keys}");
}

#[test]
fn idle_keys_are_checked_but_change_nothing() {
    for entry in leaves() {
        if matches!(entry.key.effect, Effect::Idle) {
            let text = with_value(&entry, sample(entry.key));
            assert_eq!(settings(&text), settings(&surroundings(&entry).to_string()), "{text}");
            if !matches!(entry.key.value, Kind::Anything) {
                let wrong = message(&with_value(&entry, json!({ "a": 1 })));
                assert!(wrong.contains(&format!("`{}`: expected", entry.path)), "{wrong}");
            }
        }
    }
}

#[test]
fn an_alias_is_read_as_its_target_with_a_note() {
    for entry in leaves() {
        let Effect::Renamed(to) = entry.key.effect else { continue };
        let target =
            entry.path.rsplit_once('.').map_or(to.to_owned(), |(section, _)| format!("{section}.{to}"));
        let new = entries().into_iter().find(|new| new.path == target).unwrap();
        let (text, direct) = (with_value(&entry, sample(entry.key)), with_value(&new, sample(entry.key)));
        assert_eq!(settings(&text), settings(&direct), "{text}");
        let notes = notes(&text);
        assert!(
            notes.iter().any(|note| note.contains(&target) && note.contains("is an alias of")),
            "{notes:?}"
        );
    }
    let both = r#"{"train_batch_size": 1, "bf16": {}, "bfloat16": {}}"#;
    assert_eq!(
        message(both),
        "c.json:1:37: `bfloat16`: an alias of `bf16`, which is also set: remove one of them"
    );
    let config = config_with(r#""bfloat16": {"enabled": true}"#);
    assert_eq!(config.precision, Precision::Bf16 { check_grad_overflow: true });
}

#[test]
fn zero_as_a_boolean_is_stage_1() {
    let config = config_with(r#""zero_optimization": true, "allgather_size": 5e8"#);
    assert_eq!(config.zero.stage, ZeroStage::OptimizerStates);
    assert!(config.notes.iter().any(|note| note.contains("`zero_optimization.stage`")), "{:?}", config.notes);
    assert_eq!(config_with(r#""zero_optimization": false"#).zero.stage, ZeroStage::Disabled);
}

#[test]
fn the_table_is_consistent() {
    for entry in entries() {
        let sections: Vec<_> = match entry.key.value {
            Kind::Params(variants) => variants.iter().map(|variant| variant.params).collect(),
            value => vec![value.keys()],
        };
        for keys in sections {
            let mut names: Vec<_> = keys.iter().map(|key| key.name).collect();
            names.sort_unstable();
            let num_names = names.len();
            names.dedup();
            assert_eq!(names.len(), num_names, "a name twice in {}", entry.path);
            for key in keys {
                if let Effect::Renamed(to) = key.effect {
                    assert!(find(keys, to).is_some(), "{} names no key", key.name);
                }
            }
        }
        if let (DefaultValue::Is(literal), false) =
            (entry.key.default, matches!(entry.key.effect, Effect::Renamed(_)))
        {
            let is_contradiction =
                matches!(literal, Literal::Boolean(false)) && entry.key.name == "adam_w_mode";
            assert!(!is_contradiction);
            settings(&with_value(&entry, literal.to_json()));
        }
    }
}

#[test]
fn explanations_say_what_a_key_does() {
    assert_eq!(
        explain("gradient_clipping").unwrap(),
        "gradient_clipping\n  what     Maximum norm of the global gradient; 0 disables clipping. (DeepSpeed \
         0.19's default is 1.)\n  value    a number ≥ 0 that f32 can represent\n  default  0.0\n  auto     1.0\n  \
         support  supported\n"
    );
    let stage = explain("zero_optimization.stage").unwrap();
    assert!(stage.contains("an integer from 0 to 3") && stage.contains("supported"), "{stage}");
    // A section is not supported as a whole.
    let section = explain("wandb").unwrap();
    assert!(section.contains("\n  keys     enabled, ") && !section.contains("supported"), "{section}");
    let by_last_name = explain("overlap_comm").unwrap();
    assert!(by_last_name.starts_with("zero_optimization.overlap_comm\n"), "{by_last_name}");
    for (name, answer) in
        [("lora", "adapters (LoRA) are not implemented"), ("DPO", "cross-entropy"), ("generate", "export")]
    {
        let text = explain(name).unwrap();
        assert!(
            text.starts_with(&format!("`{name}` does not exist here: ")) && text.contains(answer),
            "{text}"
        );
    }
    assert!(explain("offload_param.device").is_err());
    let decay = explain("optimizer.params.weight_decay").unwrap();
    for optimizer in OptimizerConfig::names() {
        assert!(decay.contains(&format!("(of {optimizer})")), "{decay}");
    }
    let synonym = explain("warmup_ratio").unwrap();
    assert!(synonym.starts_with(
        "`warmup_ratio` is called `scheduler.params.warmup_num_steps` here, in steps, not as a ratio\n\n\
         scheduler.params.warmup_num_steps (of WarmupLR)\n"
    ));
    for synonym in crate::config_file::vocabulary::synonyms() {
        let explanation = explain(synonym.name).unwrap();
        assert!(explanation.contains(synonym.key), "{explanation}");
    }
    assert_eq!(
        explain("cosine").unwrap(),
        "`scheduler.type` \"cosine\": the schedule is called \"WarmupCosineLR\" here\n"
    );
    assert_eq!(
        explain("zero_optimisation.stge").unwrap_err().to_string(),
        "unknown key `zero_optimisation.stge`, did you mean `zero_optimization.stage`?"
    );
    assert_eq!(explain("~").unwrap_err().to_string(), "unknown key `~`");
}
