//! `configs/ulysses.schema.json`, generated from the vocabulary.

use super::explain::effect_text;
use crate::config::config::root;
use crate::config_file::vocabulary::{
    Array, DEEPSPEED_VERSION, DefaultValue, Effect, Harmless, Key, Literal, Max, Range, Value as Kind,
    Variant,
};
use serde_json::{Map, Value, json};

/// Returns a JSON Schema (draft 2020-12) of the config file, for editors. `configs/ulysses.schema.json` is this
/// value, as a test checks; `ulysses config schema` regenerates it.
///
/// Unlike the reader, the schema accepts names of choices in one case only. Of the contradictions between keys, it
/// checks only the ZeRO stages of offload.
pub fn json_schema() -> Value {
    let Value::Object(keys) = object(root()) else { return Value::Null };
    let mut schema = Map::new();
    schema.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
    schema.insert("title".into(), format!("ulysses, with the keys of DeepSpeed {DEEPSPEED_VERSION}").into());
    schema.extend(keys);
    let mut schema = Value::Object(schema);
    if let Some(zero) = schema.pointer_mut("/properties/zero_optimization/anyOf/0") {
        zero["anyOf"] = stages_of_offload();
    }
    schema
}

/// Returns the stages that `offload_param` and `offload_optimizer` require.
fn stages_of_offload() -> Value {
    let off = json!({ "properties": { "device": { "enum": ["none", "auto"] } } });
    let no = json!({ "enum": [false, "auto", null] });
    let no_param = json!({ "offload_param": off, "cpu_offload_param": no });
    let mut stages_1_and_2 = json!({ "properties": no_param, "required": ["stage"] });
    stages_1_and_2["properties"]["stage"] = json!({ "enum": [1, 2] });
    let mut any_stage = json!({ "properties": no_param });
    any_stage["properties"]["offload_optimizer"] = off;
    any_stage["properties"]["cpu_offload"] = no;
    json!([
        { "properties": { "stage": { "const": 3 } }, "required": ["stage"] },
        stages_1_and_2,
        any_stage,
    ])
}

fn object(keys: &'static [Key]) -> Value {
    let properties: Map<_, _> = keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    let required: Vec<_> =
        keys.iter().filter(|key| matches!(key.default, DefaultValue::Required)).map(|key| key.name).collect();
    let mut object = json!({ "type": "object", "additionalProperties": false, "properties": properties });
    object["patternProperties"] = json!({ "^_": {} });
    if !required.is_empty() {
        object["required"] = required.into();
    }
    for key in keys {
        if let Kind::Params(variants) = key.value {
            object["oneOf"] = variants.iter().map(|variant| variant_of(key.name, variant)).collect();
        }
    }
    object
}

/// Returns the schema of the section with the variant's `type`.
fn variant_of(params: &str, variant: &Variant) -> Value {
    let mut alternative = json!({ "properties": { "type": { "enum": names_of(variant) } } });
    alternative["properties"][params] = object(variant.params);
    if variant.params.iter().any(|key| matches!(key.default, DefaultValue::Required)) {
        alternative["required"] = json!([params]);
    }
    alternative
}

fn names_of(variant: &Variant) -> Vec<&'static str> {
    variant.names().collect()
}

fn property(key: &'static Key) -> Value {
    let mut schema = match key.effect {
        Effect::Refused { harmless: Harmless::Values(values), .. } => match literals(key, values) {
            values if values.is_empty() => json!({ "not": {} }),
            values => json!({ "enum": values }),
        },
        _ => with_words(key, value(key.value)),
    };
    schema["description"] = description(key).into();
    if let DefaultValue::Is(default) = key.default {
        schema["default"] = default.to_json();
    }
    if matches!(key.effect, Effect::Renamed(_)) {
        schema["deprecated"] = true.into();
    }
    schema
}

fn description(key: &Key) -> String {
    match (key.about, effect_text(key)) {
        (about, _) if matches!(key.effect, Effect::Supported) => about.to_owned(),
        ("", effect) => effect,
        (about, effect) => format!("{about} Here: {effect}."),
    }
}

/// Returns the harmless values, without those that JSON Schema considers equal, and `"auto"`.
fn literals(key: &Key, values: &[Literal]) -> Vec<Value> {
    let mut values: Vec<_> = values.iter().map(|literal| literal.to_json()).collect();
    values.dedup_by(|a, b| a.as_f64().is_some() && a.as_f64() == b.as_f64());
    let others: Vec<_> = words(key).filter(|word| !values.contains(word)).collect();
    values.extend(others);
    values
}

/// Returns `"auto"` and null, if the key accepts them.
fn words(key: &Key) -> impl Iterator<Item = Value> {
    let words = [(key.value.takes_auto(), json!("auto")), (key.or_null, Value::Null)];
    words.into_iter().filter(|(is_accepted, _)| *is_accepted).map(|(_, word)| word)
}

/// Adds `"auto"` and `null` as alternatives where the key accepts them.
fn with_words(key: &Key, schema: Value) -> Value {
    let words = words(key).map(|word| match word {
        Value::Null => json!({ "type": "null" }),
        word => json!({ "const": word }),
    });
    let mut alternatives: Vec<_> = std::iter::once(schema).chain(words).collect();
    match alternatives.len() {
        1 => alternatives.remove(0),
        _ => json!({ "anyOf": alternatives }),
    }
}

fn value(kind: Kind) -> Value {
    match kind {
        Kind::Boolean => json!({ "type": "boolean" }),
        Kind::Integer { min, max: u64::MAX } => json!({ "type": "integer", "minimum": min }),
        Kind::Integer { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Signed => json!({ "type": "integer" }),
        Kind::Number(range) => number(range),
        Kind::Text => json!({ "type": "string", "minLength": 1 }),
        Kind::AnyText => json!({ "type": "string" }),
        Kind::Choice(names) => json!({ "enum": names }),
        Kind::Array(kind) => array(kind),
        Kind::Names(names) => json!({ "type": "array", "items": value(Kind::Choice(names)) }),
        Kind::Section(keys) => object(keys),
        Kind::TextOrSections(keys) => {
            let text = value(Kind::Text);
            let element = json!({ "anyOf": [text, object(keys)] });
            json!({ "anyOf": [text, { "type": "array", "items": element, "minItems": 1 }] })
        }
        Kind::Mesh => {
            let axes =
                json!({ "type": "object", "additionalProperties": { "type": "integer", "minimum": -1 } });
            let sides = json!({ "intra": axes, "inter": axes, "ici": axes, "dcn": axes });
            let object = json!({ "type": "object", "properties": sides, "additionalProperties": false });
            json!({ "anyOf": [value(Kind::Text), object] })
        }
        Kind::Rule => {
            let mesh = json!({ "anyOf": [value(Kind::Mesh), { "type": "null" }] });
            let items = json!([value(Kind::Text), mesh, { "type": "object" }]);
            json!({ "type": "array", "prefixItems": items, "items": false, "minItems": 2 })
        }
        Kind::SwitchOrSection(keys) => json!({ "anyOf": [object(keys), { "type": "boolean" }] }),
        Kind::Variant { variants, .. } => {
            json!({ "enum": variants.iter().flat_map(names_of).collect::<Vec<_>>() })
        }
        Kind::Params(_) => json!({ "type": "object" }),
        Kind::Anything => json!({}),
    }
}

fn number(range: Range) -> Value {
    let mut schema = json!({ "type": "number", "minimum": range.min });
    match range.max {
        Max::Unbounded => schema["maximum"] = f64::from(f32::MAX).into(),
        Max::AtMost(max) => schema["maximum"] = max.into(),
        Max::Below(max) => schema["exclusiveMaximum"] = max.into(),
    }
    schema
}

fn array(Array { element, min_len, max_len, .. }: Array) -> Value {
    let mut schema = json!({ "type": "array" });
    if !matches!(element, Kind::Anything) {
        schema["items"] = value(*element);
    }
    if min_len > 0 {
        schema["minItems"] = min_len.into();
    }
    if max_len < usize::MAX {
        schema["maxItems"] = max_len.into();
    }
    schema
}
