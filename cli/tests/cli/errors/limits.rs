//! System limits: memory, threads, file size. A command that hits a limit names it and ends with
//! exit code 1.

use crate::support::cli::{NO_THREADS, Outcome, Workplace};
use serde_json::json;

/// Runs the binary under a `ulimit`.
fn run_within(place: &Workplace, limit: &str, arguments: &[&str]) -> Outcome {
    let mut command = std::process::Command::new("sh");
    let program = env!("CARGO_BIN_EXE_ulysses");
    command.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\""), program]).args(arguments);
    place.run_command(command)
}

#[test]
fn threads_that_cannot_start_are_named() {
    let place = Workplace::new();
    place.write_config("text.json", json!({}));
    let refused = |arguments: &[&str], expected: &str| {
        place.run_with(arguments, &[NO_THREADS]).assert_refused(1, &[expected]);
    };
    refused(&["train", "text.json"], "cannot start the tokenization threads");
    refused(&["data", "prepare", "text.txt", "--output", "t.tok"], "cannot start the tokenization threads");
    refused(&["bench", "collectives", "--repeats", "1"], "cannot start the thread of rank 0");
    assert!(!place.path("t.tok").exists());
}

/// The binary alone takes tens of MiB of address space; below, the system's loader ends it (a signal or code 127).
#[test]
fn little_address_space_is_an_error() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "ulysses": { "model": "nano" } }));
    let run = |kib: u32| run_within(&place, &format!("-v {kib}"), &["plan", "c.json"]);
    let outcomes: Vec<Outcome> = (24_000..72_000).step_by(3000).map(run).collect();
    let started = outcomes.iter().filter(|outcome| !matches!(outcome.code, None | Some(127 | 139)));
    let (done, refused): (Vec<_>, Vec<_>) = started.partition(|outcome| outcome.code == Some(0));
    assert!(!done.is_empty() && !refused.is_empty(), "{outcomes:?}");
    for outcome in refused {
        outcome.assert_refused(1, &["error: "]);
        assert!(!outcome.stderr.contains("panicked"), "{outcome:?}");
    }
}

#[test]
fn large_numbers_are_refused_or_planned() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "ulysses": { "model": "nano" } }));
    for key in ["ulysses.head_chunks", "ulysses.threads_per_rank", "sequence_parallel_size"] {
        for number in [1_u64 << 31, 1 << 63, u64::MAX] {
            let set = format!("{key}={number}");
            place.run(&["plan", "c.json", "--set", &set]).assert_refused(2, &[&number.to_string()]);
        }
    }
    place.run(&["plan", "c.json", "--mesh", "131073x1"]).assert_refused(2, &["at most 131072 ranks"]);
}

#[test]
fn exhausted_memory_is_an_error() {
    let place = Workplace::new();
    let arguments = ["bench", "gemm", "--tokens", "65536", "--repeats", "1"];
    run_within(&place, "-v 500000", &arguments)
        .assert_refused(1, &["error: out of memory: a memory allocation of ", "`ulimit -v`"]);
}

#[test]
fn a_rank_out_of_memory_names_itself_the_part_and_the_plan() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "ulysses": { "model": "base", "seq_len": 8192, "steps": 1 } }));
    place.write("text.txt", "abcdefgh".repeat(4096));
    let outcome = run_within(&place, "-v 1200000", &["train", "config.json", "--mesh", "1x2"]);
    let expected = [
        "error: out of memory",
        "failed on thread rank-",
        "; planned peak: ",
        "warning: the planned memory exceeds",
    ];
    outcome.assert_refused(1, &expected);
    let parts = ["(parameters)", "(gradients)", "(optimizer)", "(activations)", "(exchange)", "(other)"];
    assert!(parts.iter().any(|part| outcome.stderr.contains(part)), "{outcome:?}");
}

#[test]
fn a_file_beyond_the_size_limit_is_named() {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "checkpoint": { "interval": 1 } }));
    let outgrown = |limit: &str, arguments: &[&str], file: &str| {
        run_within(&place, limit, arguments).assert_refused(1, &[file, "File too large"]);
    };
    outgrown("-f 64", &["train", "config.json", "--mesh", "1x2"], "step_00000001");
    outgrown("-f 1", &["data", "prepare", "text.txt", "--output", "t.tok"], "t.tok");
}
