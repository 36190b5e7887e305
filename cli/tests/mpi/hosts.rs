//! Several hosts: network namespaces of this machine, connected by a bridge. `cli/tests/mpi/hosts/run` creates them.

use crate::job::{Job, Running};
use crate::support::cli::Workplace;
use crate::training::trained_metrics;
use crate::trial;
use libtest_mimic::Trial;
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Returns whether this machine allows network namespaces: that needs root and kernel support.
pub(crate) fn has_network_namespaces() -> bool {
    let may_make =
        Command::new("unshare").args(["--net", "--uts", "ip", "link", "add", "type", "veth"]).output();
    may_make.is_ok_and(|output| output.status.success())
}

/// The trials, if this machine allows network namespaces.
pub(crate) fn trials() -> Vec<Trial> {
    let is_possible = has_network_namespaces();
    let trials = [
        trial("training_on_two_hosts_matches_threads", training_on_two_hosts_matches_threads),
        trial("a_disconnected_host_ends_the_job_in_time", a_disconnected_host_ends_the_job_in_time),
    ];
    // Otherwise they are listed as ignored, with the reason in the name of the kind.
    let kind = if is_possible { "" } else { "needs network namespaces" };
    let trials = trials.into_iter().map(|trial| trial.with_kind(kind).with_ignored_flag(!is_possible));
    let has_slow_links = is_possible && has_slow_links();
    let kind = if has_slow_links { "" } else { "needs network namespaces and the kernel's sch_tbf" };
    let slow = trial("training_over_a_slow_link_matches_threads", training_over_a_slow_link_matches_threads);
    trials.chain([slow.with_kind(kind).with_ignored_flag(!has_slow_links)]).collect()
}

/// Returns whether this kernel can limit the rate of a link.
fn has_slow_links() -> bool {
    let limit = "ip link add va type veth peer name vb && tc qdisc add dev va root tbf rate 20mbit burst 16kb latency 400ms";
    let limited = Command::new("unshare").args(["--net", "sh", "-c", limit]).output();
    limited.is_ok_and(|output| output.status.success())
}

fn hosts(place: &Workplace, arguments: &[&str]) -> Job {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi/hosts/run");
    let binary = env!("CARGO_BIN_EXE_ulysses");
    Job::by(script, &[&["2", "2", binary, "train", "config.json"], arguments].concat())
        .within(&place.path("."))
}

fn training_on_two_hosts_matches_threads() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "zero_optimization": { "stage": 2 } }));
    place.run(&["train", "config.json", "--mesh", "2x2", "--output", "threads"]).assert_done();
    // Two hosts with two ranks each: the preset uses dp between hosts and sp within a host.
    let outcome = hosts(&place, &["--mesh", "ulysses"]).run();
    assert!(outcome.assert_done().stderr.contains("mesh dp 2 × sp 2"), "{outcome:?}");
    assert_eq!(
        trained_metrics(&place, "out/metrics.jsonl"),
        trained_metrics(&place, "threads/metrics.jsonl")
    );
}

/// Hosts send to each other at 20 Mbit/s, as a network may that others use too.
fn training_over_a_slow_link_matches_threads() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "zero_optimization": { "stage": 3 } }));
    place.run(&["train", "config.json", "--mesh", "2x2", "--output", "threads"]).assert_done();
    hosts(&place, &["--mesh", "2x2"]).with("LINK_RATE", Path::new("20mbit")).run().assert_done();
    assert_eq!(
        trained_metrics(&place, "out/metrics.jsonl"),
        trained_metrics(&place, "threads/metrics.jsonl")
    );
}

fn a_disconnected_host_ends_the_job_in_time() {
    let place = Workplace::new();
    let timeout = json!({ "ulysses": { "comm": { "timeout_seconds": 5 }, "steps": 1_000_000 } });
    place.write_config("config.json", timeout);
    let metrics = place.path("out/metrics.jsonl");
    let running = hosts(&place, &["--mesh", "2x2"]).with("CUT_AFTER", &metrics).start();
    let cut = wait_until_cut(&running);
    let outcome = running.wait();
    assert!(cut.elapsed() < Duration::from_secs(60), "took {:?}", cut.elapsed());
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    // Ranks 2 and 3 were on the disconnected host. Their output is lost, but they must not hang either.
    let named = |line: &str| line.contains("timed out") && (line.contains("[2") || line.contains("3]"));
    assert!(outcome.stderr.lines().any(named), "the missing ranks are named: {outcome:?}");
    let blamed = |line: &str| {
        line.contains("timed out")
            && ["[0", "[1"].iter().any(|rank| line.contains(&format!("rank(s) {rank}")))
    };
    assert!(!outcome.stderr.lines().any(blamed), "no waiting rank is named: {outcome:?}");
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
