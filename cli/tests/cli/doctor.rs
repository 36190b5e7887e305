//! `ulysses doctor`.

use crate::support::cli::Workplace;
use serde_json::{Value, json};

#[test]
fn a_working_machine_passes_and_every_collective_has_a_rate() {
    let place = Workplace::new();
    let outcome = place.run(&["doctor", "--ranks", "3", "--mib", "1", "--json"]);
    let report: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    assert_eq!(report["can_train"], true);
    let findings = report["findings"].as_array().unwrap();
    let find = |section: &str, name: &str| {
        let is_it = |f: &&Value| f["section"] == section && f["name"] == name;
        findings.iter().find(is_it).unwrap_or_else(|| panic!("no {section} {name} in {report:#}"))
    };
    for op in ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"] {
        let finding = find("collectives", op);
        assert_eq!(finding["state"], "ok");
        assert!(finding["value"].as_f64().is_some_and(|rate| rate > 0.0), "{finding}");
    }
    for name in ["Ulysses exchange", "send, recv", "split", "barrier"] {
        assert_eq!(find("collectives", name)["text"], "correct");
    }
    for (section, name) in
        [("CPU", "threads"), ("rates", "GEMM, f32"), ("rates", "memory copy"), ("disk", "write to .")]
    {
        assert!(find(section, name)["value"].as_f64().is_some_and(|value| value > 0.0), "{section} {name}");
    }
    let is_built = if cfg!(feature = "mpi") { "ok" } else { "absent" };
    assert_eq!(find("MPI", "feature mpi")["state"], is_built);
    let left: Vec<_> = std::fs::read_dir(place.path(".")).unwrap().collect();
    assert_eq!(left.len(), 1, "text.txt and nothing else: {left:?}");
}

#[test]
fn the_environment_selects_bf16_gemm_or_is_refused() {
    let place = Workplace::new();
    let run = |variable: &str, value: &str| {
        let arguments = ["doctor", "--ranks", "2", "--mib", "1"];
        place.run_with(&arguments, &[(variable, value)])
    };
    let old_name = run("ULYSSES_BF16_PRODUCTS", "f32");
    assert!(old_name.assert_done().stdout.contains("none (computed in f32)"), "{old_name:?}");
    run("ULYSSES_BF16_PRODUCTS", "half")
        .assert_refused(2, &["ULYSSES_BF16_PRODUCTS is `half`, expected `f32` or `auto`"]);
    place.write_config("c.json", json!({}));
    let resolved = place.run_with(&["config", "resolve", "c.json"], &[("ULYSSES_BF16_PRODUCTS", "f32")]);
    let note = "`ULYSSES_BF16_PRODUCTS` is deprecated: use `ULYSSES_BF16_GEMM`";
    assert!(resolved.assert_done().stderr.contains(note), "{resolved:?}");
    let run = |value: &str| run("ULYSSES_BF16_GEMM", value);
    let in_f32 = run("f32");
    assert!(in_f32.assert_done().stdout.contains("none (computed in f32)"), "{in_f32:?}");
    run("auto").assert_done();
    run("half").assert_refused(2, &["ULYSSES_BF16_GEMM is `half`, expected `f32` or `auto`"]);
}

#[test]
fn the_last_line_of_the_table_is_the_verdict() {
    let outcome = Workplace::new().run(&["doctor", "--ranks", "2", "--mib", "1"]);
    let lines: Vec<&str> = outcome.assert_done().stdout.lines().collect();
    assert!(lines.last().unwrap().starts_with("this machine can train"), "{lines:?}");
    for section in ["CPU", "memory", "MPI", "GPU", "rates", "disk", "collectives"] {
        assert!(lines.contains(&section), "{section} in {lines:?}");
    }
}

#[test]
fn an_unwritable_disk_fails_after_all_other_checks() {
    let outcome = Workplace::new().run(&["doctor", "--dir", "nowhere", "--ranks", "2", "--mib", "1"]);
    outcome.assert_refused(1, &["this machine cannot train, failed checks: disk write to nowhere"]);
    assert!(outcome.stdout.contains("✗ write to nowhere"), "{outcome:?}");
    assert!(outcome.stdout.contains("all_reduce           correct"), "{outcome:?}");
}
