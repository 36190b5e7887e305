//! `ulysses train --resume`.

use crate::support::cli::{Outcome, Workplace};
use serde_json::{Value, json};
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use ulysses::checkpoint::{OutputLock, saved_steps};

/// Metrics that a resumed run must repeat; the others are times and memory.
const REPEATED: [&str; 7] = ["step", "loss", "lr", "grad_norm", "tokens", "skipped", "comm_bytes"];

/// Returns metrics as text, so that every bit counts.
fn repeated(place: &Workplace, name: &str) -> Vec<Vec<String>> {
    let fields = |step: &Value| REPEATED.map(|key| step[key].to_string()).to_vec();
    place.metrics(name).iter().map(fields).collect()
}

pub(crate) fn write_config(place: &Workplace, name: &str, changes: Value) {
    let defaults = json!({
        "checkpoint": { "interval": 5 },
        "gradient_clipping": 0.5,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": { "total_num_steps": 40, "warmup_num_steps": 4, "warmup_type": "linear" },
        },
    });
    place.write_config("defaults.json", defaults);
    let mut config = place.read_json("defaults.json");
    for (key, change) in changes.as_object().unwrap() {
        config[key] = change.clone();
    }
    place.write(name, config.to_string());
}

/// A workplace whose `c.json` saves every five steps.
pub(crate) fn workplace() -> Workplace {
    let place = Workplace::new();
    write_config(&place, "c.json", json!({}));
    place
}

pub(crate) fn train(place: &Workplace, arguments: &[&str]) -> Outcome {
    place.run(&[&["train", "c.json"], arguments].concat())
}

#[test]
fn a_resumed_run_writes_the_metrics_of_an_uninterrupted_one() {
    for (background, axes) in [(false, "dp"), (true, "dp,sp")] {
        let place = Workplace::new();
        let train = |arguments: &[&str]| {
            place.run(&[&["train", "c.json", "--zero-partition-axes", axes], arguments].concat())
        };
        let mesh = json!({
            "mesh_param": [2, 2],
            "zero_optimization": { "stage": 3 },
            "checkpoint": { "interval": 5, "async": background },
        });
        write_config(&place, "c.json", mesh);
        train(&["--steps", "12", "--output", "whole"]).assert_done();
        train(&["--steps", "7", "--output", "parts"]).assert_done();
        // The state after a kill between step 7 and its checkpoint.
        fs::remove_dir_all(place.path("parts/step_00000007")).unwrap();
        let outcome = train(&["--steps", "12", "--output", "parts", "--resume"]);
        assert!(outcome.assert_done().stderr.contains("resumed from parts/step_00000005"), "{outcome:?}");
        assert_eq!(repeated(&place, "parts/metrics.jsonl"), repeated(&place, "whole/metrics.jsonl"));
        let outcome = place.run(&["checkpoint", "diff", "parts", "whole"]);
        assert!(outcome.assert_done().stdout.contains("steps 12 and 12"), "{outcome:?}");
        assert_eq!(saved_steps(&place.path("parts")).unwrap(), [12, 10, 5]);
    }
}

/// Returns the largest difference between two loss curves, over the steps of the second one.
fn distance(whole: &[f64], tail: &[f64]) -> f64 {
    let differences = whole[whole.len() - tail.len()..].iter().zip(tail).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f64::max)
}

#[test]
fn a_run_resumes_on_any_mesh_and_stage_with_the_same_losses() {
    let place = Workplace::new();
    let train = |mesh: [usize; 2], stage: u8, arguments: &[&str]| {
        let layout = json!({ "mesh_param": mesh, "zero_optimization": { "stage": stage } });
        write_config(&place, "c.json", layout);
        place.run(&[&["train", "c.json", "--steps", "30"], arguments].concat()).assert_done();
    };
    train([2, 2], 3, &["--output", "saved"]);
    let expected = place.losses("saved/metrics.jsonl");
    assert_eq!(expected.len(), 30);
    // Every mesh and every stage once: `tests/checkpoint/meshes.rs` has their product.
    for (mesh, stage) in [([1, 1], 1), ([4, 1], 3), ([1, 4], 0), ([2, 1], 2)] {
        let name = |kind: &str| format!("{kind}-{}x{}-{stage}", mesh[0], mesh[1]);
        let (resumed, uninterrupted) = (name("resumed"), name("uninterrupted"));
        train(mesh, stage, &["--output", &uninterrupted]);
        train(mesh, stage, &["--output", &resumed, "--resume=saved/step_00000010"]);
        let uninterrupted = place.losses(&format!("{uninterrupted}/metrics.jsonl"));
        let resumed = place.losses(&format!("{resumed}/metrics.jsonl"));
        assert_eq!(resumed.len(), 20);
        let (between_runs, after_resuming) =
            (distance(&expected, &uninterrupted[10..]), distance(&expected, &resumed));
        let label =
            format!("{mesh:?} stage {stage}: {after_resuming:.2e}, uninterrupted runs {between_runs:.2e}");
        println!("{label}");
        assert!(after_resuming <= (2.0 * between_runs).min(1e-4), "{label}");
    }
}

#[test]
fn a_damaged_checkpoint_is_skipped_and_saved_again() {
    let place = workplace();
    place.run(&["train", "c.json", "--steps", "10"]).assert_done();
    let shard = place.path("out/step_00000010/exp_avg.00000-of-00001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    let outcome = place.run(&["checkpoint", "verify", "out"]);
    outcome.assert_refused(1, &["step_00000010/exp_avg.00000-of-00001.safetensors: file is damaged"]);
    let outcome = place.run(&["train", "c.json", "--steps", "12", "--resume"]);
    assert!(outcome.assert_done().stderr.contains("resumed from out/step_00000005"), "{outcome:?}");
    assert!(outcome.stderr.contains("skipped a damaged checkpoint: out/step_00000010"), "{outcome:?}");
    assert_eq!(place.losses("out/metrics.jsonl").len(), 12);
    for step in ["5", "10", "12"] {
        place.run(&["checkpoint", "verify", &format!("out/step_{step:0>8}")]).assert_done();
    }
}

#[test]
fn a_resume_with_the_same_config_keeps_no_copy_of_it() {
    let place = workplace();
    place.run(&["train", "c.json", "--steps", "10"]).assert_done();
    fs::remove_dir_all(place.path("out/step_00000010")).unwrap();
    let outcome = place.run(&["train", "c.json", "--steps", "10", "--resume"]);
    assert!(outcome.assert_done().stderr.contains("resumed from out/step_00000005"), "{outcome:?}");
    assert!(!place.path("out/config.1.json").exists());
}

/// Otherwise the run would save over it.
#[test]
fn a_checkpoint_of_a_newer_version_is_not_skipped() {
    let place = workplace();
    place.run(&["train", "c.json", "--steps", "10"]).assert_done();
    let manifest = place.path("out/step_00000010/manifest.json");
    let newer =
        fs::read_to_string(&manifest).unwrap().replace("\"format_version\": 1", "\"format_version\": 4");
    fs::write(&manifest, &newer).unwrap();
    place.run(&["train", "c.json", "--steps", "12", "--resume"]).assert_refused(
        1,
        &[
            "out/step_00000010/manifest.json: format version 4 is too new",
            "it may be intact, so it is not skipped",
        ],
    );
    assert_eq!(fs::read_to_string(&manifest).unwrap(), newer);
}

#[test]
fn runs_are_not_mixed() {
    let place = workplace();
    let train = |arguments: &[&str]| train(&place, arguments);
    let outcome = train(&["--steps", "7", "--resume"]);
    assert!(
        outcome.assert_done().stderr.contains("out has no checkpoint to resume: starting"),
        "{outcome:?}"
    );
    train(&[])
        .assert_refused(2, &["out contains checkpoints of an earlier run, up to step_00000007", "--resume"]);
    let outcome = train(&["--resume=out/step_00000005"]);
    outcome.assert_refused(2, &["out contains step_00000007, which is newer than out/step_00000005"]);
    train(&["--resume", "--seed", "9"])
        .assert_refused(2, &["(--seed) is 1234 in the checkpoint, but 9 in this run", "export"]);
    train(&["--resume", "--seq-len", "32"])
        .assert_refused(2, &["(--seq-len) is 64 in the checkpoint, but 32 in this run", "--reset-data"]);
    let outcome = train(&["--resume", "--seq-len", "32"]);
    let cause = "error: out/step_00000007: `ulysses.seq_len` (--seq-len) is 64";
    assert!(outcome.stderr.lines().any(|line| line.starts_with(cause)), "the cause comes first: {outcome:?}");
    assert!(!place.path("out/config.1.json").exists(), "a refused run writes nothing");
    train(&["--resume=nowhere"]).assert_refused(
        2,
        &["--resume nowhere: expected a checkpoint, or an output directory with checkpoints, found nothing"],
    );
    let small = json!({ "optimizer": { "type": "SGD", "params": { "lr": 0.1 } } });
    write_config(&place, "c.json", small);
    let expected = [
        "the optimizer state (`optimizer.type`) is parameters, exp_avg, exp_avg_sq in the checkpoint",
        "but parameters in",
    ];
    let outcome = train(&["--resume"]);
    outcome.assert_refused(2, &expected);
    assert!(
        outcome.stderr.contains("error: out/step_00000007: the optimizer state (`optimizer.type`) is"),
        "the cause comes first: {outcome:?}"
    );
    write_config(&place, "c.json", json!({ "ulysses": { "model": "nano", "data": "text.txt" } }));
    let arguments = ["--resume", "--steps", "9", "--seq-len", "64"];
    train(&arguments).assert_refused(2, &["--resume needs an output directory"]);
    write_config(&place, "c.json", json!({}));
    let outcome = train(&["--resume", "--steps", "7"]);
    assert!(
        outcome.assert_done().stdout.contains("nothing to do: 7 steps are complete, 7 are requested"),
        "{outcome:?}"
    );
}

#[test]
fn a_file_that_was_added_to_the_directory_of_data_is_hinted_at() {
    let place = workplace();
    fs::create_dir(place.path("data")).unwrap();
    fs::rename(place.path("text.txt"), place.path("data/text.txt")).unwrap();
    let of_directory = |arguments: &[&str]| train(&place, &[&["--data", "data"], arguments].concat());
    of_directory(&["--steps", "5"]).assert_done();
    place.write("data/train.log", "step 1 of 5");
    of_directory(&["--steps", "6", "--resume"]).assert_refused(
        2,
        &["data is a directory: all text files in it are data, also a log file that was added"],
    );
}

#[test]
fn resume_accepts_a_directory_after_a_space_or_the_config() {
    let place = workplace();
    place.run(&["train", "c.json", "--steps", "5"]).assert_done();
    let resumed = |arguments: &[&str]| {
        let outcome = place.run(&[&["train", "--steps", "6", "--output", "other"], arguments].concat());
        assert!(outcome.assert_done().stderr.contains("resumed from out/step_00000005"), "{outcome:?}");
        fs::remove_dir_all(place.path("other")).unwrap();
    };
    resumed(&["c.json", "--resume", "out"]);
    resumed(&["c.json", "--resume", "out/step_00000005"]);
    resumed(&["--resume", "out", "c.json"]);
    resumed(&["--resume=out", "c.json"]);
    let bare = |arguments: &[&str]| {
        let outcome = place.run(&[&["train"], arguments].concat());
        assert!(outcome.assert_done().stderr.contains("resumed from out/step_"), "{outcome:?}");
    };
    bare(&["c.json", "--resume", "--steps", "6"]);
    bare(&["--steps", "7", "--resume", "c.json"]);
    place
        .run(&["train", "--resume", "out"])
        .assert_refused(2, &["--resume out: missing config: use `ulysses train CONFIG.json --resume out`"]);
    place.run(&["train", "--resume"]).assert_refused(2, &["--resume: missing config"]);
    place
        .run(&["train", "--resume", "lost.json"])
        .assert_refused(2, &["cannot read the config file lost.json"]);
    place.run(&["train"]).assert_refused(2, &["CONFIG"]);
}

#[test]
fn reset_data_keeps_the_optimizer_and_starts_other_data() {
    let place = workplace();
    let train = |arguments: &[&str]| train(&place, arguments);
    train(&["--steps", "5"]).assert_done();
    place.write("other.txt", "pack my box with five dozen liquor jugs. ".repeat(200));
    let other = ["--data", "other.txt", "--seq-len", "32", "--steps", "10"];
    let on_other = |arguments: &[&str]| train(&[&other, arguments].concat());
    on_other(&["--reset-data"]).assert_refused(2, &["--resume"]);
    on_other(&["--resume"]).assert_refused(2, &["--reset-data"]);
    let outcome = on_other(&["--resume", "--reset-data"]);
    let expected = "--reset-data: `ulysses.seq_len` (--seq-len) changed from 64 to 32; the data restarts at its first sequence, training continues";
    assert!(outcome.assert_done().stderr.contains(expected), "{outcome:?}");
    // Step, schedule and optimizer continue: metrics and learning rate are those of one run.
    let metrics = place.metrics("out/metrics.jsonl");
    assert_eq!(
        metrics.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(),
        (1..=10).collect::<Vec<_>>()
    );
    let cursor = |step: &str| place.read_json(&format!("out/step_{step}/manifest.json"))["progress"].clone();
    assert_eq!(cursor("00000010")["step"], 10);
    assert_eq!(cursor("00000010")["data"]["samples_consumed"], 5 * 4, "the samples of the new data");
    // Restarting the same command does not reset the data again.
    let outcome = on_other(&["--resume", "--reset-data", "--set", "ulysses.steps=12"]);
    assert!(outcome.assert_done().stdout.contains("nothing to do"), "flags come after --set: {outcome:?}");
    let arguments = ["--data", "other.txt", "--seq-len", "32", "--steps", "12", "--resume", "--reset-data"];
    let outcome = train(&arguments);
    assert!(!outcome.assert_done().stderr.contains("--reset-data:"), "{outcome:?}");
    assert_eq!(cursor("00000012")["data"]["samples_consumed"], 7 * 4);
}

#[test]
fn a_run_resumes_from_the_newest_valid_checkpoint_of_another_run() {
    let place = workplace();
    let train = |arguments: &[&str]| train(&place, arguments);
    train(&["--steps", "10"]).assert_done();
    fs::remove_file(place.path("out/step_00000010/manifest.json")).unwrap();
    let outcome = train(&["--steps", "12", "--output", "other", "--resume=out"]);
    assert!(outcome.assert_done().stderr.contains("resumed from out/step_00000005"), "{outcome:?}");
    // Naming its own directory equals naming none.
    let outcome = train(&["--steps", "14", "--output", "other", "--resume=other/"]);
    assert!(outcome.assert_done().stderr.contains("resumed from other/step_00000012"), "{outcome:?}");
    let outcome = train(&["--steps", "16", "--output", "other", "--resume=out"]);
    outcome.assert_refused(2, &["other contains step_00000014, which is newer than out"]);
}

#[test]
fn unknown_metrics_are_renamed_for_a_run_from_elsewhere() {
    let place = workplace();
    let train = |arguments: &[&str]| train(&place, arguments);
    train(&["--steps", "5"]).assert_done();
    let strange = "{\"step\":1,\"loss\":77.0}\n{\"step\":9,\"loss\":66.0}\n";
    place.write("other/metrics.jsonl", strange);
    for checkpoint in ["--resume=out", "--resume=out/step_00000005"] {
        let outcome = train(&["--steps", "7", "--output", "other", checkpoint]);
        let expected = "metrics.jsonl to other/metrics.1.jsonl";
        assert!(outcome.assert_done().stderr.contains(expected), "{outcome:?}");
        assert_eq!(place.read("other/metrics.1.jsonl"), strange);
        let steps = place.metrics("other/metrics.jsonl");
        assert_eq!(steps.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [6, 7]);
        fs::remove_dir_all(place.path("other")).unwrap();
        place.write("other/metrics.jsonl", strange);
    }
    // In its own directory a run appends to its metrics, whatever the state of the record.
    fs::remove_file(place.path("out/run.json")).unwrap();
    train(&["--steps", "7", "--resume=out/../out"]).assert_done();
    assert_eq!(place.losses("out/metrics.jsonl").len(), 7);
}

#[test]
fn a_checkpoint_as_output_directory_is_refused() {
    let place = workplace();
    place.run(&["train", "c.json", "--steps", "5"]).assert_done();
    let outcome = place.run(&["train", "c.json", "--steps", "7", "--output", "out/step_00000005"]);
    outcome.assert_refused(2, &["--output out/step_00000005: expected a directory"]);
    place.run(&["checkpoint", "verify", "out"]).assert_done();
    assert!(!place.path("out/step_00000005/config.json").exists());
}

#[test]
fn checkpoints_as_training_data_are_refused() {
    let place = Workplace::new();
    place.write("text/a.txt", "the quick brown fox jumps over the lazy dog. ".repeat(50));
    write_config(&place, "c.json", json!({}));
    let train = |arguments: &[&str]| {
        place.run(&[&["train", "c.json", "--data", "text", "--output", "text/out"], arguments].concat())
    };
    train(&["--steps", "5"]).assert_done();
    // An unchanged number of sequences means that checkpoints are not read as data.
    train(&["--steps", "6", "--resume"]).assert_done();
}

#[test]
fn a_second_job_is_refused_with_the_owner_of_the_directory() {
    let place = workplace();
    fs::create_dir(place.path("out")).unwrap();
    let held = OutputLock::acquire(&place.path("out"), "job 17 on node-a").unwrap();
    place.run(&["train", "c.json"]).assert_refused(1, &["out is in use by job 17 on node-a"]);
    assert!(!place.path("out/config.json").exists());
    drop(held);
    place.run(&["train", "c.json"]).assert_done();
}

/// Starts an endless run and returns when it has trained a few steps.
fn start_endless(place: &Workplace) -> Child {
    let mut command = place.command(&["train", "c.json", "--steps", "1000000000"]);
    let stderr = fs::File::create(place.path("stderr")).unwrap();
    let child = command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::read_to_string(place.path("out/metrics.jsonl")).unwrap_or_default().lines().count() < 3 {
        assert!(Instant::now() < deadline, "the run does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

/// Sends signals in quick succession and returns the exit code, or minus the signal that ended it.
fn signal(mut child: Child, signals: &[&str]) -> i32 {
    let script: Vec<String> = signals.iter().map(|name| format!("kill -{name} {};", child.id())).collect();
    assert!(Command::new("sh").args(["-c", &script.concat()]).status().unwrap().success());
    child.wait().unwrap().code().unwrap_or(-1)
}

#[test]
fn a_signal_saves_the_step_and_exits_with_75() {
    for (name, checkpoint) in [
        ("TERM", json!({})),
        ("INT", json!({})),
        ("USR1", json!({ "interval": 1, "async": true, "keep_last": 2 })),
        ("TERM", json!({ "interval": 1 })),
    ] {
        let place = Workplace::new();
        write_config(&place, "c.json", json!({ "mesh_param": [2, 2], "checkpoint": checkpoint }));
        assert_eq!(signal(start_endless(&place), &[name]), 75, "{name} {checkpoint}");
        let done = place.metrics("out/metrics.jsonl").len() as u64;
        assert_eq!(saved_steps(&place.path("out")).unwrap()[0], done, "the last step is saved");
        place.run(&["checkpoint", "verify", "out"]).assert_done();
        let total = (done + 2).to_string();
        place.run(&["train", "c.json", "--steps", &total, "--resume"]).assert_done();
        assert_eq!(place.metrics("out/metrics.jsonl").len() as u64, done + 2);
    }
}

#[test]
fn a_second_signal_ends_the_run_at_once() {
    let place = Workplace::new();
    write_config(&place, "c.json", json!({ "checkpoint": {} }));
    // Two different signals: two equal ones may arrive as one.
    for (signals, codes) in [(["TERM", "USR1"], [128 + 15, 128 + 10]), (["USR1", "INT"], [128 + 10, 128 + 2])]
    {
        let code = signal(start_endless(&place), &signals);
        assert!(codes.contains(&code), "{signals:?}: {code}");
        fs::remove_dir_all(place.path("out")).unwrap();
    }
}

#[test]
fn without_checkpoints_a_signal_ends_the_run_without_saving() {
    for name in ["TERM", "INT"] {
        let place = Workplace::new();
        write_config(&place, "c.json", json!({ "checkpoint": null, "mesh_param": [2, 1] }));
        let config = place.read("c.json").replace("\"checkpoint\":null,", "");
        place.write("c.json", config);
        assert_eq!(signal(start_endless(&place), &[name]), 75, "{name}");
        let said = place.read("stderr");
        let done = place.metrics("out/metrics.jsonl").len();
        let expected =
            format!("stopped by a signal after step {done}; nothing was saved, because the config has no");
        assert!(said.contains(&expected) && said.contains("stopping after this step"), "{said}");
        assert!(saved_steps(&place.path("out")).unwrap().is_empty());
        assert!(
            place.read_json("out/run.json")["totals"]["steps"].as_u64().is_some(),
            "the record is complete"
        );
    }
}
