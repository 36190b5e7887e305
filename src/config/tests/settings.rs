//! Flags that change a file, and partial resolution.

use super::*;
use serde_json::json;

fn set(texts: &[&str]) -> Settings {
    Settings { set: texts.iter().map(|text| Setting::parse(text).unwrap()).collect(), ..Settings::default() }
}

fn resolved(text: &str, settings: &Settings) -> Config {
    let raw =
        RawConfig::from_json_str_with(text, "c.json", settings).unwrap_or_else(|error| panic!("{error}"));
    raw.resolve(&Overrides::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn refusal(text: &str, settings: &Settings) -> String {
    let raw = RawConfig::from_json_str_with(text, "c.json", settings);
    raw.and_then(|raw| raw.resolve(&Overrides::default())).unwrap_err().to_string()
}

const FILE: &str = "{\n  \"train_batch_size\": 8,\n  \"optimizer\": { \"type\": \"Adam\" }\n}";

#[test]
fn settings_apply_in_order_and_other_flags_come_last() {
    let settings = set(&[
        "train_batch_size=16",
        "zero_optimization.stage=1",
        "zero_optimization.stage=2",
        "ulysses.model=nano",
        "ulysses.steps=7",
        "ulysses.data=[\"a.txt\", \"b.txt\"]",
        "optimizer.params.betas=[0.8, 0.9]",
        "bf16={\"enabled\": true}",
        "ulysses.output=10=x",
    ]);
    let config = resolved(FILE, &settings);
    assert_eq!((config.train_batch_size, u8::from(config.zero.stage)), (16, 2));
    assert_eq!((config.ulysses.model.as_deref(), config.ulysses.steps), (Some("nano"), Some(7)));
    assert_eq!((config.ulysses.data.len(), config.ulysses.output.as_deref()), (2, Some("10=x")));
    assert_eq!(config.precision.dtype(), candle_core::DType::BF16);
    assert!(matches!(config.optimizer, OptimizerConfig::Adam(Adam { betas: [0.8, 0.9], .. })));
    let flags = Settings { zero_stage: Some(3), batch_size: Some(4), lr: Some(0.5), ..settings };
    let config = resolved(FILE, &flags);
    assert_eq!((config.train_batch_size, u8::from(config.zero.stage), config.optimizer.lr()), (4, 3, 0.5));
    let written = serde_json::to_value(&config).unwrap();
    assert_eq!(written["optimizer"]["params"]["lr"], json!(0.5), "a resolved file holds what was set");
    assert_eq!(
        Config::from_json_str(&written.to_string(), "again.json").unwrap().zero.stage,
        config.zero.stage
    );
}

#[test]
fn errors_of_settings_name_the_flag_and_those_of_the_file_their_line() {
    let fault = |text: &str| refusal(FILE, &set(&[text]));
    assert_eq!(
        fault("zero_optimization.stge=3"),
        "--set zero_optimization.stge=3: unknown key `zero_optimization.stge`, did you mean `zero_optimization.stage`?"
    );
    assert_eq!(
        fault("train_batch_size=many"),
        "--set train_batch_size=many: `train_batch_size`: expected an integer ≥ 1 and < 2^64, found the string \"many\""
    );
    assert!(fault("scheduler.params.warmup_num_steps=1").contains("missing key `scheduler.type`"));
    let micro = fault("train_micro_batch_size_per_gpu=3");
    assert!(
        micro
            .starts_with("--set train_micro_batch_size_per_gpu=3: `train_batch_size` 8 is not a multiple of"),
        "{micro}"
    );
    let twice = refusal(FILE, &set(&["mesh_param=[2,1]", "sequence_parallel_size=2"]));
    assert!(twice.contains("sp is 1 by `mesh_param` (on the command line)"), "{twice}");
    let nested = format!("ulysses.model={}1{}", "[".repeat(70), "]".repeat(70));
    assert!(fault(&nested).contains("nested too deeply"), "{}", fault(&nested));
    let both = refusal("{\n  \"sede\": 1\n}", &set(&["steps_per_print=0"]));
    assert!(both.starts_with("--set steps_per_print=0: `steps_per_print`: expected"), "{both}");
    assert!(
        both.contains("c.json:2:3: unknown key `sede`") && both.contains("    2 |   \"sede\": 1"),
        "{both}"
    );
    // What a flag replaces is not looked into.
    assert_eq!(resolved("{\"train_batch_size\": \"x\"}", &set(&["train_batch_size=2"])).train_batch_size, 2);
    for text in ["stage", "=3", "a..b=1", ".a=1", ""] {
        assert!(Setting::parse(text).unwrap_err().starts_with("expected KEY=VALUE"), "{text}");
    }
}

#[test]
fn the_lr_flag_needs_no_optimizer_and_must_agree_with_the_schedule() {
    let lr = |lr| Settings { lr: Some(lr), ..Settings::default() };
    let config = resolved("{\"train_batch_size\": 1}", &lr(0.25));
    assert_eq!(
        config.optimizer,
        config_with(r#""optimizer": {"type": "AdamW", "params": {"lr": 0.25}}"#).optimizer
    );
    let with = |scheduler: &str| format!("{{\"train_batch_size\": 1, \"scheduler\": {scheduler}}}");
    let own = with(r#"{"type": "WarmupLR", "params": {"warmup_max_lr": 0.001}}"#);
    assert_eq!(
        refusal(&own, &lr(0.25)),
        "--lr: expected 0.001, the rate of the schedule (to change both: --set \
         scheduler.params.warmup_max_lr=0.25), found 0.25"
    );
    let both = Settings { lr: Some(0.25), ..set(&["scheduler.params.warmup_max_lr=0.25"]) };
    assert_eq!(resolved(&own, &both).lr_schedule().lr_at(5000), 0.25);
    for follows in [
        r#"{"type": "WarmupLR"}"#,
        r#"{"type": "WarmupDecayLR", "params": {"total_num_steps": 10000, "warmup_max_lr": "auto"}}"#,
        r#"{"type": "WarmupCosineLR", "params": {"total_num_steps": 10000}}"#,
    ] {
        assert!(resolved(&with(follows), &lr(0.25)).lr_schedule().lr_at(1001) > 0.2, "{follows}");
    }
    let default = with(r#"{"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}"#);
    assert!(refusal(&default, &lr(0.25)).contains("warmup_max_lr"));
    assert!(refusal("{\"optimizer\": {}}", &lr(0.25)).contains("missing key `optimizer.type`"));
    assert!(refusal(FILE, &lr(f64::NAN)).starts_with("--lr NaN: `optimizer.params.lr`: expected a number"));
}

#[test]
fn the_batch_size_flag_keeps_the_micro_batch() {
    let sizes = |text: &str, size| {
        let config = resolved(text, &Settings { batch_size: Some(size), ..Settings::default() });
        (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps)
    };
    let micro = r#""train_micro_batch_size_per_gpu": 2"#;
    assert_eq!(sizes(&format!("{{{micro}, \"gradient_accumulation_steps\": 3}}"), 8), (8, 2, 4));
    let all = format!("{{\"train_batch_size\": 6, {micro}, \"gradient_accumulation_steps\": 3}}");
    assert_eq!(sizes(&all, 12), (12, 2, 6));
    assert_eq!(sizes("{\"train_batch_size\": 6, \"gradient_accumulation_steps\": 3}", 12), (12, 4, 3));
    assert_eq!(sizes("{\"train_micro_batch_size_per_gpu\": \"auto\"}", 3), (3, 3, 1));
    let flag = |size| Settings { batch_size: Some(size), ..Settings::default() };
    assert!(refusal(&all, &flag(7)).contains("`train_batch_size` 7 is not a multiple of"));
    assert!(
        refusal(&all, &flag(0)).starts_with("--batch-size 0: `train_batch_size`: expected an integer ≥ 1")
    );
}

fn partly(text: &str) -> (serde_json::Value, Vec<&'static str>, String) {
    let raw = RawConfig::from_json_str(text, "c.json").unwrap();
    let PartiallyResolved { config, written, open } =
        raw.resolve_partially(&Overrides::default()).unwrap_or_else(|error| panic!("{error}"));
    assert!(config.autos.iter().all(|auto| open.iter().all(|open| open.key != auto.key)), "{config:?}");
    let is_given = |key: &str| !key.starts_with("ulysses.");
    let open: Vec<_> = open.into_iter().filter(|open| is_given(open.key)).collect();
    let needs = open.iter().map(|open| open.needs.as_str()).collect::<Vec<_>>().join("; ");
    (written, open.iter().map(|open| open.key).collect(), needs)
}

#[test]
fn partial_resolution_lists_what_open_values_need() {
    let (written, open, needs) = partly(
        r#"{"train_micro_batch_size_per_gpu": 2, "scheduler":
            {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}"#,
    );
    assert_eq!((open, needs.contains("--steps")), (vec!["scheduler.params.total_num_steps"], true));
    assert_eq!(written["scheduler"]["params"]["total_num_steps"], json!("auto"));
    assert_eq!((&written["train_batch_size"], &written["optimizer"]["type"]), (&json!(2), &json!("Adam")));

    let of_launcher = RawConfig::from_json_str(
        r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}"#,
        "c.json",
    );
    let refused = of_launcher.unwrap().resolve(&Overrides::default()).unwrap_err().to_string();
    let expected =
        "dp 1 = 4: dp is 1 because neither the file nor --mesh sets it; pass --mesh 2x1, or change";
    assert!(refused.contains(expected), "{refused}");

    let (written, open, needs) = partly(
        r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
            "sequence_parallel_size": 2}"#,
    );
    assert_eq!(open, ["data_parallel_size"]);
    assert!(needs.contains("--mesh: the batch sizes need dp 4, such as 4x2"), "{needs}");
    assert_eq!(written["data_parallel_size"], json!(4));
    assert!(Config::from_json_str(&written.to_string(), "again.json").is_ok());

    let (written, open, needs) =
        partly(r#"{"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}"#);
    assert_eq!((open, needs.contains("a multiple of dp 4")), (vec!["data_parallel_size"], true));
    assert!(Config::from_json_str(&written.to_string(), "again.json").is_ok());

    let (written, open, needs) = partly(r#"{"gradient_accumulation_steps": 3}"#);
    assert_eq!((open, needs.contains("--batch-size")), (vec!["train_batch_size"], true));
    assert_eq!((written.get("train_batch_size"), &written["gradient_accumulation_steps"]), (None, &json!(3)));
}

#[test]
fn contradictions_are_refused_in_partial_resolution_too() {
    for (text, expected) in [
        (r#"{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}"#, "is not a multiple of"),
        (
            r#"{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}"#,
            "remove one of the three",
        ),
        (
            r#"{"train_batch_size": 8, "data_parallel_size": 1, "zero_optimization": {"mics_shard_size": 4}}"#,
            "dp 1 is not a multiple of",
        ),
        (
            r#"{"train_batch_size": 8, "mesh_param": [2, 2], "data_parallel_size": 4}"#,
            "contradict each other",
        ),
    ] {
        let raw = RawConfig::from_json_str(text, "c.json").unwrap();
        let error = raw.resolve_partially(&Overrides::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_file_of_any_size_takes_settings() {
    let text = format!(r#"{{"train_batch_size": 8{} }}"#, " ".repeat(70_000));
    let settings = Settings { lr: Some(0.5), ..set(&["ulysses.steps=7"]) };
    assert_eq!(resolved(&text, &settings).ulysses.steps, Some(7));
}

#[test]
fn accumulation_and_batch_size_flags_must_agree() {
    let settings = |set: Settings| Settings { batch_size: Some(8), ..set };
    let file =
        r#"{"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}"#;
    let config = resolved(file, &settings(set(&[])));
    assert_eq!((config.train_batch_size, config.gradient_accumulation_steps), (8, 4));
    let refused = refusal(file, &settings(set(&["gradient_accumulation_steps=3"])));
    assert!(refused.contains("remove one of the three"), "{refused}");
}
