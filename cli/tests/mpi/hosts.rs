//! Several hosts: network namespaces of this machine, joined by a bridge. `cli/tests/mpi/hosts/run` makes them.

use crate::job::{Job, Running};
use crate::support::cli::Workplace;
use crate::training::learnt;
use crate::trial;
use libtest_mimic::Trial;
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};

/// The trials, where this machine may make network namespaces: that takes root, and a kernel that has them.
pub(crate) fn trials() -> Vec<Trial> {
    let may_make =
        Command::new("unshare").args(["--net", "--uts", "ip", "link", "add", "type", "veth"]).output();
    let is_possible = may_make.is_ok_and(|output| output.status.success());
    let trials = [
        trial("training_on_two_hosts_is_what_threads_do", training_on_two_hosts_is_what_threads_do),
        trial("a_host_that_is_cut_off_ends_all_in_time", a_host_that_is_cut_off_ends_all_in_time),
    ];
    // Listed as ignored, with the reason in the name of the kind, where they cannot run.
    let kind = if is_possible { "" } else { "needs network namespaces" };
    trials.into_iter().map(|trial| trial.with_kind(kind).with_ignored_flag(!is_possible)).collect()
}

fn hosts(place: &Workplace, arguments: &[&str]) -> Job {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi/hosts/run");
    let binary = env!("CARGO_BIN_EXE_ulysses");
    Job::by(script, &[&["2", "2", binary, "train", "config.json"], arguments].concat())
        .within(&place.path("."))
}

fn training_on_two_hosts_is_what_threads_do() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "zero_optimization": { "stage": 2 } }));
    place.run(&["train", "config.json", "--mesh", "2x2", "--output", "threads"]).assert_done();
    // Two hosts of two: the preset takes dp from the hosts and sp from the ranks on each.
    let outcome = hosts(&place, &["--mesh", "ulysses"]).run();
    assert!(outcome.assert_done().stderr.contains("mesh dp 2 × sp 2"), "{outcome:?}");
    assert_eq!(learnt(&place, "out/metrics.jsonl"), learnt(&place, "threads/metrics.jsonl"));
}

fn a_host_that_is_cut_off_ends_all_in_time() {
    let place = Workplace::new();
    let timeout = json!({ "ulysses": { "comm": { "timeout_seconds": 5 }, "steps": 1_000_000 } });
    place.write_config("config.json", timeout);
    let metrics = place.path("out/metrics.jsonl");
    let running = hosts(&place, &["--mesh", "2x2"]).with("CUT_AFTER", &metrics).start();
    let cut = wait_until_cut(&running);
    let outcome = running.wait();
    assert!(cut.elapsed() < Duration::from_secs(60), "took {:?}", cut.elapsed());
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    // Ranks 2 and 3 were on the host that was cut off. What it says arrives nowhere, but it does not hang either.
    let named = |line: &str| line.contains("timed out") && (line.contains("[2") || line.contains("3]"));
    assert!(outcome.stderr.lines().any(named), "the absent ranks are named: {outcome:?}");
    let blamed = |line: &str| {
        line.contains("timed out")
            && ["[0", "[1"].iter().any(|rank| line.contains(&format!("rank(s) {rank}")))
    };
    assert!(!outcome.stderr.lines().any(blamed), "and no rank that waits itself: {outcome:?}");
    assert!(outcome.stderr.contains("; last operations of rank "), "{outcome:?}");
}

fn wait_until_cut(running: &Running) -> Instant {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !running.text("stderr").contains("is cut off") {
        assert!(Instant::now() < deadline, "no step: {}", running.text("stderr"));
        std::thread::sleep(Duration::from_millis(20));
    }
    Instant::now()
}
