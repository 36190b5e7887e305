//! The settings of a run, each with its origin.

use super::run::RunFiles;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The origin of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Origin {
    File,
    Auto,
    Flag,
    Default,
}

/// What `mesh_param` sets.
const MESH_PARAM: [&str; 2] = ["data_parallel_size", "sequence_parallel_size"];

/// What `--mesh` sets besides.
const DIVIDED: [&str; 2] = ["pipeline_parallel_size", "tensor_parallel_size"];

/// A key of the resolved config.
#[derive(Serialize)]
pub(super) struct Setting {
    key: String,
    value: String,
    origin: Origin,
}

/// Values by their path, such as `optimizer.type`.
type Flat = Map<String, Value>;

/// Returns every key of the resolved config, if there is one.
pub(super) fn rows(run: &RunFiles) -> Vec<Setting> {
    let given = flat(&run.record["given_config"]);
    let flags = flags(&run.record["command"]);
    let settings = flat(&run.config);
    let setting = |(key, value): (&String, &Value)| Setting {
        key: key.clone(),
        value: shown(key, value, &given, &settings),
        origin: origin(key, value, &given, &flags),
    };
    settings.iter().map(setting).collect()
}

/// Formats a value. The optimizer keeps the name in the file, such as `FusedAdam`, which the resolved config normalizes.
fn shown(key: &str, value: &Value, given: &Flat, settings: &Flat) -> String {
    let name = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let lower = |name: &str| name.to_ascii_lowercase();
    match given.get(key) {
        _ if key != "optimizer.type" => name,
        Some(Value::String(given)) if lower(given).contains(&lower(&name)) => given.clone(),
        // The default is AdamW.
        None if settings.get("optimizer.params.adam_w_mode") == Some(&Value::Bool(true)) => {
            format!("{name}W")
        }
        _ => name,
    }
}

fn origin(key: &str, value: &Value, given: &Flat, flags: &BTreeSet<String>) -> Origin {
    let name = key.rsplit('.').next().unwrap_or(key);
    // `--set` names a key, or a section that contains it.
    let is_set =
        |flag: &String| key.strip_prefix(flag).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    if flags.contains(name) || flags.iter().any(is_set) {
        return Origin::Flag;
    }
    match given.get(key) {
        Some(given) if given == "auto" && value != "auto" => Origin::Auto,
        Some(_) => Origin::File,
        None if MESH_PARAM.contains(&name) && given.contains_key("mesh_param") => Origin::File,
        // `sequence_parallel_size` without a dp size sets the axes of ZeRO's partitions too.
        None if key == "ulysses.zero_partition_axes" && *value == json!(["dp", "sp"]) => Origin::File,
        None => Origin::Default,
    }
}

/// Returns the keys that the command's flags set: whole ones, or their last parts.
fn flags(command: &Value) -> BTreeSet<String> {
    let words: Vec<&str> = command.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut names = BTreeSet::new();
    for (index, word) in words.iter().enumerate() {
        let Some(flag) = word.strip_prefix("--") else { continue };
        let (flag, value) = match flag.split_once('=') {
            Some((flag, value)) => (flag, Some(value)),
            None => (flag, words.get(index + 1).copied()),
        };
        match flag {
            "mesh" => names.extend([MESH_PARAM, DIVIDED].concat().into_iter().map(str::to_owned)),
            "zero-stage" => _ = names.insert("zero_optimization.stage".to_owned()),
            "batch-size" => _ = names.insert("train_batch_size".to_owned()),
            "set" => match value.and_then(|value| value.split('=').next()) {
                Some("mesh_param") => names.extend(MESH_PARAM.map(str::to_owned)),
                key => names.extend(key.map(str::to_owned)),
            },
            _ => _ = names.insert(flag.replace('-', "_")),
        }
    }
    names
}

/// Flattens an object into paths and leaf values.
fn flat(value: &Value) -> Flat {
    let mut values = Flat::new();
    for (name, value) in value.as_object().into_iter().flatten() {
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                values.extend(flat(value).into_iter().map(|(path, value)| (format!("{name}.{path}"), value)));
            }
            _ => _ = values.insert(name.clone(), value.clone()),
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_optimizer_keeps_its_name_in_the_file() {
        let settings = flat(&json!({ "optimizer": { "type": "Adam", "params": { "adam_w_mode": true } } }));
        let shown = |given: Value, resolved: &str| {
            shown("optimizer.type", &json!(resolved), &flat(&json!({ "optimizer": given })), &settings)
        };
        for name in ["AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam", "adamw"] {
            assert_eq!(shown(json!({ "type": name }), "Adam"), name);
        }
        assert_eq!(shown(json!({ "type": "AdamW" }), "Lion"), "Lion", "a flag may set another");
        assert_eq!(shown(json!({}), "Adam"), "AdamW", "the default");
    }

    #[test]
    fn settings_show_their_origin() {
        let given = flat(&json!({
            "mesh_param": [2, 2],
            "optimizer": { "type": "AdamW", "params": { "lr": "auto" } },
            "ulysses": { "steps": 10 },
        }));
        let command = "ulysses train c.json --steps 20 --seq-len=64 --zero-stage 3 --set bf16.enabled=true --set=seed=7";
        let flags = flags(&json!(command.split(' ').collect::<Vec<_>>()));
        let of = |key: &str, value: Value| origin(key, &value, &given, &flags);
        assert_eq!(of("optimizer.type", json!("AdamW")), Origin::File);
        assert_eq!(of("optimizer.params.lr", json!(1e-3)), Origin::Auto);
        assert_eq!(of("ulysses.steps", json!(20)), Origin::Flag);
        assert_eq!(of("ulysses.seq_len", json!(64)), Origin::Flag);
        assert_eq!(of("sequence_parallel_size", json!(2)), Origin::File);
        for (key, value) in
            [("zero_optimization.stage", json!(3)), ("bf16.enabled", json!(true)), ("seed", json!(7))]
        {
            assert_eq!(of(key, value), Origin::Flag, "{key}");
        }
        assert_eq!(
            of("fp16.enabled", json!(false)),
            Origin::Default,
            "another section's key of the same name"
        );
        let of_set = |set: &str| super::flags(&json!(["ulysses", "train", "c.json", "--set", set]));
        let section = of_set("bf16={\"enabled\":true}");
        assert_eq!(origin("bf16.enabled", &json!(true), &Flat::new(), &section), Origin::Flag);
        assert_eq!(origin("bf16_more.enabled", &json!(true), &Flat::new(), &section), Origin::Default);
        let mesh = of_set("mesh_param=[2,4]");
        assert_eq!(origin("sequence_parallel_size", &json!(4), &Flat::new(), &mesh), Origin::Flag);
    }
}
