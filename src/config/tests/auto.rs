//! What `"auto"` becomes, and the precision sections.

use super::*;
use crate::mesh::UlyssesLimits;

fn auto(config: &Config, key: &str) -> (Option<serde_json::Value>, String) {
    let auto = config.autos.iter().find(|auto| auto.key == key);
    auto.map(|auto| (auto.value.clone(), auto.source.clone())).unwrap_or_else(|| panic!("{:?}", config.autos))
}

const TRAINER: &str = "the default of Hugging Face's Trainer";

#[test]
fn auto_becomes_what_the_trainer_fills_in() {
    let config = config_with(
        r#""gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params":
            {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto",
            "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "ulysses": {"steps": 70}"#,
    );
    let adam = OptimizerConfig::Adam(Adam {
        lr: 5e-5,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.0,
        adam_w_mode: true,
        bias_correction: true,
    });
    let decay = WarmupDecayLr {
        total_num_steps: 70,
        warmup_min_lr: 0.0,
        warmup_max_lr: 5e-5,
        warmup_num_steps: 0,
        warmup_type: WarmupType::Log,
    };
    assert_eq!((config.gradient_clipping, &config.optimizer), (1.0, &adam));
    assert_eq!(config.scheduler, Some(SchedulerConfig::WarmupDecayLr(decay)));
    assert_eq!(config.autos.len(), 9);
    assert_eq!(auto(&config, "gradient_clipping"), (Some(1.0.into()), TRAINER.into()));
    assert_eq!(auto(&config, "optimizer.params.lr"), (Some(5e-5.into()), TRAINER.into()));
    let (total, source) = auto(&config, "scheduler.params.total_num_steps");
    assert_eq!(total, Some(70.into()));
    assert!(source.contains("--steps"), "{source}");
    let (max_lr, source) = auto(&config, "scheduler.params.warmup_max_lr");
    assert_eq!((max_lr, source.as_str()), (Some(5e-5.into()), "from the optimizer's `lr`"));
}

#[test]
fn a_schedule_left_to_auto_follows_the_flag_and_needs_a_number_of_steps() {
    let text = r#"{"train_batch_size": 1, "scheduler":
        {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}}"#;
    let raw = RawConfig::from_json_str(text, "c.json").unwrap();
    let config = raw.resolve(&Overrides { steps: Some(9), ..Overrides::default() }).unwrap();
    let Some(SchedulerConfig::WarmupCosineLr(rule)) = config.scheduler else { panic!("{config:?}") };
    assert_eq!(rule.total_num_steps, 9);
    let error = raw.resolve(&Overrides::default()).unwrap_err().to_string();
    assert!(error.starts_with("c.json: `scheduler.params.total_num_steps` is \"auto\""), "{error}");
}

#[test]
fn a_schedule_left_to_auto_ends_with_the_epochs_once_the_data_is_known() {
    let mut config = config_with(
        r#""scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}, "ulysses": {"epochs": 3}"#,
    );
    assert!(config.lacks_steps());
    config.resolve_steps(12);
    let Some(SchedulerConfig::WarmupCosineLr(rule)) = &config.scheduler else { panic!("{config:?}") };
    assert_eq!((rule.total_num_steps, config.lacks_steps()), (12, false));
    let raw = RawConfig::from_json_str(
        r#"{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, "ulysses": {"epochs": 3}}"#,
        "c.json",
    );
    let partial = raw.unwrap().resolve_partially(&Overrides::default()).unwrap();
    assert_eq!(partial.written["scheduler"]["params"]["total_num_steps"], "auto");
}

#[test]
fn auto_batch_sizes_follow_from_those_that_are_given() {
    let batch = |members: &str| {
        let text = format!("{{{members}, \"mesh_param\": [2, 2]}}");
        let config = Config::from_json_str(&text, "c.json").unwrap();
        (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps)
    };
    let (train, micro) = ("\"train_batch_size\": \"auto\"", "\"train_micro_batch_size_per_gpu\": \"auto\"");
    let accumulation = "\"gradient_accumulation_steps\": \"auto\"";
    assert_eq!(batch(&format!("{train}, {micro}, {accumulation}")), (16, 8, 1));
    assert_eq!(batch(&format!("{train}, \"train_micro_batch_size_per_gpu\": 3, {accumulation}")), (6, 3, 1));
    assert_eq!(batch(&format!("\"train_batch_size\": 12, {micro}, {accumulation}")), (12, 6, 1));
    assert_eq!(batch(&format!("{micro}, \"gradient_accumulation_steps\": 5")), (80, 8, 5));
    assert!(message(&format!("{{{train}}}")).contains("the batch size is not set"));
    let sources = |members: &str| {
        let config =
            Config::from_json_str(&format!("{{{members}, \"mesh_param\": [2, 2]}}"), "c.json").unwrap();
        config.autos.into_iter().map(|auto| auto.source).collect::<Vec<_>>()
    };
    assert_eq!(
        sources(&format!("{train}, {micro}, {accumulation}")),
        ["micro batch 8 × accumulation 1 × dp 2", TRAINER, "the default"]
    );
    assert_eq!(
        sources(&format!("\"train_batch_size\": 12, {micro}, \"gradient_accumulation_steps\": 3")),
        ["train batch 12 / (accumulation 3 × dp 2)"]
    );
    assert_eq!(
        sources(&format!("\"train_batch_size\": 12, \"train_micro_batch_size_per_gpu\": 2, {accumulation}")),
        ["train batch 12 / (micro batch 2 × dp 2)"]
    );
}

#[test]
fn other_autos_count_as_absent() {
    let config = config_with(
        r#""zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}, "steps_per_print": "auto",
        "bf16": {"enabled": "auto"}, "communication_data_type": "auto""#,
    );
    assert_eq!((config.zero.stage, config.steps_per_print), (ZeroStage::Disabled, 10));
    assert_eq!(config.precision, Precision::F32);
    assert_eq!(auto(&config, "zero_optimization.stage"), (Some(0.into()), "the default".into()));
    assert_eq!(auto(&config, "bf16.enabled"), (Some(false.into()), TRAINER.into()));
    let (bucket, source) = auto(&config, "zero_optimization.reduce_bucket_size");
    assert_eq!((bucket, source.as_str()), (None, "no effect: communication is bucketed by layer"));
}

#[test]
fn an_auto_ring_follows_from_the_model_and_a_stated_one_stays() {
    let limits = UlyssesLimits { num_heads: 32, num_kv_heads: 8, ranks_per_node: 8 };
    let ring = |ring_size: &str, overrides: &Overrides| {
        let text = format!(
            r#"{{"train_batch_size": 1, "mesh_param": [1, 16], "ulysses": {{"ring_size": {ring_size}}}}}"#
        );
        let mut config = RawConfig::from_json_str(&text, "c.json").unwrap().resolve(overrides).unwrap();
        let before = config.ulysses.ring_size;
        config.resolve_ring(limits);
        (before, config)
    };
    let (before, config) = ring(r#""auto""#, &Overrides::default());
    assert_eq!((before, config.ulysses.ring_size), (1, 2));
    let from = "from the model's heads and the ranks of a node".to_owned();
    assert_eq!(auto(&config, "ulysses.ring_size"), (Some(2.into()), from));
    assert_eq!(ring("4", &Overrides::default()).1.ulysses.ring_size, 4);
    let by_flag = Overrides { ring_size: Some(16), ..Overrides::default() };
    assert_eq!(ring(r#""auto""#, &by_flag).1.ulysses.ring_size, 16);
    let replaced = |key: &str| {
        let config = ring(key, &by_flag).1;
        config
            .notes
            .iter()
            .any(|note| note.contains("`ulysses.ring_size` 4 has no effect: the mesh has a ring of 16"))
    };
    assert_eq!(["4", "16", r#""auto""#].map(replaced), [true, false, false]);
}

#[test]
fn auto_is_refused_where_it_has_no_value() {
    let text = r#"{"train_batch_size": 1, "scheduler":
        {"type": "OneCycle", "params": {"cycle_min_lr": "auto", "cycle_max_lr": 1}}}"#;
    assert!(
        message(text).contains("`scheduler.params.cycle_min_lr`: expected a number ≥ 0"),
        "{}",
        message(text)
    );
    assert!(message(r#"{"mesh_param": "auto"}"#).contains("`mesh_param`: expected an array"));
    assert!(message(r#"{"optimizer": {"type": "auto"}}"#).contains("`optimizer.type`: expected one of"));
    // A directory may be called so.
    assert_eq!(config_with(r#""ulysses": {"model": "auto"}"#).ulysses.model.as_deref(), Some("auto"));
}

#[test]
fn fp16_has_deepspeeds_defaults() {
    let rule = DynamicLossScale {
        initial_scale_power: 16,
        loss_scale_window: 1000,
        hysteresis: 2,
        consecutive_hysteresis: false,
        min_loss_scale: 1,
    };
    let fp16 = |members: &str| config_with(&format!("\"fp16\": {{\"enabled\": true{members}}}")).precision;
    assert_eq!(fp16(""), Precision::Fp16 { loss_scale: LossScale::Dynamic(rule) });
    assert_eq!(fp16(", \"loss_scale\": 128"), Precision::Fp16 { loss_scale: LossScale::Static(128.0) });
    let changed = DynamicLossScale { initial_scale_power: 4, consecutive_hysteresis: true, ..rule };
    assert_eq!(
        fp16(", \"loss_scale\": 0, \"initial_scale_power\": 4, \"consecutive_hysteresis\": true"),
        Precision::Fp16 { loss_scale: LossScale::Dynamic(changed) }
    );
    let tiny = message(r#"{"fp16": {"enabled": true, "loss_scale": 1e-44}}"#);
    assert!(tiny.contains("1e-30 to 1e30"), "{tiny}");
    let power = message(r#"{"fp16": {"enabled": true, "initial_scale_power": 128}}"#);
    assert!(power.contains("expected an integer from 0 to 127, found 128"), "{power}");
}

#[test]
fn half_precision_resolves_and_reads_back() {
    for (section, members) in [("bf16", ""), ("fp16", ""), ("fp16", ", \"loss_scale\": 8")] {
        let config = config_with(&format!("\"{section}\": {{\"enabled\": true{members}}}"));
        let text = serde_json::to_string(&config).unwrap();
        let again = Config::from_json_str(&text, "again.json").unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(again.precision, config.precision, "{text}");
    }
    assert_eq!(config_with("\"bf16\": {}").precision, Precision::F32);
}
