//! The config reader on hostile input: every input gives a config or an error, in bounded memory.
//!
//! Each property tries 256 inputs; `PROPTEST_CASES=1000000 cargo test --release --test engine config::properties` tries a million
//! of each.

use crate::support::sample::seed;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config as Settings, RngSeed};
use serde_json::Value;
use std::path::PathBuf;
use ulysses::config::{Config, ConfigError, ConfigFileError, json_schema};
use ulysses::memory::PeakMeter;

/// Maximum number of listed errors, and maximum bytes of one with its excerpt.
const MAX_FAULTS: usize = 100;
const MAX_FAULT_BYTES: usize = 4096;

/// Peak memory of reading a file: a constant, and a factor of its length.
const MAX_FIXED_BYTES: u64 = 1 << 20;
const MAX_BYTES_PER_BYTE: u64 = 1000;

/// Additional memory of a hundred compiled patterns, the maximum number.
const MAX_PATTERN_BYTES: u64 = 32 << 20;

fn settings() -> Settings {
    // Failures are printed, not stored in the source tree.
    let rng_seed = seed().map_or(RngSeed::Random, RngSeed::Fixed);
    Settings { failure_persistence: None, max_shrink_iters: 2000, rng_seed, ..Settings::default() }
}

/// Reads `text`, and checks the result and the memory that it takes.
fn answer(text: &str) -> Result<(), TestCaseError> {
    answer_within(MAX_FIXED_BYTES, text)
}

fn answer_within(max_fixed_bytes: u64, text: &str) -> Result<(), TestCaseError> {
    let meter = PeakMeter::start();
    let answer = Config::from_json_str(text, "c.json");
    let (held, max) = (meter.bytes(), max_fixed_bytes + MAX_BYTES_PER_BYTE * text.len() as u64);
    prop_assert!(held <= max, "{} bytes held at the peak to read {}", held, text.len());
    match answer {
        Ok(config) => {
            let written = serde_json::to_string(&config).unwrap();
            let again = Config::from_json_str(&written, "again.json");
            let again = again.map_err(|error| TestCaseError::fail(format!("{written}\n{error}")))?;
            let settings = |config| Config { notes: vec![], autos: vec![], ..config };
            prop_assert_eq!(settings(again), settings(config));
        }
        Err(error) => {
            let message = error.to_string();
            prop_assert!(message.starts_with("c.json"), "{}", message);
            prop_assert!(message.len() <= MAX_FAULTS * MAX_FAULT_BYTES, "{} bytes", message.len());
            if let ConfigError::File(ConfigFileError::Invalid { diagnostics, omitted, .. }) = error {
                prop_assert!(!diagnostics.is_empty() && diagnostics.len() <= MAX_FAULTS);
                prop_assert!(omitted == 0 || diagnostics.len() == MAX_FAULTS);
                let num_lines = text.split('\n').count();
                prop_assert!(diagnostics.iter().all(|fault| (1..=num_lines).contains(&fault.position.line)));
            }
        }
    }
    Ok(())
}

/// The files of DeepSpeed and our own.
fn valid_files() -> Vec<String> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let entries =
        ["configs", "tests/fixtures/ds_configs"].map(|folder| std::fs::read_dir(root.join(folder)).unwrap());
    let paths = entries.into_iter().flatten().map(|entry| entry.unwrap().path());
    let texts = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let texts: Vec<_> = texts.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    assert!(texts.len() > 15);
    texts.into_iter().filter(|text| text.len() < 10_000).collect()
}

#[derive(Clone, Debug)]
enum Mutation {
    Replace(u8),
    Insert(&'static str),
    Delete(usize),
    Repeat(usize),
}

/// Fragments that break parsers.
const FRAGMENTS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "null",
    "true",
    "\"auto\"",
    "-",
    "-0",
    "1e400",
    "-1e-400",
    "0.1e+",
    "18446744073709551616",
    "99999999999999999999999999",
    "NaN",
    "Infinity",
    "/*",
    "//",
    "\n",
    "\u{0}",
    "\u{feff}",
    "\u{2028}",
    "ß",
    "😀",
    "\"stage\":",
    "\"enabled\":true,",
    "[[[[[[[[",
    "{\"a\":{\"a\":",
];

fn mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        any::<u8>().prop_map(Mutation::Replace),
        select(FRAGMENTS).prop_map(Mutation::Insert),
        (1..40usize).prop_map(Mutation::Delete),
        (1..200usize).prop_map(Mutation::Repeat),
    ]
}

fn mutated(text: &str, mutations: &[(prop::sample::Index, Mutation)]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for (place, mutation) in mutations {
        let at = place.index(bytes.len() + 1);
        let until = |length: &usize| (at + length).min(bytes.len());
        match mutation {
            Mutation::Replace(byte) if at < bytes.len() => bytes[at] = *byte,
            Mutation::Replace(byte) => bytes.push(*byte),
            Mutation::Insert(fragment) => drop(bytes.splice(at..at, fragment.bytes())),
            Mutation::Delete(length) => drop(bytes.drain(at..until(length))),
            Mutation::Repeat(length) => {
                let part = bytes[at..until(length)].to_vec();
                drop(bytes.splice(at..at, part));
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Any JSON value of a few levels.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0..20u64).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0.0..1.0f64).prop_map(Value::from),
        select(vec!["auto", "", "Adam", "SGD", "OneCycle", "WarmupLR", "cpu", "fp32", "x"])
            .prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        let member = (select(vec!["type", "params", "enabled", "lr", "stage", "x"]), inner.clone());
        let object =
            |members: Vec<(&str, Value)>| members.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        prop_oneof![vec(inner, 0..6).prop_map(Value::from), vec(member, 0..6).prop_map(object)]
    })
}

/// A file whose keys are known ones, in their sections, with any values or fitting ones.
fn known_keys() -> impl Strategy<Value = Value> {
    let mut places = Vec::new();
    collect_places(&json_schema(), &mut Vec::new(), &mut places);
    assert!(places.len() > 300, "{}", places.len());
    let fitting =
        |(path, default): (Vec<String>, Value)| (Just(path), prop_oneof![any_value(), Just(default)]);
    vec(select(places).prop_flat_map(fitting), 0..20).prop_map(|members| {
        let mut file = Value::Object(serde_json::Map::new());
        for (path, value) in members {
            let (last, sections) = path.split_last().unwrap();
            let section = sections.iter().try_fold(&mut file, |section, name| {
                let section = section.as_object_mut()?;
                Some(section.entry(name).or_insert_with(|| Value::Object(serde_json::Map::new())))
            });
            if let Some(Value::Object(section)) = section {
                section.insert(last.clone(), value);
            }
        }
        file
    })
}

/// The paths of all keys of the schema with their defaults.
fn collect_places(schema: &Value, path: &mut Vec<String>, places: &mut Vec<(Vec<String>, Value)>) {
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        path.push(name.clone());
        places.push((path.clone(), property.get("default").cloned().unwrap_or(1.into())));
        collect_places(property, path, places);
        path.pop();
    }
    for alternative in ["anyOf", "oneOf"].iter().filter_map(|word| schema[word].as_array()).flatten() {
        collect_places(alternative, path, places);
    }
}

/// Short patterns that compile to much: as large as is allowed, as many as are allowed.
#[test]
fn patterns_hold_a_bounded_amount_of_memory() {
    let reads = [1, 2, 5, 10, 20, 50, 500].map(|length| {
        let group = format!(r#"{{"match": "\\w{{{length}}}"}}"#);
        let text = format!(
            r#"{{"train_batch_size": 4, "ulysses": {{"parameter_groups": [{}]}}}}"#,
            vec![group; 100].join(", ")
        );
        answer_within(MAX_PATTERN_BYTES, &text).unwrap();
        Config::from_json_str(&text, "c.json").is_ok()
    });
    assert!(reads[0] && !reads[6], "some are taken, some are too large: {reads:?}");
}

proptest! {
    #![proptest_config(settings())]

    #[test]
    fn any_bytes_get_an_answer(bytes in vec(any::<u8>(), 0..400)) {
        answer(&String::from_utf8_lossy(&bytes))?;
    }

    #[test]
    fn any_heap_of_fragments_gets_an_answer(fragments in vec(select(FRAGMENTS), 0..120)) {
        answer(&fragments.concat())?;
        answer(&format!("{{{}}}", fragments.concat()))?;
    }

    #[test]
    fn damaged_files_get_an_answer(
        text in select(valid_files()),
        mutations in vec((any::<prop::sample::Index>(), mutation()), 1..6),
    ) {
        answer(&mutated(&text, &mutations))?;
    }

    #[test]
    fn known_keys_with_any_values_get_an_answer(file in known_keys()) {
        answer(&file.to_string())?;
    }

    #[test]
    fn nested_values_get_an_answer(key in select(vec!["seed", "optimizer", "amp", "zenflow", "x"]), value in any_value()) {
        answer(&serde_json::json!({ key: value }).to_string())?;
    }
}
