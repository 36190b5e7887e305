//! `ulysses train` from end to end.

mod evaluations;
mod flexible_sp;
mod hybrid_meshes;
mod partitions;
mod pipeline;
mod rings;

use crate::golden;
use crate::support::cli::Workplace;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::File;
use std::process::Stdio;
use std::time::{Duration, Instant};

const METRICS: [&str; 39] = [
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "label_tokens",
    "label_tokens_per_second",
    "step_seconds",
    "loss_scale",
    "skipped",
    "overflow",
    "comm_bytes",
    "memory_bytes",
    "memory_by_category",
    "peak_memory_bytes",
    "peak_memory_by_category",
    "data_seconds",
    "padding_share",
    "slowest_rank",
    "slowest_rank_ratio",
    "idle_seconds",
    "dp_size",
    "sp_size",
    "forward_seconds",
    "backward_seconds",
    "update_seconds",
    "reduce_seconds",
    "all_to_all_seconds",
    "exposed_exchange_seconds",
    "ring_seconds",
    "exposed_ring_seconds",
    "pp_comm_seconds",
    "tp_comm_seconds",
    "dp_comm_seconds",
    "sp_comm_seconds",
    "compute_seconds",
    "model_flops_per_second",
    "gemm_share",
];

/// Trains with a changed config and returns the losses.
fn losses(place: &Workplace, changes: serde_json::Value, flags: &[&str]) -> Vec<f64> {
    place.write_config("c.json", changes);
    place.run(&[&["train", "c.json"], flags].concat()).assert_done();
    place.losses("out/metrics.jsonl")
}

#[test]
fn planned_and_available_memory_are_printed_before_the_first_step() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "mesh_param": [2, 2], "ulysses": { "steps": 1 } }));
    let stderr = place.run(&["train", "c.json"]).assert_done().stderr.clone();
    let line = stderr.lines().find(|line| line.starts_with("planned peak memory: ")).unwrap();
    assert!(line.contains(" per rank (") && line.contains("memory of 4 ranks: "), "{line}");
    assert!(line.contains(" available (") && !stderr.contains("warning: the planned"), "{stderr}");
    assert!(!stderr.contains("time of the first step"), "it is short: {stderr}");
}

#[test]
fn a_step_of_a_billion_micro_batches_starts_with_a_time_estimate() {
    let place = Workplace::new();
    let batch = json!({ "train_batch_size": 4_000_000_000_u64, "train_micro_batch_size_per_gpu": 4 });
    place.write_config("c.json", batch);
    let stderr = place.path("stderr");
    let mut command = place.command(&["train", "c.json"]);
    command.stdout(Stdio::null()).stderr(File::create(&stderr).unwrap());
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let said = || std::fs::read_to_string(&stderr).unwrap();
    while !said().contains("estimated time of the first step: ") {
        assert!(Instant::now() < deadline && child.try_wait().unwrap().is_none(), "{}", said());
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(said().contains(" days ("), "{}", said());
    let batch = json!({ "train_batch_size": 1_u64 << 62, "train_micro_batch_size_per_gpu": 1 });
    place.write_config("c.json", batch);
    place.run(&["train", "c.json"]).assert_refused(2, &["is too large", "`train_batch_size`"]);
}

#[test]
fn training_records_every_step_and_the_loss_falls() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "mesh_param": [2, 2], "ulysses": { "steps": 12 } }));
    let outcome = place.run(&["train", "c.json"]);
    assert!(outcome.assert_done().stdout.contains("out/metrics.jsonl"), "{outcome:?}");
    assert!(outcome.stderr.contains("mesh dp 2 × sp 2") && outcome.stderr.contains("12/12"), "{outcome:?}");
    let metrics = place.metrics("out/metrics.jsonl");
    assert_eq!(metrics.len(), 12);
    for (index, step) in metrics.iter().enumerate() {
        let keys: BTreeSet<&str> = step.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, BTreeSet::from(METRICS));
        assert_eq!(step["step"], index as u64 + 1);
        assert_eq!((&step["skipped"], &step["loss_scale"]), (&json!(false), &json!(1.0)));
        assert_eq!(step["lr"], 3e-3);
        assert_eq!(step["tokens"], 4 * 64, "{step}");
        let label_tokens = step["label_tokens"].as_u64().unwrap();
        assert!((1..=4 * 64).contains(&label_tokens), "{step}");
        for key in ["grad_norm", "tokens_per_second", "step_seconds", "comm_bytes", "memory_bytes"] {
            assert!(step[key].as_f64().unwrap() > 0.0, "{key}: {step}");
        }
    }
    let losses = place.losses("out/metrics.jsonl");
    assert!((5.0..6.0).contains(&losses[0]), "a model of 256 tokens that knows nothing: {losses:?}");
    assert!(losses[11] < losses[0] - 1.0, "{losses:?}");
}

#[test]
fn a_single_rank_sends_nothing() {
    let place = Workplace::new();
    losses(&place, json!({}), &[]);
    assert!(place.metrics("out/metrics.jsonl").iter().all(|step| step["comm_bytes"] == 0));
}

#[test]
fn mesh_stage_and_accumulation_do_not_change_the_losses() {
    let place = Workplace::new();
    let batch = json!({ "train_batch_size": 12 });
    let expected = losses(&place, batch, &[]);
    assert_eq!(expected.len(), 4);
    // Every value of an axis: `tests/parity/mesh_invariance.rs` has products of them.
    for (dp, sp, accumulation, stage) in [(1, 4, 1, 0), (3, 1, 4, 1), (1, 3, 3, 2), (2, 2, 2, 3)] {
        let layout = json!({
            "train_batch_size": 12,
            "gradient_accumulation_steps": accumulation,
            "mesh_param": [dp, sp],
            "zero_optimization": { "stage": stage },
        });
        let label = layout.to_string();
        for (actual, expected) in losses(&place, layout, &[]).into_iter().zip(&expected) {
            assert!((actual - expected).abs() <= 1e-5 * expected, "{label}: {actual} for {expected}");
        }
    }
}

#[test]
fn the_same_command_gives_identical_results() {
    let place = Workplace::new();
    place.write_config(
        "c.json",
        json!({ "mesh_param": [2, 2], "zero_optimization": { "stage": 3 }, "gradient_clipping": 0.5 }),
    );
    let run = |output: &str| -> Vec<[String; 2]> {
        place.run(&["train", "c.json", "--output", output]).assert_done();
        let metrics = place.metrics(&format!("{output}/metrics.jsonl"));
        metrics.iter().map(|step| ["loss", "grad_norm"].map(|key| step[key].to_string())).collect()
    };
    let first = run("first");
    assert_eq!(first.len(), 4);
    assert_eq!(first, run("second"));
}

#[test]
fn the_resolved_config_trains_the_same() {
    let place = Workplace::new();
    let flags = ["--mesh", "dp=1,sp=2", "--seq-len", "48", "--steps", "3", "--seed", "7"];
    let first = losses(&place, json!({}), &flags);
    let config = place.read_json("out/config.json");
    assert_eq!(config["sequence_parallel_size"], 2);
    assert_eq!((&config["ulysses"]["seq_len"], &config["seed"]), (&json!(48), &json!(7)));
    place.run(&["train", "out/config.json", "--output", "again"]).assert_done();
    assert_eq!(place.losses("again/metrics.jsonl"), first);
    assert_eq!(first.len(), 3);
}

/// Checks that the run in `flags` has the losses and the resolved config of a run with this file, whose output is `file`.
fn assert_flags_equal_file(place: &Workplace, right: Value) {
    place.write_config("right.json", right);
    place.run(&["train", "right.json"]).assert_done();
    assert_eq!(place.losses("flags/metrics.jsonl"), place.losses("file/metrics.jsonl"));
    let (mut flags, file) = (place.read_json("flags/config.json"), place.read_json("file/config.json"));
    flags["ulysses"]["output"] = json!("file");
    assert_eq!(flags, file);
}

#[test]
fn flags_override_the_file() {
    let place = Workplace::new();
    place.write("other/a.txt", "pack my box with five dozen liquor jugs. ".repeat(50));
    let by_flags = [
        ["--model", "nano"],
        ["--data", "other"],
        ["--seq-len", "32"],
        ["--steps", "2"],
        ["--seed", "3"],
        ["--threads-per-rank", "1"],
        ["--backend", "thread"],
        ["--output", "flags"],
    ];
    let wrong = json!({
        "seed": 1,
        "ulysses": { "model": "nothing", "data": "nothing", "threads_per_rank": 2, "output": "file" },
    });
    place.write_config("wrong.json", wrong);
    place.run(&[&["train", "wrong.json"], by_flags.concat().as_slice()].concat()).assert_done();
    let right = json!({
        "seed": 3,
        "ulysses": { "data": "other", "seq_len": 32, "steps": 2, "threads_per_rank": 1, "output": "file" },
    });
    assert_flags_equal_file(&place, right);
}

#[test]
fn set_and_the_shortcuts_override_the_file_and_are_in_the_resolved_config() {
    let place = Workplace::new();
    let set =
        ["--set", "gradient_clipping=0.5", "--set", "ulysses.packing=cut", "--set", "train_batch_size=2"];
    let flags = ["--lr", "0.002", "--batch-size", "8", "--zero-stage", "1", "--output", "flags"];
    place.write_config("c.json", json!({ "gradient_accumulation_steps": 2 }));
    place.run(&[&["train", "c.json", "--mesh", "2x1"], &set[..], &flags].concat()).assert_done();
    let right = json!({
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "mesh_param": [2, 1],
        "optimizer": { "params": { "lr": 0.002 } }, "zero_optimization": { "stage": 1 },
        "ulysses": { "packing": "cut", "output": "file" },
    });
    assert_flags_equal_file(&place, right);
}

#[test]
fn metrics_and_config_of_earlier_runs_are_renamed() {
    let place = Workplace::new();
    losses(&place, json!({}), &["--steps", "1"]);
    let (metrics, config) = (place.read("out/metrics.jsonl"), place.read("out/config.json"));
    losses(&place, json!({}), &["--steps", "2"]);
    losses(&place, json!({}), &["--steps", "3"]);
    assert_eq!(place.read("out/metrics.1.jsonl"), metrics);
    assert_eq!(place.read("out/config.1.json"), config);
    assert_eq!(place.metrics("out/metrics.2.jsonl").len(), 2);
    assert_eq!(place.metrics("out/metrics.jsonl").len(), 3);
    assert_eq!(place.read_json("out/config.json")["ulysses"]["steps"], 3);
}

#[test]
fn a_run_that_cannot_start_does_not_change_the_earlier_one() {
    let place = Workplace::new();
    losses(&place, json!({}), &[]);
    for flags in [["--seq-len", "0"], ["--data", "nothing"], ["--mesh", "1x64"], ["--model", "nothing"]] {
        assert_ne!(place.run(&["train", "c.json", flags[0], flags[1]]).code, Some(0), "{flags:?}");
    }
    let mut names: Vec<_> =
        std::fs::read_dir(place.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".lock", "config.json", "metrics.jsonl", "run.json"]);
}

#[test]
fn without_an_output_every_run_gets_a_new_directory() {
    let place = Workplace::new();
    place.write_config("my.json", json!({ "ulysses": { "output": null, "steps": 1 } }));
    for directory in ["runs/my-1", "runs/my-2"] {
        place.run(&["train", "my.json"]).assert_done();
        assert_eq!(place.metrics(&format!("{directory}/metrics.jsonl")).len(), 1);
    }
    let run = || place.run(&["train", "my.json"]).assert_done().code;
    std::thread::scope(|at_once| (0..6).for_each(|_| drop(at_once.spawn(run))));
    assert_eq!(place.metrics("runs/my-8/metrics.jsonl").len(), 1);
}

#[test]
fn a_model_directory_brings_weights_and_tokenizer() {
    let place = Workplace::new();
    for file in ["config.json", "model.safetensors"] {
        place.write(&format!("model/{file}"), std::fs::read(golden("tiny_strong", file)).unwrap());
    }
    let by_bytes = losses(&place, json!({ "ulysses": { "model": "model" } }), &["--seed", "1"]);
    let random = losses(&place, json!({}), &["--seed", "1"]);
    assert_ne!(by_bytes[0], random[0]);
    let vocab = json!({ "[UNK]": 0, "the": 1, "quick": 2, "brown": 3, "fox": 4 });
    place.write("model/tokenizer.json", word_tokenizer(vocab));
    let by_words = losses(&place, json!({ "ulysses": { "model": "model" } }), &["--seed", "1"]);
    assert_eq!(place.read_json("out/config.json")["ulysses"]["tokenizer"], "model/tokenizer.json");
    assert_ne!(by_bytes[0], by_words[0]);
}

#[test]
fn a_preset_takes_the_vocabulary_of_the_tokenizer() {
    let place = Workplace::new();
    let vocab = json!({ "[UNK]": 0, "the": 1, "quick": 2, "brown": 3, "fox": 511 });
    place.write("tokenizer.json", word_tokenizer(vocab));
    let losses = losses(&place, json!({}), &["--tokenizer", "tokenizer.json"]);
    let uniform = 512_f64.ln();
    assert!((losses[0] - uniform).abs() < 0.5, "{losses:?} starts near ln 512 = {uniform}");
}

/// A Hugging Face tokenizer of whole words.
pub(crate) fn word_tokenizer(vocab: serde_json::Value) -> String {
    json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": { "type": "Whitespace" },
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" },
    })
    .to_string()
}

#[test]
fn a_run_with_only_skipped_steps_is_a_failure() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "fp16": { "enabled": true, "loss_scale": 1e30 } }));
    let outcome = place.run(&["train", "c.json"]);
    outcome.assert_refused(1, &["all 4 steps were skipped", "skipped: the gradient overflowed"]);
    assert!(outcome.stdout.contains("every step was skipped"), "{outcome:?}");
    assert_eq!(place.metrics("out/metrics.jsonl").len(), 4);
}

#[test]
fn the_first_line_counts_frozen_parameters() {
    let place = Workplace::new();
    let groups = json!([{ "match": "embed_tokens|layers.0", "frozen": true }]);
    place.write_config("c.json", json!({ "ulysses": { "parameter_groups": groups, "steps": 2 } }));
    let outcome = place.run(&["train", "c.json"]);
    assert!(outcome.assert_done().stderr.contains(" M frozen)"), "{outcome:?}");
}

#[test]
fn settings_that_do_not_fit_the_model_are_usage_errors() {
    let place = Workplace::new();
    for (settings, expected) in [
        (
            json!({ "parameter_groups": [{ "match": "." }, { "match": "lm_heads" }] }),
            "parameter_groups[1].match`",
        ),
        (json!({ "parameter_groups": [{ "match": "." }, { "match": "mlp" }] }), "parameter_groups[1].match`"),
        (
            json!({ "parameter_groups": [{ "match": ".", "frozen": true }] }),
            "parameter_groups` freezes every",
        ),
        (json!({ "activation_checkpointing_interval": 2 }), "`ulysses.activation_checkpointing` is true"),
        (json!({ "attention": "fused" }), "attention`: expected \"tiled\", unless `bf16` or `fp16`"),
        (
            json!({ "activation_checkpointing": true, "activation_checkpointing_interval": 99 }),
            "the model has 2 layers: expected at most 2",
        ),
    ] {
        place.write_config("c.json", json!({ "ulysses": settings }));
        let outcome = place.run(&["train", "c.json", "--mesh", "2x2"]);
        outcome.assert_refused(2, &["`ulysses.", expected]);
        assert!(!outcome.stderr.contains("failed"), "{outcome:?}");
        assert!(!place.path("out").exists(), "nothing is written for a run that cannot start");
    }
}

#[test]
fn mesh_rules_are_selected_by_machine() {
    let place = Workplace::new();
    let rules = json!([["gpu-.*", "1x8"], ["small", "1x2"], ["any", null], ["odd", "ulysses=1x3"]]);
    place.write_config(
        "c.json",
        json!({ "mesh_param": [2, 2], "ulysses": { "mesh_rules": rules, "steps": 1 } }),
    );
    let mesh = |flags: &[&str]| {
        let outcome = place.run(&[&["train", "c.json"], flags].concat());
        let line = outcome.assert_done().stderr.lines().find(|line| line.starts_with("mesh ")).unwrap();
        line.split(',').next().unwrap().to_owned()
    };
    assert_eq!(mesh(&["--mesh-selector", "small"]), "mesh dp 1 × sp 2");
    assert_eq!(mesh(&["--mesh-selector", "smaller"]), "mesh dp 2 × sp 2", "a pattern matches all or nothing");
    assert_eq!(mesh(&["--mesh-selector", "any"]), "mesh dp 1 × sp 1", "null sets mesh_param aside");
    assert_eq!(mesh(&["--mesh-selector", "odd"]), "mesh dp 1 × sp 3");
    assert_eq!(mesh(&[]), "mesh dp 2 × sp 2", "no rule knows this machine");
    for (rules, expected) in [
        (json!([["(", "1x2"]]), "a regular expression in rule 0"),
        (json!([["a", "2x"]]), "a mesh in rule 0"),
        (json!([["a"]]), "`ulysses.mesh_rules[0]`"),
        (json!([["a", "ep=2"]]), "the axes are, first, pp, dp (or "),
    ] {
        place.write_config("bad.json", json!({ "ulysses": { "mesh_rules": rules } }));
        place.run(&["train", "bad.json"]).assert_refused(2, &[expected]);
    }
}

#[test]
fn the_flag_overrides_mesh_rules_and_an_unmatched_selector_is_noted() {
    let place = Workplace::new();
    let rules = json!([["gpu", "1x8"], ["small", "1x2"], ["elastic", "fsdp=2"], ["sharded", "hsdp=1x2"]]);
    place.write_config("c.json", json!({ "ulysses": { "mesh_rules": rules, "steps": 1 } }));
    let selected = |selector: &str, mesh: &[&str]| {
        place.run(&[&["train", "c.json", "--mesh-selector", selector], mesh].concat())
    };
    let outcome = selected("gpu", &["--mesh", "2x1"]);
    assert!(outcome.assert_done().stderr.contains("mesh dp 2 × sp 1"), "the flag counts: {outcome:?}");
    assert!(!outcome.stderr.contains("mesh_rules"), "{outcome:?}");
    let note = "no rule of `ulysses.mesh_rules` matches";
    let outcome = selected("elsewhere", &[]);
    assert!(outcome.assert_done().stderr.contains(&format!("{note} `elsewhere`")), "{outcome:?}");
    let by_machine = place.run(&["train", "c.json"]);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let machine = format!("{note} `{}/cpu`", host.trim());
    assert!(by_machine.assert_done().stderr.contains(&machine), "{by_machine:?}");
    assert!(!selected("small", &[]).assert_done().stderr.contains(note));
    for preset in ["elastic", "sharded"] {
        selected(preset, &[]).assert_refused(
            2,
            &["of `ulysses.mesh_rules` for", preset, "at ZeRO stage 3", "`zero_optimization.stage` is 0"],
        );
    }
    place.write_config("none.json", json!({ "ulysses": { "steps": 1 } }));
    place
        .run(&["train", "none.json", "--mesh-selector", "small"])
        .assert_refused(2, &["--mesh-selector small", "none.json has no `ulysses.mesh_rules`"]);
}

#[test]
fn a_preset_is_a_mesh_and_names_its_stage() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "zero_optimization": { "stage": 3 }, "ulysses": { "steps": 1 } }));
    let outcome = place.run(&["train", "c.json", "--mesh", "fsdp=2"]);
    assert!(outcome.assert_done().stderr.contains("mesh dp 2 × sp 1, ZeRO stage 3"), "{outcome:?}");
    let refuse = |mesh: &str, expected: &[&str]| {
        place.run(&["train", "c.json", "--mesh", mesh]).assert_refused(2, expected);
    };
    refuse("ddp=2", &["--mesh ddp is data parallelism at ZeRO stage 0", "stage` is 3"]);
    refuse("ulysses", &["`ulysses=NODESxRANKS`"]);
    refuse("dp=2,pp=2", &["sp (or ring and ulysses) and, last, tp; got dp, pp"]);
    for (mesh, shape) in [("hsdp=2x2", "mesh dp 4 × sp 1"), ("ulysses_hsdp=2x2", "mesh dp 2 × sp 2")] {
        let outcome = place.run(&["train", "c.json", "--mesh", mesh, "--output", mesh]);
        assert!(outcome.assert_done().stderr.contains(shape), "{outcome:?}");
    }
    let written = place.read("hsdp=2x2/config.json");
    let written: serde_json::Value = serde_json::from_str(&written).unwrap();
    assert_eq!(written["zero_optimization"]["mics_shard_size"], 2);
    place.write_config("s.json", json!({ "zero_optimization": { "stage": 3, "mics_shard_size": 4 } }));
    place
        .run(&["train", "s.json", "--mesh", "dp_replicate=2,dp_shard=2"])
        .assert_refused(2, &["ZeRO's shard size", "4 by `mics_shard_size`", "2 by the flag --mesh"]);
}

#[test]
fn the_slowest_rank_of_every_step_is_recorded() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "mesh_param": [1, 2] }));
    place.run(&["train", "c.json"]).assert_done();
    for step in place.metrics("out/metrics.jsonl") {
        let (rank, ratio) =
            (step["slowest_rank"].as_u64().unwrap(), step["slowest_rank_ratio"].as_f64().unwrap());
        assert!(rank < 2 && (1.0..=2.0).contains(&ratio), "{step}");
    }
}

#[test]
fn a_run_ends_with_a_summary_and_verbose_adds_tables() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "mesh_param": [2, 2], "checkpoint": {} }));
    let outcome = place.run(&["train", "c.json"]);
    let lines: Vec<&str> = outcome.assert_done().stdout.lines().collect();
    let names: Vec<&str> = lines.iter().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["loss", "throughput", "peak", "checkpoint", "output"], "{outcome:?}");
    assert!(lines[1].contains(" tokens/s (") && lines[1].contains(" with labels) over "), "{outcome:?}");
    assert!(lines[2].contains("max ") && lines[2].contains(", min "), "{outcome:?}");
    assert_eq!(lines[3], "checkpoint  out/step_00000004");
    assert!(lines[4].starts_with("output      out (metrics in out/metrics.jsonl;"), "{outcome:?}");
    let outcome = place.run(&["train", "c.json", "--verbose", "--output", "again"]);
    for table in ["bytes sent per rank", "bytes stored", "peak bytes", "waiting for data"] {
        assert!(outcome.assert_done().stdout.contains(table), "no {table:?}: {outcome:?}");
    }
}

#[test]
fn notes_are_counted_and_warnings_are_shown() {
    let place = Workplace::new();
    let changes = json!({
        "dump_state": true, "memory_breakdown": true, "gradient_clipping": null, "seed": "auto",
        "optimizer": { "type": "AdamW", "params": { "lr": "auto" } },
    });
    place.write_config("c.json", changes);
    let outcome = place.run(&["train", "c.json"]);
    let stderr = &outcome.assert_done().stderr;
    let counted =
        "config: 2 notes, 2 values set by \"auto\"; list them with `ulysses config resolve c.json`\n";
    assert!(stderr.contains(counted) && !stderr.contains("dump_state"), "{stderr}");
    assert!(stderr.contains("warning: `gradient_clipping` is not set: gradients are"), "{stderr}");
    let all = place.run(&["config", "resolve", "c.json"]);
    for note in
        ["note: `dump_state`", "note: `memory_breakdown`", "warning: `gradient_clipping`", "auto: `seed`"]
    {
        assert!(all.assert_done().stderr.contains(note), "no {note:?}: {all:?}");
    }
}
