//! SLURM jobs, with a controller and two nodes on this machine. `cli/tests/mpi/slurm/run` starts them.

use crate::job::Job;
use crate::support::cli::{Outcome, Workplace};
use crate::training::trained_metrics;
use crate::trial;
use libtest_mimic::Trial;
use serde_json::json;
use std::process::Command;

const BATCH_FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/clusters/slurm_cpu.sbatch");
const STEPS: usize = 400;

/// Submits the batch file, changed for this machine: two tasks per node, one core each.
const SUBMIT: &str = r#"
    job=$(sbatch --parsable --output=log --ntasks-per-node=2 --cpus-per-task=1 "$BATCH_FILE" config.json)
    until [ "$(cat out/metrics.jsonl 2>/dev/null | wc -l)" -ge 20 ]; do sleep 0.1; done
"#;
/// Waits until the job has left the queue.
const AWAIT: &str = r#"
    while squeue --noheader --jobs="$job" | grep -q .; do sleep 0.1; done
    scontrol show job "$job"
"#;

/// The trials, if SLURM is installed; its daemons need root.
pub(crate) fn trials() -> Vec<Trial> {
    let is_there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout == b"0\n");
    let is_possible = is_root && ["slurmctld", "slurmd", "munged", "sbatch"].into_iter().all(is_there);
    let trials = [
        trial("a_slurm_batch_job_resumes_after_a_signal", || {
            a_slurm_batch_job_resumes_after_a_signal();
        }),
        trial("a_killed_slurm_task_ends_the_job_and_is_named", a_killed_slurm_task_ends_the_job_and_is_named),
        trial("slurm_tasks_without_mpi_support_are_refused", slurm_tasks_without_mpi_support_are_refused),
        trial("launchers_that_srun_starts_number_themselves", launchers_that_srun_starts_number_themselves),
    ];
    let kind = if is_possible { "" } else { "needs SLURM" };
    trials.into_iter().map(|trial| trial.with_kind(kind).with_ignored_flag(!is_possible)).collect()
}

/// Runs a shell script with two nodes of two cores each.
fn with_slurm(place: &Workplace, script: &str) -> Outcome {
    let cluster = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi/slurm/run");
    let binaries = std::path::Path::new(env!("CARGO_BIN_EXE_ulysses")).parent().unwrap();
    let script =
        format!("set -eu; export PATH={}:$PATH BATCH_FILE={BATCH_FILE}; {script}", binaries.display());
    // The timeout makes sure that no daemon is left running.
    Job::by(cluster, &["2", "2", "timeout", "200", "sh", "-c", &script]).within(&place.path(".")).run()
}

fn long_run(steps: usize) -> Workplace {
    let place = Workplace::new();
    place.write_config(
        "config.json",
        json!({ "checkpoint": { "interval": 1000 }, "ulysses": { "steps": steps } }),
    );
    place
}

fn a_slurm_batch_job_resumes_after_a_signal() {
    let place = long_run(STEPS);
    place.run(&["train", "config.json", "--mesh", "2x2", "--output", "threads"]).assert_done();
    // The same as `#SBATCH --signal` at the time limit.
    let outcome = with_slurm(&place, &[SUBMIT, r#"scancel --signal=USR1 "$job""#, AWAIT].concat());
    let job = &outcome.assert_done().stdout;
    assert!(job.contains("JobState=COMPLETED") && job.contains("Restarts=1"), "{outcome:?}");
    let log = place.read("log");
    assert_eq!(log.matches("mesh dp 2 × sp 2, ZeRO").count(), 2, "dp takes the nodes: {log}");
    assert_eq!(log.matches("resumed from out/step_").count(), 1, "{log}");
    let (threads, tasks) =
        (trained_metrics(&place, "threads/metrics.jsonl"), trained_metrics(&place, "out/metrics.jsonl"));
    assert_eq!(tasks.len(), STEPS);
    assert_eq!(tasks, threads);
}

fn a_killed_slurm_task_ends_the_job_and_is_named() {
    let place = long_run(1_000_000);
    let kill = r#"
        for process in /proc/[0-9]*; do
            [ "$(readlink $process/exe)" = "$(command -v ulysses)" ] || continue
            tr '\0' '\n' <$process/environ | grep -qx SLURM_PROCID=3 && kill -9 "${process#/proc/}"
        done
    "#;
    let outcome = with_slurm(&place, &[SUBMIT, kill, AWAIT].concat());
    let log = place.read("log");
    assert!(outcome.assert_done().stdout.contains("JobState=FAILED"), "{outcome:?}: {log}");
    assert!(log.contains("n2: task 3: Killed"), "{log}");
}

fn slurm_tasks_without_mpi_support_are_refused() {
    let place = long_run(1);
    let outcome = with_slurm(&place, "srun --mpi=none --ntasks=2 ulysses train config.json");
    outcome.assert_refused(2, &["srun started 2 processes", "`srun --mpi=pmix`"]);
    assert!(!place.path("out").exists(), "nothing was written");
}

fn launchers_that_srun_starts_number_themselves() {
    let place = Workplace::new();
    let launch = "srun --nodes=2 --ntasks-per-node=1 ulysses launch --nnodes 2 --rdzv-endpoint 127.0.0.1:29411 --nproc 2 \
                  --program sh -- -c 'echo $RANK of $WORLD_SIZE on $SLURMD_NODENAME'";
    let outcome = with_slurm(&place, &format!("export ULYSSES_JOB_SECRET=0123456789abcdef; {launch}"));
    let mut lines: Vec<&str> = outcome.assert_done().stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 0 of 4 on n1", "[1] 1 of 4 on n1", "[2] 2 of 4 on n2", "[3] 3 of 4 on n2"]);
}
