//! From a file and flags to a config.

use super::*;
use crate::config::{ChatDate, LongConversations, TensorParallelConfig};

/// Everything off, with DeepSpeed's values where it is on.
fn defaults_of_monitoring() -> MonitoringConfig {
    let files = |job_name: &str| EventFilesConfig {
        enabled: false,
        output_path: String::new(),
        job_name: job_name.into(),
    };
    MonitoringConfig {
        wall_clock_breakdown: false,
        comms_logger: CommsLoggerConfig { enabled: false, verbose: false, prof_all: true, prof_ops: vec![] },
        tensorboard: files("tensorboard"),
        csv_monitor: files("csv"),
    }
}

#[test]
fn an_almost_empty_file_gives_the_documented_defaults() {
    let config = config_with("\"gradient_clipping\": 0, \"optimizer\": {\"type\": \"Adam\"}");
    let expected = Config {
        train_batch_size: 1,
        micro_batch_size: 1,
        gradient_accumulation_steps: 1,
        optimizer: OptimizerConfig::Adam(Adam {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            adam_w_mode: true,
            bias_correction: true,
        }),
        scheduler: None,
        gradient_clipping: 0.0,
        precision: Precision::F32,
        tensor_parallel: TensorParallelConfig::default(),
        zero: ZeroConfig {
            stage: ZeroStage::Disabled,
            mics_shard_size: None,
            offload_param: Offload::None,
            offload_optimizer: Offload::None,
        },
        mesh: MeshShape::ONE_RANK.into(),
        steps_per_print: 10,
        communication_data_type: CommunicationDtype::Fp32,
        seq_parallel_communication_data_type: CommunicationDtype::Fp32,
        seed: 1234,
        loss_normalization: LossNormalization::Global,
        checkpoint: None,
        activation_checkpointing: ActivationCheckpointingConfig { cpu_checkpointing: false },
        monitoring: defaults_of_monitoring(),
        ulysses: UlyssesConfig {
            append_eod: true,
            on_bad_line: OnBadLine::Error,
            token_dtype: None,
            model: None,
            data: vec![],
            text_field: "text".into(),
            end_of_document: None,
            tokenizer: None,
            chat_date: ChatDate::default(),
            output: None,
            seq_len: None,
            steps: None,
            epochs: None,
            seq_len_schedule: vec![],
            packing: Packing::Greedy,
            long_conversations: LongConversations::Truncate,
            validation: None,
            zero_partition_axes: PartitionAxes::Dp,
            ring_size: 1,
            flexible_sp: false,
            state_passing: false,
            pipeline: PipelineConfig {
                schedule: PipelineSchedule::OneForwardOneBackward,
                virtual_stages: 1,
                layers_per_stage: None,
            },
            threads_per_rank: None,
            backend: Backend::Thread,
            mesh: None,
            mesh_rules: vec![],
            comm: CommConfig { check: CommCheck::Off, timeout_seconds: 300 },
            activation_checkpointing: false,
            activation_checkpointing_interval: 1,
            save_attention_output: None,
            tile_tokens: None,
            head_chunks: 1,
            overlap_exchange: false,
            offload_path: None,
            attention: None,
            loss_tile_tokens: None,
            parameter_groups: vec![],
        },
        notes: vec![],
        autos: vec![],
    };
    assert_eq!(config, expected);
    assert_eq!(config.lr_schedule(), LrSchedule::constant(1e-3));
}

#[test]
fn optimizers_have_the_defaults_of_deepspeeds_own() {
    let adam_w = config_with(r#""optimizer": {"type": "ADAMW"}"#).optimizer;
    assert_eq!(adam_w, OptimizerConfig::default());
    assert!(matches!(adam_w, OptimizerConfig::Adam(Adam { weight_decay: 0.0, adam_w_mode: true, .. })));
    let lion = config_with(r#""optimizer": {"type": "Lion"}"#).optimizer;
    assert_eq!(lion, OptimizerConfig::Lion(Lion { lr: 1e-3, betas: [0.9, 0.999], weight_decay: 0.0 }));
    let l2 = config_with(r#""optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}"#).optimizer;
    assert!(matches!(l2, OptimizerConfig::Adam(Adam { weight_decay: 0.0, adam_w_mode: false, .. })));
    let sgd = config_with(r#""optimizer": {"type": "sgd", "params": {"momentum": 0.9, "nesterov": true}}"#);
    let expected = OptimizerConfig::Sgd(Sgd { lr: 1e-3, momentum: 0.9, nesterov: true, weight_decay: 0.0 });
    assert_eq!(sgd.optimizer, expected);
}

#[test]
fn every_key_of_a_full_file_arrives() {
    let config = Config::from_json_str(FULL, "full.json").unwrap();
    assert_eq!(
        (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps),
        (32, 4, 4)
    );
    assert_eq!((config.mesh.dp_size, config.mesh.sp_size, config.world_size()), (2, 4, 8));
    assert_eq!((config.seed, config.steps_per_print), (u64::MAX, 7));
    assert_eq!(config.zero.stage, ZeroStage::Gradients);
    assert_eq!(config.loss_normalization, LossNormalization::MicroBatch);
    assert_eq!(config.gradient_clipping, 0.5);
    let on_error = OnSaveError::Continue;
    let checkpoint = CheckpointConfig {
        interval: Some(50),
        memory_interval: Some(5),
        keep_last: 3,
        keep_best: true,
        background: true,
        on_error,
    };
    assert_eq!(config.checkpoint, Some(checkpoint));
    let expected = OptimizerConfig::Adam(Adam {
        lr: 3e-4,
        betas: [0.8, 0.95],
        eps: 1e-6,
        weight_decay: 0.02,
        adam_w_mode: false,
        bias_correction: false,
    });
    assert_eq!(config.optimizer, expected);
    assert_eq!(
        (config.require_model().unwrap(), config.require_data().unwrap()),
        ("models/größer", &["data.txt".into()][..])
    );
    assert_eq!(
        (config.ulysses.tokenizer.as_deref(), config.ulysses.output.as_deref()),
        (Some("tok.json"), Some("out"))
    );
    assert_eq!((config.require_seq_len().unwrap(), config.require_steps().unwrap()), (1000, 12));
    assert_eq!(
        (config.ulysses.threads_per_rank, config.ulysses.loss_tile_tokens.map(usize::from)),
        (Some(3), Some(64))
    );
    assert!(config.ulysses.activation_checkpointing);
    let ulysses = &config.ulysses;
    assert_eq!((ulysses.activation_checkpointing_interval, ulysses.head_chunks), (2, 4));
    assert!(ulysses.overlap_exchange);
    assert_eq!((ulysses.save_attention_output, config.saves_attention_output()), (Some(true), true));
    assert_eq!(ulysses.tile_tokens, std::num::NonZero::new(100));
    assert_eq!(ulysses.attention, Some(AttentionChoice::Tiled));
    assert_eq!(ulysses.offload_path.as_deref(), Some("/scratch"));
    assert!(config.activation_checkpointing.cpu_checkpointing);
    assert_eq!(config.zero.offload_optimizer, Offload::Nvme(Some("/fast".into())));
    assert_eq!(config.zero.offload_param, Offload::None);
}

#[test]
fn keys_without_effect_leave_a_note() {
    let notes = Config::from_json_str(FULL, "full.json").unwrap().notes;
    for key in [
        "torch_adam",
        "contiguous_gradients",
        "overlap_comm",
        "reduce_scatter",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "allgather_partitions",
        "round_robin_gradients",
    ] {
        let noted = notes.iter().filter(|note| note.contains(key) && note.contains("has no effect")).count();
        assert_eq!(noted, 1, "{key} in {notes:#?}");
    }
    assert!(notes.iter().any(|note| note.contains("decay_mom_rate")), "{notes:#?}");
}

#[test]
fn defaults_that_differ_from_deepspeed_leave_a_note() {
    let notes = config_with("\"seed\": 1").notes;
    assert_eq!(notes.len(), 2, "{notes:#?}");
    assert!(notes[0].contains("`optimizer`") && notes[1].contains("`gradient_clipping`"), "{notes:#?}");
    assert!(notes.iter().all(|note| note.severity == Severity::Warning), "{notes:#?}");
}

#[test]
fn a_setting_that_is_not_followed_is_a_warning_unless_it_is_the_default() {
    let severities = |section: &str| {
        let notes = config_with(&format!(
            "\"gradient_clipping\": 0, \"optimizer\": {{\"type\": \"Adam\"}}, {section}"
        ))
        .notes;
        notes.into_iter().map(|note| note.severity).collect::<Vec<_>>()
    };
    let offload = |ratio: f64| {
        format!(
            "\"zero_optimization\": {{\"stage\": 1, \"offload_optimizer\": {{\"device\": \"cpu\", \"ratio\": {ratio}}}}}"
        )
    };
    assert_eq!(severities(&offload(0.5)), [Severity::Warning], "all of the state is offloaded");
    assert_eq!(severities(&offload(1.0)), [Severity::Info]);
    assert_eq!(severities("\"dump_state\": true"), [Severity::Info]);
    assert_eq!(severities("\"pipeline\": {\"activation_checkpoint_interval\": 2}"), [Severity::Warning]);
}

#[test]
fn flags_override_the_file() {
    let raw = RawConfig::from_json_str(FULL, "full.json").unwrap();
    let file = raw.resolve(&Overrides::default()).unwrap();
    let overrides = Overrides {
        ring_size: None,
        mesh: Some(MeshShape::dp_sp(2, 4)),
        layout: None,
        preset: None,
        shard_size: None,
        mesh_selector: None,
        ranks_per_node: None,
        world_size: Some(8),
        seq_len: Some(77),
        steps: Some(5),
        epochs: None,
        seed: Some(0),
        threads_per_rank: Some(1),
        model: Some("m".into()),
        data: vec!["d".into()],
        packing: Some(Packing::Cut),
        tokenizer: Some("t".into()),
        output: Some("o".into()),
    };
    let ulysses = UlyssesConfig {
        seq_len: Some(77),
        steps: Some(5),
        threads_per_rank: Some(1),
        model: Some("m".into()),
        data: vec!["d".into()],
        packing: Packing::Cut,
        tokenizer: Some("t".into()),
        output: Some("o".into()),
        ..file.ulysses
    };
    let expected = Config { seed: 0, ulysses, ..file };
    assert_eq!(raw.resolve(&overrides).unwrap(), expected);
}

#[test]
fn flags_out_of_range_are_refused() {
    let raw = RawConfig::from_json_str(FULL, "full.json").unwrap();
    let message = |overrides: Overrides| raw.resolve(&overrides).unwrap_err().to_string();
    assert_eq!(
        message(Overrides { seq_len: Some(0), ..Overrides::default() }),
        "--seq-len: expected at least 1, found 0"
    );
    assert_eq!(
        message(Overrides { mesh: Some(MeshShape::dp_sp(2, 0)), ..Overrides::default() }),
        "--mesh: expected at least 1, found 0"
    );
    assert!(message(Overrides { model: Some(String::new()), ..Overrides::default() }).starts_with("--model"));
}

#[test]
fn a_mesh_flag_replaces_every_size_of_the_file_with_a_note() {
    let resolve = |keys: &str| {
        let raw =
            RawConfig::from_json_str(&format!("{{\"train_batch_size\": 8, {keys}}}"), "c.json").unwrap();
        let config =
            raw.resolve(&Overrides { mesh: Some(MeshShape::dp_sp(2, 2)), ..Overrides::default() }).unwrap();
        assert_eq!(config.mesh, MeshShape::dp_sp(2, 2).into(), "{keys}");
        let notes = config.notes.iter().map(ToString::to_string).filter(|note| note.contains("--mesh"));
        (notes.collect::<Vec<_>>(), config.ulysses.mesh.is_some())
    };
    let note = "warning: --mesh sets sp 2 instead of 4 by `mesh_param` (line 1, column 43)";
    assert_eq!(resolve(r#""mesh_param": [2, 4]"#), (vec![note.to_owned()], false));
    let note = "warning: --mesh sets sp 2 instead of 8 by `sequence_parallel_size` (line 1, column 51)";
    assert_eq!(resolve(r#""sequence_parallel_size": 8"#), (vec![note.to_owned()], false));
    let (notes, _) = resolve(r#""data_parallel_size": 4, "ulysses": {"mesh": "4x1"}"#);
    assert_eq!(notes.len(), 3, "{notes:?}");
    let same = resolve(r#""ulysses": {"mesh": "dp=2,sp=2@0,2,1,3"}"#);
    assert_eq!(same, (vec![], true), "an equal mesh keeps its order of ranks");
}

#[test]
fn a_mesh_that_contradicts_itself_within_the_file_is_an_error_showing_both() {
    assert_eq!(
        message("{\n\"train_batch_size\": 8,\n\"mesh_param\": [2, 4],\n\"data_parallel_size\": 4}")
            .split(';')
            .next(),
        Some(
            "c.json: the mesh sizes contradict each other: dp is 2 by `mesh_param` (line 3, column 16), \
             but 4 by `data_parallel_size` (line 4, column 23)"
        )
    );
}

#[test]
fn half_a_mesh_in_the_file_is_completed_by_flag_or_world() {
    let raw = RawConfig::from_json_str(r#"{"train_batch_size": 8, "sequence_parallel_size": 2}"#, "c.json")
        .unwrap();
    let mesh = |overrides| {
        raw.resolve(&overrides).map(|c| (c.mesh.dp_size, c.mesh.sp_size, c.micro_batch_size)).unwrap()
    };
    assert_eq!(mesh(Overrides::default()), (1, 2, 8));
    assert_eq!(mesh(Overrides { mesh: Some(MeshShape::dp_sp(4, 2)), ..Overrides::default() }), (4, 2, 2));
    assert_eq!(mesh(Overrides { world_size: Some(4), ..Overrides::default() }), (2, 2, 4));
}

#[test]
fn the_batch_counts_data_parallel_ranks_but_not_sequence_parallel_ones() {
    let config = config_with(r#""gradient_accumulation_steps": 3, "mesh_param": [2, 8]"#);
    assert_eq!(config.train_batch_size, 6);
    assert_eq!(
        message(r#"{"train_batch_size": 30, "mesh_param": [4, 2]}"#),
        "c.json:1:22: `train_batch_size` 30 is not a multiple of dp 4: the nearest valid sizes are 28 and 32"
    );
    assert!(message("{}").starts_with("c.json: the batch size is not set"));
}

#[test]
fn a_resolved_config_reads_back_as_itself() {
    let schedulers = [
        r#"{"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}"#,
        r#"{"type": "WarmupLR"}"#,
        r#"{"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_type": "linear"}}"#,
        r#"{"type": "warmupcosinelr", "params": {"total_num_steps": 9000, "cos_min_ratio": 0.3}}"#,
        r#"{"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 0.7}}"#,
        r#"{"type": "LRRangeTest", "params": {"lr_range_test_staircase": true}}"#,
    ];
    let mut configs: Vec<_> =
        schedulers.iter().map(|s| config_with(&format!("\"scheduler\": {s}"))).collect();
    configs.push(config_with(r#""optimizer": {"type": "SGD", "params": {"lr": 0.123456789012345678}}"#));
    configs.push(config_with(r#""optimizer": {"type": "AdamW", "params": {"lr": 1e-7}}"#));
    for optimizer in OptimizerConfig::names() {
        configs.push(config_with(&format!(r#""optimizer": {{"type": "{optimizer}"}}"#)));
    }
    let groups = r#"[{"match": "norm|bias$", "weight_decay": 0}, {"match": "\\.0\\.", "lr_scale": 0.5}]"#;
    configs.push(config_with(&format!(r#""ulysses": {{"parameter_groups": {groups}}}"#)));
    let groups = r#"[{"match": "norm", "lr": 1e-5}, {"match": "embed", "frozen": true}]"#;
    configs.push(config_with(&format!(r#""ulysses": {{"parameter_groups": {groups}}}"#)));
    configs.push(Config::from_json_str(FULL, "full.json").unwrap());
    for ulysses in [
        r#""data": ["a", "b"], "epochs": 3, "packing": "concat", "validation": {"fraction": 0.1}"#,
        r#""data": "a", "text_field": "body", "end_of_document": 50256"#,
        r#""data": [{"path": "a", "weight": 0.5}, {"path": "b", "weight": 2}], "seq_len_schedule": [[5, 9], [7, 3]]"#,
        r#""data": [{"path": "a", "weight": 1}], "validation": {"data": "v", "eval_interval": 4, "eval_batches": 2, "eval_on_start": true,
            "early_stopping_patience": 3, "early_stopping_threshold": 0.25}"#,
    ] {
        configs.push(config_with(&format!("\"ulysses\": {{{ulysses}}}")));
    }
    for config in configs {
        let text = serde_json::to_string_pretty(&config).unwrap();
        let again =
            Config::from_json_str(&text, "again.json").unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(Config { notes: vec![], ..again }, Config { notes: vec![], ..config }, "{text}");
    }
}

#[test]
fn an_empty_checkpoint_section_saves_the_end_of_a_run_and_keeps_the_last_ten() {
    let on_error = OnSaveError::Stop;
    let expected = CheckpointConfig {
        interval: None,
        memory_interval: None,
        keep_last: 10,
        keep_best: false,
        background: false,
        on_error,
    };
    assert_eq!(config_with(r#""checkpoint": {}"#).checkpoint, Some(expected));
    assert_eq!(
        message(r#"{"train_batch_size": 1, "checkpoint": {"keep_last": -1, "on_error": "retry"}}"#),
        "c.json:1:53: `checkpoint.keep_last`: expected an integer ≥ 0 and < 2^64, found -1\n\
         c.json:1:69: `checkpoint.on_error`: expected one of \"stop\", \"continue\", found the string \"retry\""
    );
}

#[test]
fn settings_without_a_default_name_their_key_and_flag() {
    let error = config_with("\"seed\": 1").require_seq_len().unwrap_err();
    assert_eq!(
        error.to_string(),
        "`ulysses.seq_len` is not set: set it in the config file, or pass --seq-len"
    );
}

#[test]
fn a_file_with_the_size_of_sp_alone_has_deepspeeds_partition_axes() {
    let axes = |keys: &str, overrides: &Overrides| {
        let text = format!(r#"{{"train_batch_size": 8, {keys}}}"#);
        let config = RawConfig::from_json_str(&text, "c.json").unwrap().resolve(overrides).unwrap();
        let is_noted = config.notes.iter().any(|note| note.text.contains("as in DeepSpeed;"));
        assert_eq!(is_noted, config.ulysses.zero_partition_axes == PartitionAxes::DpSp, "{keys}");
        config.ulysses.zero_partition_axes
    };
    let stage = r#""zero_optimization": {"stage": 3}"#;
    let mesh = |dp, sp| Overrides { mesh: Some(MeshShape::dp_sp(dp, sp)), ..Overrides::default() };
    for (keys, overrides) in [
        (r#""sequence_parallel_size": 2"#, Overrides::default()),
        (r#""sequence_parallel_size": 2, "data_parallel_size": "auto""#, Overrides::default()),
        (r#""sequence_parallel_size": 2, "ulysses": {"zero_partition_axes": "auto"}"#, Overrides::default()),
        (r#""sequence_parallel_size": 2"#, mesh(2, 2)),
    ] {
        assert_eq!(axes(&format!("{keys}, {stage}"), &overrides), PartitionAxes::DpSp, "{keys}");
    }
    for keys in [
        r#""sequence_parallel_size": 1"#,
        r#""mesh_param": [1, 2]"#,
        r#""sequence_parallel_size": 2, "data_parallel_size": 2"#,
        r#""sequence_parallel_size": 2, "ulysses": {"zero_partition_axes": ["dp"]}"#,
    ] {
        assert_eq!(axes(&format!("{keys}, {stage}"), &Overrides::default()), PartitionAxes::Dp, "{keys}");
    }
    // Without partitions there is nothing to choose; DeepSpeed's shard sizes count ranks of both axes.
    assert_eq!(axes(r#""sequence_parallel_size": 2"#, &Overrides::default()), PartitionAxes::Dp);
    let sharded = r#""sequence_parallel_size": 2, "zero_optimization": {"stage": 3, "mics_shard_size": 1}"#;
    assert_eq!(axes(sharded, &Overrides::default()), PartitionAxes::Dp);
    let rules = r#""sequence_parallel_size": 4, "ulysses": {"mesh_rules": [["host", "1x2"]]}"#;
    let selected = Overrides { mesh_selector: Some("host".to_owned()), ..Overrides::default() };
    assert_eq!(axes(&format!("{rules}, {stage}"), &selected), PartitionAxes::Dp);
    let verified = format!(r#"{{"train_batch_size": 8, "sequence_parallel_size": 2, {stage}}}"#);
    let raw = RawConfig::from_json_str(&verified, "c.json").unwrap().for_batch(4, 1);
    assert_eq!(raw.resolve(&mesh(2, 2)).unwrap().ulysses.zero_partition_axes, PartitionAxes::Dp);
}

#[test]
fn sp_decides_which_key_is_the_dtype_of_sent_gradients_as_in_deepspeed() {
    let of = |sp: usize, keys: &str| {
        let config = config_with(&format!("\"mesh_param\": [2, {sp}]{keys}"));
        let is_noted = config.notes.iter().any(|note| {
            note.severity == Severity::Warning
                && note.contains("`communication_data_type` has no effect: sp is 2")
        });
        (config.gradient_communication(), is_noted)
    };
    let (dp, sp) =
        (r#", "communication_data_type": "bf16""#, r#", "seq_parallel_communication_data_type": "BF16""#);
    let (bf16, fp32) = (CommunicationDtype::Bf16, CommunicationDtype::Fp32);
    assert_eq!([of(1, ""), of(2, "")], [(fp32, false); 2]);
    assert_eq!([of(1, dp), of(2, dp)], [(bf16, false), (fp32, true)]);
    assert_eq!([of(1, sp), of(2, sp)], [(fp32, false), (bf16, false)]);
    assert_eq!(of(2, &format!("{dp}{sp}")), (bf16, false));
    assert_eq!(of(2, r#", "seq_parallel_communication_data_type": null"#), (fp32, false));
}

#[test]
fn gradients_in_fp16_are_refused_with_the_reason() {
    for key in ["communication_data_type", "seq_parallel_communication_data_type"] {
        let refused = message(&format!("{{\"train_batch_size\": 1, \"{key}\": \"FP16\"}}"));
        let reason =
            "\"fp16\": gradients can exceed its range: use \"bf16\", which sends as many bytes, or \"fp32\"";
        assert!(refused.contains(&format!("`{key}`: {reason}")), "{refused}");
    }
}
