//! Full disks, and links, pipes and devices instead of files.

use crate::checkpoint::resume::{train, workplace, write_config};
use crate::support::cli::{Outcome, Workplace};
use serde_json::json;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use ulysses::checkpoint::{saved_steps, step_name};

/// Runs with a file size limit of about 50 KB: metrics fit, shards do not.
fn run_in_little_space(place: &Workplace, arguments: &[&str]) -> Outcome {
    run_in_blocks(place, 100, arguments)
}

/// Runs with a file size limit in blocks of 512 bytes.
fn run_in_blocks(place: &Workplace, blocks: usize, arguments: &[&str]) -> Outcome {
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
    let output = Command::new("sh")
        .args(["-c", &script, env!("CARGO_BIN_EXE_ulysses")])
        .args(arguments)
        .current_dir(place.path("."))
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn a_failed_background_save_does_not_prevent_later_saves() {
    let place = Workplace::new();
    let checkpoint = json!({ "interval": 1, "async": true, "on_error": "continue" });
    write_config(&place, "c.json", json!({ "checkpoint": checkpoint }));
    let outcome = run_in_little_space(&place, &["train", "c.json", "--steps", "6"]);
    for step in 1..6 {
        let expected = format!("checkpoint of step {step} was not saved");
        assert!(outcome.stderr.contains(&expected), "no {expected:?} in {outcome:?}");
    }
    outcome.assert_refused(1, &["error: rank 0 failed: checkpoint of step 6 was not saved"]);
}

#[test]
fn a_full_disk_for_metrics_does_not_end_a_run_without_checkpoints() {
    for background in [false, true] {
        let place = Workplace::new();
        let checkpoint = json!({ "interval": 10, "async": background, "on_error": "continue" });
        let monitors = json!({ "enabled": true, "job_name": "m" });
        write_config(&place, "c.json", json!({ "checkpoint": checkpoint, "tensorboard": monitors }));
        let outcome = run_in_blocks(&place, 32, &["train", "c.json", "--steps", "60"]);
        // The run ends because its last checkpoint is missing.
        outcome.assert_refused(1, &["error: rank 0 failed: checkpoint of step 60 was not saved"]);
        for expected in [
            "checkpoint of step 50 was not saved",
            "metrics are kept in memory until disk space is available",
        ] {
            assert!(outcome.stderr.contains(expected), "no {expected:?} in {outcome:?}");
        }
        let names = fs::read_dir(place.path("out")).unwrap();
        let is_left =
            names.map(|entry| entry.unwrap().file_name()).any(|name| name.to_string_lossy().contains("step"));
        assert!(!is_left, "an unfinished save keeps no room");
    }
    let place = workplace();
    let outcome = run_in_blocks(&place, 32, &["train", "c.json", "--steps", "60", "--output", "stops"]);
    outcome.assert_refused(1, &["checkpoint of step 5 was not saved"]);
    write_config(&place, "c.json", json!({ "checkpoint": { "on_error": "stop" } }));
    let outcome = run_in_blocks(&place, 32, &["train", "c.json", "--steps", "60", "--output", "metrics"]);
    outcome.assert_refused(1, &["error: rank 0 failed: cannot write metrics/metrics.jsonl"]);
}

/// Replaces a file by a named pipe.
fn make_pipe(path: &Path) {
    fs::remove_file(path).unwrap();
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn pipes_and_devices_in_a_checkpoint_are_refused() {
    let place = workplace();
    train(&place, &["--steps", "10"]).assert_done();
    let shard = "exp_avg.00000-of-00001.safetensors";
    for name in ["manifest.json", shard] {
        let file = place.path("out/step_00000010").join(name);
        let sound = fs::read(&file).unwrap();
        make_pipe(&file);
        let pipe = format!("{name}: not a regular file but a named pipe");
        place.run(&["checkpoint", "verify", "out/step_00000010"]).assert_refused(1, &[&pipe]);
        let outcome = train(&place, &["--steps", "12", "--resume=out", "--output", &format!("from-{name}")]);
        assert!(outcome.assert_done().stderr.contains("resumed from out/step_00000005"), "{outcome:?}");
        assert!(outcome.stderr.contains(&pipe), "{outcome:?}");
        fs::remove_file(&file).unwrap();
        symlink("/dev/null", &file).unwrap();
        let device = format!("{name}: not a regular file but a device");
        place.run(&["checkpoint", "verify", "out/step_00000010"]).assert_refused(1, &[&device]);
        fs::remove_file(&file).unwrap();
        fs::write(&file, sound).unwrap();
    }
    for name in ["run.json", "metrics.jsonl"] {
        let file = place.path("out").join(name);
        let valid = fs::read(&file).unwrap();
        make_pipe(&file);
        let outcome = train(&place, &["--steps", "12", "--resume"]);
        outcome.assert_refused(1, &[name, "not a regular file but a named pipe"]);
        place.run(&["report", "out"]).assert_refused(2, &[name, "a named pipe"]);
        fs::remove_file(&file).unwrap();
        fs::write(&file, valid).unwrap();
    }
}

#[test]
fn links_in_the_output_directory_are_not_written_through() {
    let place = workplace();
    place.write("mine", "not ours");
    fs::create_dir(place.path("out")).unwrap();
    symlink(place.path("mine"), place.path("out/.latest.saving")).unwrap();
    train(&place, &["--steps", "5"]).assert_done();
    assert_eq!(
        (place.read("mine").as_str(), place.read("out/latest").as_str()),
        ("not ours", "step_00000005\n")
    );
    fs::remove_file(place.path("out/.lock")).unwrap();
    symlink(place.path("mine"), place.path("out/.lock")).unwrap();
    let expected = "out/.lock: not a regular file but a symbolic link";
    train(&place, &["--steps", "6", "--resume"]).assert_refused(1, &[expected]);
    assert_eq!(place.read("mine"), "not ours");
}

#[test]
fn the_age_of_a_renamed_checkpoint_comes_from_its_manifest() {
    let place = workplace();
    train(&place, &["--steps", "10"]).assert_done();
    fs::rename(place.path("out/step_00000005"), place.path("out/step_00000099")).unwrap();
    let inspected = place.run(&["checkpoint", "inspect", "out"]);
    assert!(inspected.assert_done().stdout.contains("out/step_00000010"), "{inspected:?}");
    let outcome = train(&place, &["--steps", "12", "--resume"]);
    assert!(outcome.assert_done().stderr.contains("resumed from out/step_00000010"), "{outcome:?}");
    let name = |step: u64| place.path("out").join(step_name(step));
    for step in [10, 12] {
        fs::remove_dir_all(name(step)).unwrap();
    }
    let outcome = train(&place, &["--steps", "8", "--resume"]);
    let stderr = &outcome.assert_done().stderr;
    assert!(stderr.contains("resumed from out/step_00000099: step 5, saved on mesh"), "{stderr}");
    assert!(stderr.contains("the checkpoint's directory was renamed: its manifest says step 5"), "{stderr}");
    // A directory name between the two kept checkpoints replaces neither.
    fs::rename(name(99), name(9)).unwrap();
    write_config(&place, "c.json", json!({ "checkpoint": { "interval": 5, "keep_last": 2 } }));
    train(&place, &["--steps", "10", "--resume"]).assert_done();
    assert_eq!(saved_steps(&place.path("out")).unwrap(), [10, 9, 8]);
    // Nor does it get lost when the run saves a step of the same name.
    fs::rename(name(9), name(15)).unwrap();
    train(&place, &["--steps", "15", "--resume"]).assert_done();
    assert_eq!(saved_steps(&place.path("out")).unwrap(), [15, 10]);
    let moved = place.run(&["checkpoint", "verify", "out/moved_step_00000005"]);
    moved.assert_done();
}

#[test]
fn a_full_disk_stops_the_run_or_not_as_configured() {
    let place = workplace();
    place.run(&["train", "c.json", "--steps", "5"]).assert_done();
    let resume = ["train", "c.json", "--steps", "12", "--resume"];
    let outcome = run_in_little_space(&place, &resume);
    outcome.assert_refused(1, &["checkpoint of step 10 was not saved: rank 0: cannot write"]);
    let is_step = |name: &String| name.contains("step");
    let left = || -> Vec<String> {
        let names = fs::read_dir(place.path("out")).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).filter(is_step).collect()
    };
    assert_eq!(left(), ["step_00000005"]);
    place.run(&["checkpoint", "verify", "out/step_00000005"]).assert_done();
    write_config(&place, "c.json", json!({ "checkpoint": { "interval": 5, "on_error": "continue" } }));
    let outcome = run_in_little_space(&place, &resume);
    // Step 10 may fail, but a run fails if its last step is not saved.
    assert!(
        outcome.stderr.contains("step 10 was not saved") && outcome.stderr.contains("training continues"),
        "{outcome:?}"
    );
    outcome.assert_refused(1, &["checkpoint of step 12 was not saved"]);
    assert_eq!(left(), ["step_00000005"]);
    assert_eq!(place.metrics("out/metrics.jsonl").len(), 12);
    place.run(&resume).assert_done();
}
