//! `ulysses launch` with ranks connected by MPI.

use crate::job::Job;
use crate::support::cli::Workplace;
use crate::training::{children, trained_metrics, wait_for_steps};
use crate::trial;
use libtest_mimic::Trial;
use serde_json::json;
use std::process::Command;
use std::time::Duration;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "a_launched_run_resumes_after_a_rank_was_killed",
            a_launched_run_resumes_after_a_rank_was_killed,
        ),
        trial(
            "a_killed_rank_costs_only_the_steps_since_the_copy_in_memory",
            a_killed_rank_costs_only_the_steps_since_the_copy_in_memory,
        ),
        trial("a_launched_run_saves_and_ends_on_a_signal", a_launched_run_saves_and_ends_on_a_signal),
        trial("a_signal_before_the_ranks_run_ends_the_job", a_signal_before_the_ranks_run_ends_the_job),
        trial("a_restart_ends_the_ranks_of_a_killed_mpirun", a_restart_ends_the_ranks_of_a_killed_mpirun),
        trial("a_rank_that_fails_under_launch_is_named", a_rank_that_fails_under_launch_is_named),
    ]
}

const STEPS: usize = 400;

fn long_run() -> Workplace {
    let place = Workplace::new();
    place.write_config(
        "config.json",
        json!({ "checkpoint": { "interval": 20 }, "ulysses": { "steps": STEPS } }),
    );
    place
}

fn kill(signal: &str, process: u32) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().unwrap().success());
}

fn a_launched_run_resumes_after_a_rank_was_killed() {
    let place = long_run();
    place.run(&["train", "config.json", "--mesh", "1x2", "--output", "whole"]).assert_done();
    let arguments = ["--max-restarts", "1", "--", "train", "config.json", "--mesh", "1x2"];
    let running = Job::launched(2, &arguments).within(&place.path(".")).start();
    wait_for_steps(&running, &place.path("out/metrics.jsonl"), 50);
    // Its other child is the watchdog.
    let mpirun = children(running.child.id()).into_iter().find(|child| !children(*child).is_empty()).unwrap();
    kill("-9", children(mpirun)[1]);
    let outcome = running.wait();
    let restart = "rank 1 was killed by signal 9 (SIGKILL)";
    outcome.assert_done();
    let named = |line: &str| line.contains(restart) && line.ends_with("restart 1 of 1");
    assert!(outcome.stderr.lines().any(named), "{outcome:?}");
    assert!(outcome.stderr.contains("[0] resumed from "), "{outcome:?}");
    let (whole, resumed) =
        (trained_metrics(&place, "whole/metrics.jsonl"), trained_metrics(&place, "out/metrics.jsonl"));
    assert_eq!(resumed.len(), STEPS);
    assert_eq!(resumed, whole, "the same as without the kill");
    let record = std::fs::read_to_string(place.path("out/run.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&record).unwrap();
    let reason = record["restart"].as_str().unwrap();
    assert!(reason.contains(restart) && reason.ends_with("restart 1 of 1"), "{reason}");
    let first = &record["earlier"][0];
    assert!(first["first_step"] == 1 && first.get("restart").is_none(), "{first}");
    let restarts = place.restarts("out/metrics.jsonl");
    assert_eq!(restarts.len(), 1, "{restarts:?}");
    let saved = restarts[0]["step"].as_u64().unwrap();
    assert!(saved >= 20 && saved.is_multiple_of(20), "a step that was saved: {restarts:?}");
    let expected = json!({
        "step": saved, "restart": 1, "reason": reason, "failed_rank": 1, "lost_hosts": [], "resumed_from": "disk",
        "dp_size_before": 1, "sp_size_before": 2, "dp_size": 1, "sp_size": 2,
    });
    assert_eq!(restarts[0], expected);
    let report = place.run(&["report", "out"]);
    report.assert_done();
    assert!(place.read("out/report.html").contains("restart 1 of 1"));
}

/// Nothing is on disk before the last step.
fn a_killed_rank_costs_only_the_steps_since_the_copy_in_memory() {
    let place = Workplace::new();
    let checkpoint = json!({ "memory_interval": 20 });
    place.write_config("config.json", json!({ "checkpoint": checkpoint, "ulysses": { "steps": STEPS } }));
    let alone = place.run(&["train", "config.json", "--mesh", "1x2", "--output", "whole"]);
    let note = "warning: checkpoint.memory_interval has no effect";
    assert!(alone.assert_done().stderr.contains(note), "{alone:?}");
    let memory = place.path("memory");
    std::fs::create_dir(&memory).unwrap();
    let memory_dir = memory.to_str().unwrap();
    let flags = ["--max-restarts", "1", "--memory-dir", memory_dir];
    let arguments = [&flags[..], &["--", "train", "config.json", "--mesh", "1x2"]].concat();
    let running = Job::launched(2, &arguments).within(&place.path(".")).start();
    wait_for_steps(&running, &place.path("out/metrics.jsonl"), 50);
    let mpirun = children(running.child.id()).into_iter().find(|child| !children(*child).is_empty()).unwrap();
    kill("-9", children(mpirun)[1]);
    let outcome = running.wait();
    outcome.assert_done();
    let from = "resuming from the copy of step ";
    let line =
        outcome.stderr.lines().find(|line| line.contains(from)).unwrap_or_else(|| panic!("{outcome:?}"));
    let (step, rest) = line.split_once(from).unwrap().1.split_once(' ').unwrap();
    assert!(step.parse::<usize>().unwrap() >= 40 && rest.ends_with("newest on disk: none"), "{line}");
    let (whole, resumed) =
        (trained_metrics(&place, "whole/metrics.jsonl"), trained_metrics(&place, "out/metrics.jsonl"));
    assert_eq!(resumed.len(), STEPS);
    assert_eq!(resumed, whole, "the same as without the kill");
    assert_eq!(std::fs::read_dir(&memory).unwrap().count(), 0, "the directory is removed");
    let restart = &place.restarts("out/metrics.jsonl")[0];
    assert_eq!((&restart["resumed_from"], restart["step"].to_string().as_str()), (&json!("memory"), step));
}

fn a_launched_run_saves_and_ends_on_a_signal() {
    let place = long_run();
    let arguments = ["--max-restarts", "1", "--", "train", "config.json", "--mesh", "2x1"];
    let running = Job::launched(2, &arguments).within(&place.path(".")).start();
    wait_for_steps(&running, &place.path("out/metrics.jsonl"), 5);
    kill("-TERM", running.child.id());
    let outcome = running.wait();
    assert_eq!(outcome.code, Some(75), "{outcome:?}");
    let steps = place.metrics("out/metrics.jsonl").len();
    assert!(steps < STEPS, "it ended early");
    assert!(place.path(&format!("out/step_{steps:08}")).exists(), "with a checkpoint: {outcome:?}");
}

/// Until its ranks run, `mpirun` ends by a signal, or has nobody to forward it to.
fn a_signal_before_the_ranks_run_ends_the_job() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "ulysses": { "steps": 1_000_000 } }));
    let comm = |id: u32| std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
    for (signal, code) in [("-TERM", 143), ("-INT", 130)] {
        for milliseconds in [0, 20, 40, 80, 160] {
            let output = format!("out{signal}{milliseconds}");
            let train = ["--grace", "2", "--", "train", "config.json", "--mesh", "2x1", "--output", &output];
            let mut running = Job::launched(2, &train).within(&place.path(".")).start();
            let launch = running.child.id();
            while !children(launch).into_iter().any(|child| comm(child).trim() == "mpirun") {
                assert!(running.child.try_wait().unwrap().is_none(), "{}", running.text("stderr"));
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(milliseconds));
            kill(signal, launch);
            let outcome = running.wait();
            // After some time the ranks train, and save.
            assert!([code, 75].contains(&outcome.code.unwrap()), "{signal} {milliseconds}: {outcome:?}");
        }
    }
}

/// A stopped rank does not notice that `mpirun` is gone. It would still have the lock of the output directory.
fn a_restart_ends_the_ranks_of_a_killed_mpirun() {
    let place = long_run();
    place.run(&["train", "config.json", "--mesh", "1x2", "--output", "whole"]).assert_done();
    let arguments = ["--max-restarts", "1", "--grace", "2", "--", "train", "config.json", "--mesh", "1x2"];
    let running = Job::launched(2, &arguments).within(&place.path(".")).start();
    wait_for_steps(&running, &place.path("out/metrics.jsonl"), 50);
    let mpirun = children(running.child.id()).into_iter().find(|child| !children(*child).is_empty()).unwrap();
    let ranks = children(mpirun);
    kill("-STOP", ranks[0]);
    kill("-9", mpirun);
    let outcome = running.wait();
    assert!(outcome.assert_done().stderr.contains("restart 1 of 1"), "{outcome:?}");
    let [whole, resumed] =
        ["whole", "out"].map(|output| trained_metrics(&place, &format!("{output}/metrics.jsonl")));
    assert_eq!(resumed, whole, "the same as without the kill");
    let left = ranks.iter().filter(|rank| std::path::Path::new(&format!("/proc/{rank}")).exists());
    assert_eq!(left.count(), 0, "{ranks:?}");
}

fn a_rank_that_fails_under_launch_is_named() {
    let place = Workplace::new();
    place.write_config("config.json", json!({}));
    let arguments = ["--max-restarts", "0", "--", "train", "config.json", "--mesh", "1x3"];
    let outcome = Job::launched(2, &arguments).within(&place.path(".")).run();
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stderr.contains("ended with exit code 2"), "{outcome:?}");
    let reported =
        |line: &&str| line.contains("] error: ") && line.contains("has 3 ranks, but MPI started 2");
    assert_eq!(outcome.stderr.lines().filter(reported).count(), 1, "one rank reports: {outcome:?}");
}
