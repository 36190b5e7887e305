//! `ulysses train --backend mpi`, compared with the same training on threads.

use crate::job::{Job, Running};
use crate::support::cli::{Outcome, Workplace};
use crate::trial;
use libtest_mimic::Trial;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials =
        vec![trial("stages_of_a_pipeline_are_what_threads_do", stages_of_a_pipeline_are_what_threads_do)];
    trials.push(trial("a_run_resumes_with_a_different_number_of_processes", || {
        a_run_resumes_with_a_different_number_of_processes();
    }));
    trials.push(trial("the_desync_check_works_while_training", the_desync_check_works_while_training));
    trials.push(trial(
        "a_mesh_of_a_different_size_is_refused_once",
        a_mesh_of_a_different_size_is_refused_once,
    ));
    trials.push(trial("a_difference_on_one_process_ends_all", a_difference_on_one_process_ends_all));
    trials.push(trial("mpirun_is_discovered_and_its_processes_fill_the_mesh", || {
        mpirun_is_discovered_and_its_processes_fill_the_mesh();
    }));
    trials.push(trial("the_backend_thread_is_refused_once_under_mpirun", || {
        the_backend_thread_is_refused_once_under_mpirun();
    }));
    trials.push(trial("a_config_error_is_reported_once", a_config_error_is_reported_once));
    trials.push(trial("contradicting_values_are_both_shown", || {
        contradicting_values_are_both_shown();
    }));
    trials.push(trial(
        "all_to_all_and_collectives_are_benchmarked",
        all_to_all_and_collectives_are_benchmarked,
    ));
    trials.push(trial("a_killed_process_ends_the_others", a_killed_process_ends_the_others));
    trials.push(trial("the_memory_of_a_rank_does_not_grow", the_memory_of_a_rank_does_not_grow));
    trials
}

/// The binary under `mpirun` in a workplace.
fn job(place: &Workplace, processes: usize, arguments: &[&str]) -> Job {
    let arguments = [arguments, &["--backend", "mpi"]].concat();
    Job::new(processes, Path::new(env!("CARGO_BIN_EXE_ulysses")), &arguments).within(&place.path("."))
}

fn train(place: &Workplace, processes: usize, arguments: &[&str]) -> Outcome {
    job(place, processes, &[&["train", "config.json"], arguments].concat()).run()
}

/// The metrics of each step, without times and memory.
pub(crate) fn trained_metrics(place: &Workplace, metrics: &str) -> Vec<Value> {
    let keys = ["step", "loss", "lr", "grad_norm", "tokens", "comm_bytes"];
    let pick = |step: Value| Value::Array(keys.iter().map(|key| step[key].clone()).collect());
    place.metrics(metrics).into_iter().map(pick).collect()
}

/// Operations once leaked their lists of messages: 4.5 KB per step.
fn the_memory_of_a_rank_does_not_grow() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "ulysses": { "steps": 220 } }));
    train(&place, 2, &["--mesh", "1x2", "--output", "out"]).assert_done();
    let metrics = place.metrics("out/metrics.jsonl");
    let [early, late] = [20, 219].map(|index| metrics[index]["memory_bytes"].as_u64().unwrap());
    assert!(late < early + (200 << 10), "{early} bytes after 21 steps, {late} after 220");
}

/// One stage per rank, and two, of which a rank has several messages to the same other one on their way.
fn stages_of_a_pipeline_are_what_threads_do() {
    let place = Workplace::new();
    for (mesh, stage, pipeline) in [
        ("pp=4,dp=1,sp=1", 1, json!({ "schedule": "zero_bubble" })),
        ("pp=2,dp=1,sp=2", 2, json!({ "virtual_stages": 2 })),
    ] {
        let config = json!({
            "gradient_accumulation_steps": 4, "zero_optimization": { "stage": stage },
            "ulysses": { "model": "small", "seq_len": 32, "steps": 2, "pipeline": pipeline },
        });
        place.write_config("config.json", config);
        assert_processes_are_threads(&place, 4, mesh, 2);
    }
}

/// Compares a run of processes with one of threads.
pub(crate) fn assert_processes_are_threads(place: &Workplace, processes: usize, mesh: &str, steps: usize) {
    let [of_threads, of_processes] = ["threads", "processes"].map(|backend| format!("{backend}-{mesh}"));
    place.run(&["train", "config.json", "--mesh", mesh, "--output", &of_threads]).assert_done();
    let outcome = train(place, processes, &["--mesh", mesh, "--output", &of_processes]);
    assert!(outcome.assert_done().stdout.contains("tokens/s"), "{outcome:?}");
    assert_eq!(outcome.stdout.matches("tokens/s").count(), 1, "one process reports: {outcome:?}");
    let [threads, processes] =
        [of_threads, of_processes].map(|output| trained_metrics(place, &format!("{output}/metrics.jsonl")));
    assert_eq!(threads.len(), steps);
    assert_eq!(processes, threads, "mesh {mesh}: sums must be in the same order");
}

fn a_run_resumes_with_a_different_number_of_processes() {
    let place = Workplace::new();
    place.write_config(
        "config.json",
        json!({ "checkpoint": { "interval": 2 }, "zero_optimization": { "stage": 2 } }),
    );
    place.run(&["train", "config.json", "--mesh", "1x2", "--steps", "6", "--output", "whole"]).assert_done();
    train(&place, 4, &["--mesh", "2x2", "--steps", "2"]).assert_done();
    // As stages of a pipeline.
    let resumed = train(&place, 2, &["--mesh", "pp=2,dp=1,sp=1", "--steps", "6", "--resume"]);
    assert_eq!(resumed.assert_done().stderr.matches("resumed from").count(), 1, "{resumed:?}");
    let (whole, resumed) = (place.losses("whole/metrics.jsonl"), place.losses("out/metrics.jsonl"));
    assert_eq!(resumed.len(), 6);
    for (step, (resumed, whole)) in resumed.iter().zip(&whole).enumerate() {
        assert!((resumed - whole).abs() <= 1e-6 * whole.abs(), "step {}: {resumed} and {whole}", step + 1);
    }
}

fn the_desync_check_works_while_training() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "ulysses": { "comm": { "check": "on" } } }));
    train(&place, 2, &["--mesh", "1x2"]).assert_done();
    assert_eq!(place.metrics("out/metrics.jsonl").len(), 4);
}

fn all_to_all_and_collectives_are_benchmarked() {
    let place = Workplace::new();
    let report = |bench: &str| -> Value {
        let outcome = job(&place, 3, &["bench", bench, "--mib", "1", "--repeats", "2", "--json"]).run();
        // Only one process prints, or the output is not valid JSON.
        serde_json::from_str(&outcome.assert_done().stdout)
            .unwrap_or_else(|error| panic!("{error}: {outcome:?}"))
    };
    let collectives = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"];
    for (bench, cases) in [("all-to-all", &["seq_to_head", "head_to_seq"][..]), ("collectives", &collectives)]
    {
        let report = report(bench);
        assert_eq!(
            (&report["settings"]["backend"], &report["ranks"]),
            (&json!("mpi"), &json!(3)),
            "{report}"
        );
        for case in cases {
            let figure = &report["figures"][case];
            assert!(figure["ms"].as_f64().is_some_and(|ms| ms > 0.0), "{case}: {report}");
            assert!(report["ratios"][format!("{case} / copy")].as_f64().is_some_and(|ratio| ratio > 0.0));
        }
    }
    let outcome = job(&place, 2, &["bench", "collectives", "--ranks", "3"]).run();
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stderr.contains("3 rank(s) requested, but MPI started 2"), "{outcome:?}");
    let outcome = job(&place, 1, &["bench", "collectives"]).run();
    assert!(outcome.stderr.contains("a collective needs at least 2"), "{outcome:?}");
}

fn a_mesh_of_a_different_size_is_refused_once() {
    let place = Workplace::new();
    place.write_config("config.json", json!({}));
    let refused = train(&place, 2, &["--mesh", "2x2"]);
    refused.assert_refused(2, &["dp 2 × sp 2 has 4 ranks", "2 process(es)", "mpirun -np 4"]);
    assert!(!place.path("out").exists(), "nothing was written");
}

fn mpirun_is_discovered_and_its_processes_fill_the_mesh() {
    let place = Workplace::new();
    place.write_config("config.json", json!({}));
    let binary = Path::new(env!("CARGO_BIN_EXE_ulysses"));
    let outcome = Job::new(2, binary, &["train", "config.json"]).within(&place.path(".")).run();
    assert!(outcome.assert_done().stderr.contains("mesh dp 2 × sp 1"), "no mesh, no backend: {outcome:?}");
    let resolved = place.read_json("out/config.json");
    assert_eq!(resolved["ulysses"]["backend"], "mpi");
}

/// Each process would train by itself, and all would write the same files.
fn the_backend_thread_is_refused_once_under_mpirun() {
    let place = Workplace::new();
    place.write_config("flag.json", json!({}));
    place.write_config("key.json", json!({ "ulysses": { "backend": "thread" } }));
    let binary = Path::new(env!("CARGO_BIN_EXE_ulysses"));
    for (stated, arguments) in [
        ("--backend thread", &["train", "flag.json", "--backend", "thread"][..]),
        ("`ulysses.backend` is \"thread\"", &["train", "key.json"]),
    ] {
        let outcome = Job::new(2, binary, arguments).within(&place.path(".")).run();
        outcome.assert_refused(2, &[stated, "Open MPI started 2 processes", "use the backend mpi"]);
        assert!(!place.path("out").exists(), "nothing was written");
    }
    let alone = Job::new(1, binary, &["train", "flag.json", "--backend", "thread", "--mesh", "1x2"]);
    alone.within(&place.path(".")).run().assert_done();
}

fn a_config_error_is_reported_once() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "train_batch": 4 }));
    let refused = train(&place, 3, &["--mesh", "1x3"]);
    refused.assert_refused(2, &["`train_batch`"]);
    refuses_a_missing_file(&place);
}

/// Only rank 1 lacks the file, so it reports the error.
fn refuses_a_missing_file(place: &Workplace) {
    place.write_config("good.json", json!({}));
    let script =
        "if [ \"$OMPI_COMM_WORLD_RANK\" = 1 ]; then set -- train nowhere.json; fi; exec \"$0\" \"$@\"";
    let arguments = ["-c", script, env!("CARGO_BIN_EXE_ulysses"), "train", "good.json"];
    let outcome = Job::new(2, Path::new("sh"), &arguments).within(&place.path(".")).run();
    outcome.assert_refused(2, &["nowhere.json"]);
}

fn contradicting_values_are_both_shown() {
    let place = Workplace::new();
    place.write_config("config.json", json!({}));
    let arguments =
        ["RANK=0", "WORLD_SIZE=3", env!("CARGO_BIN_EXE_ulysses"), "train", "config.json", "--backend", "mpi"];
    let outcome = Job::new(2, Path::new("env"), &arguments).within(&place.path(".")).run();
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    for shown in ["WORLD_SIZE=3 (torchrun)", "OMPI_COMM_WORLD_SIZE=2 (Open MPI)"] {
        assert!(outcome.stderr.contains(shown), "no {shown}: {outcome:?}");
    }
}

/// Runs the same training, with an additional argument for rank 1.
fn with_different_rank_1(place: &Workplace, argument: &str) -> Outcome {
    let script = "if [ \"$OMPI_COMM_WORLD_RANK\" = 1 ]; then set -- \"$@\" $ODD; fi; exec \"$0\" \"$@\"";
    let script = format!("ODD='{argument}'; {script}");
    let binary = env!("CARGO_BIN_EXE_ulysses");
    let arguments = ["-c", &script, binary, "train", "config.json", "--mesh", "1x2", "--backend", "mpi"];
    Job::new(2, Path::new("sh"), &arguments).within(&place.path(".")).run()
}

fn a_difference_on_one_process_ends_all() {
    let place = Workplace::new();
    let boards = json!({ "enabled": true, "output_path": "boards", "job_name": "j" });
    place.write_config("config.json", json!({ "tensorboard": boards }));
    let refused = with_different_rank_1(&place, "--data nothing");
    assert!(refused.stderr.contains("nothing does not exist"), "{refused:?}");
    for directory in ["out", "boards"] {
        let made = place.path(directory).exists();
        assert!(!made, "rank 0 made {directory} for a run that rank 1 cannot start");
    }
    let differs = with_different_rank_1(&place, "--seed 99");
    assert!(differs.stderr.contains("the config differs"), "{differs:?}");
}

fn a_killed_process_ends_the_others() {
    let place = Workplace::new();
    place.write_config("config.json", json!({}));
    let arguments = ["train", "config.json", "--mesh", "1x4", "--steps", "1000000"];
    let running = job(&place, 4, &arguments).start();
    wait_for_steps(&running, &place.path("out/metrics.jsonl"), 3);
    let victim = children(running.child.id())[2];
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
    let killed = Instant::now();
    let outcome = running.wait();
    assert!(killed.elapsed() < Duration::from_secs(30), "took {:?}", killed.elapsed());
    assert_ne!(outcome.code, Some(0));
    let named = |line: &str| line.contains("process rank 2 ") && line.contains("signal 9");
    assert!(outcome.stderr.lines().any(named), "mpirun names the process: {outcome:?}");
}

/// Waits until the metrics have this many lines.
pub(crate) fn wait_for_steps(running: &Running, metrics: &Path, steps: usize) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !std::fs::read_to_string(metrics).is_ok_and(|text| text.lines().count() >= steps) {
        assert!(Instant::now() < deadline, "no step: {}", running.text("stderr"));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the child processes of a process.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let is_child = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.split_whitespace().eq(["PPid:", &parent.to_string()]))
    };
    let processes = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut children: Vec<u32> = processes.filter(is_child).collect();
    children.sort_unstable();
    children
}
