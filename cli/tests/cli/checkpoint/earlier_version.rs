//! Files of an earlier version: `tests/fixtures/earlier_version`, whose README says how they were written.

use crate::support::cli::Workplace;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Largest difference to the losses that the earlier version computed. Its own on these two meshes differ by 3e-8.
const TOLERANCE: f64 = 1e-5;

/// A workplace with the earlier run: its inputs, and its output up to step 5 in `run`.
fn workplace() -> Workplace {
    let place = Workplace::new();
    let fixture = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/earlier_version");
    copy(&fixture, &place.path("."));
    place
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => fs::write(target, fs::read(entry.path()).unwrap()).unwrap(),
        }
    }
}

/// Returns every loss of training and evaluation from a step on, with its step.
fn losses(metrics: &[Value], first: u64) -> Vec<(u64, &'static str, f64)> {
    let of_line = |line: &Value| {
        let name = if line["eval_loss"].is_null() { "loss" } else { "eval_loss" };
        (line["step"].as_u64().unwrap(), name, line[name].as_f64().unwrap())
    };
    metrics.iter().map(of_line).filter(|(step, ..)| *step >= first).collect()
}

#[test]
fn a_run_of_an_earlier_version_continues_with_its_losses_on_any_mesh() {
    for (mesh, stage) in [([2, 1], 2), ([1, 2], 3), ([2, 2], 1)] {
        let place = workplace();
        let mut config = place.read_json("config.json");
        config["mesh_param"] = json!(mesh);
        config["zero_optimization"]["stage"] = json!(stage);
        place.write("config.json", config.to_string());
        let outcome = place.run(&["train", "config.json", "--steps", "10", "--resume"]);
        assert!(outcome.assert_done().stderr.contains("resumed from run/step_00000005"), "{outcome:?}");
        let metrics = place.metrics("run/metrics.jsonl");
        assert_eq!(metrics.len(), 12, "ten steps and two evaluations, in one file");
        let (got, expected) = (losses(&metrics, 6), losses(&place.metrics("continued/metrics.jsonl"), 6));
        assert_eq!((got.len(), expected.len()), (6, 6));
        for (got, expected) in got.iter().zip(&expected) {
            assert_eq!((got.0, got.1), (expected.0, expected.1));
            assert!((got.2 - expected.2).abs() <= TOLERANCE, "{mesh:?} stage {stage}: {got:?}, {expected:?}");
        }
    }
}

#[test]
fn a_checkpoint_of_an_earlier_version_is_verified_and_exported() {
    let place = workplace();
    place.run(&["checkpoint", "verify", "run"]).assert_done();
    // The model's weights are bf16, so its own dtype would round the trained ones.
    place.run(&["checkpoint", "export", "run", "--output", "exported", "--dtype", "f32"]).assert_done();
    let outcome = place.run(&["eval", "exported", "--data", "held_out.txt", "--seq-len", "64", "--json"]);
    let loss =
        serde_json::from_str::<Value>(&outcome.assert_done().stdout).unwrap()["loss"].as_f64().unwrap();
    let before = losses(&place.metrics("run/metrics.jsonl"), 5);
    let &(_, name, expected) = before.last().unwrap();
    assert_eq!(name, "eval_loss");
    assert!((loss - expected).abs() <= TOLERANCE, "{loss}, in training {expected}");
}

#[test]
fn a_run_of_an_earlier_version_is_reported() {
    let place = workplace();
    place.run(&["report", "run", "--output", "page.html"]).assert_done();
    let page = place.read("page.html");
    assert!(page.contains("<polyline") && !page.contains("NaN"), "{page}");
    for fact in ["dp 2 × sp 1", "5.31", "5.08", "held_out.txt", "WarmupCosineLR"] {
        assert!(page.contains(fact), "no {fact:?} in {page}");
    }
}

/// Checks that all values of `earlier` are in `current`.
fn assert_contains(current: &Value, earlier: &Value, path: &str) {
    match earlier.as_object() {
        Some(fields) => fields
            .iter()
            .for_each(|(key, value)| assert_contains(&current[key], value, &format!("{path}.{key}"))),
        None => assert_eq!(current, earlier, "{path}"),
    }
}

#[test]
fn a_config_that_an_earlier_version_resolved_resolves_to_the_same_values() {
    let place = workplace();
    for config in ["config.json", "run/config.json"] {
        let outcome = place.run(&["config", "resolve", config]);
        let current: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
        let mut earlier = place.read_json("run/config.json");
        // It has no effect any more.
        earlier.as_object_mut().unwrap().remove("flops_profiler").unwrap();
        assert_contains(&current, &earlier, config);
    }
}
