//! `run.json` and reports of resumed runs.

use crate::support::cli::{Outcome, Workplace};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Trains on four ranks up to a step and saves every second step.
fn train(place: &Workplace, steps: u64, arguments: &[&str]) -> Outcome {
    let changes = json!({
        "mesh_param": [2, 2],
        "checkpoint": { "interval": 2 },
        "comms_logger": { "enabled": true },
        "tensorboard": { "enabled": true },
    });
    place.write_config("c.json", changes);
    place.run(&[&["train", "c.json", "--steps", &steps.to_string()], arguments].concat())
}

/// Returns every file below a directory with its content, except the lock, which names its last owner.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if !path.ends_with(".lock") {
            found.insert(path.display().to_string(), fs::read(&path).unwrap());
        }
    }
    found
}

/// Returns a table row of the page.
fn row<'a>(page: &'a str, first: &str) -> &'a str {
    let start = format!("<tr><td>{first}");
    page.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no {first} in {page}"))
}

/// Returns the exchange's bytes by formula and as measured.
fn exchange(record: &Value) -> [u64; 2] {
    let volumes = record["communication"]["volumes"].as_array().unwrap();
    let volume = volumes.iter().find(|volume| volume["what"] == "Ulysses exchange").unwrap();
    ["planned_bytes", "sent_bytes"].map(|key| volume[key].as_u64().unwrap())
}

#[test]
fn a_run_with_nothing_to_do_does_not_change_its_files() {
    let place = Workplace::new();
    train(&place, 4, &[]).assert_done();
    let before = files(&place.path("out"));
    assert!(before.keys().any(|name| name.contains("events.out")), "{:?}", before.keys());
    for steps in [4, 3] {
        let outcome = train(&place, steps, &["--resume"]);
        let expected = format!("nothing to do: 4 steps are complete, {steps} are requested");
        assert!(outcome.assert_done().stdout.contains(&expected), "{outcome:?}");
        assert!(files(&place.path("out")) == before, "the files have changed");
    }
    place.run(&["report", "out"]).assert_done();
    assert!(place.read("out/report.html").contains("Ulysses exchange"));
}

#[test]
fn the_parts_of_a_resumed_run_add_up() {
    let place = Workplace::new();
    train(&place, 6, &["--output", "whole"]).assert_done();
    train(&place, 2, &[]).assert_done();
    train(&place, 4, &["--resume"]).assert_done();
    train(&place, 6, &["--resume"]).assert_done();
    let record = place.read_json("out/run.json");
    let parts: Vec<&Value> = record["earlier"].as_array().unwrap().iter().chain([&record]).collect();
    assert_eq!(parts.iter().map(|part| part["first_step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3, 5]);
    let sum = parts
        .iter()
        .map(|part| exchange(part))
        .fold([0, 0], |sum, part| [sum[0] + part[0], sum[1] + part[1]]);
    assert_eq!(sum, exchange(&place.read_json("whole/run.json")));
    let page = |name: &str| {
        place.run(&["report", name]).assert_done();
        place.read(&format!("{name}/report.html"))
    };
    let (whole, resumed) = (page("whole"), page("out"));
    assert_eq!(row(&resumed, "Ulysses exchange"), row(&whole, "Ulysses exchange"));
    // Ranks, size and number of calls; times differ between runs.
    let counted = |page: &str| row(page, "sp all_to_all").split("</td>").take(4).collect::<String>();
    assert_eq!(counted(&resumed), counted(&whole));
    for (part, steps) in ["1 to 2", "3 to 4", "5 to 6"].iter().enumerate() {
        let row = row(&resumed, &format!("{}: ", part + 1));
        assert!(row.contains(&format!("<td class=\"n\">{steps}</td>")), "{row}");
    }
    assert!(!whole.contains("Parts of the run"));
}

#[test]
fn the_formula_of_a_resumed_run_includes_evaluations() {
    let place = Workplace::new();
    let zero = json!({ "stage": 3 });
    let held_out = json!({ "validation": { "fraction": 0.1, "eval_interval": 3, "eval_batches": 1 } });
    let changes = |ulysses: &Value| json!({ "mesh_param": [2, 2], "zero_optimization": zero, "checkpoint": {}, "ulysses": ulysses });
    place.write_config("c.json", changes(&held_out));
    for steps in ["4", "6"] {
        place.run(&["train", "c.json", "--steps", steps, "--resume"]).assert_done();
        let record = place.read_json("out/run.json");
        let [planned, sent] = exchange(&record);
        assert_eq!(planned, sent, "up to step {steps}");
        let parameters = record["communication"]["volumes"].as_array().unwrap();
        let parameters =
            parameters.iter().find(|volume| volume["what"].as_str().unwrap().starts_with("ZeRO")).unwrap();
        let [planned, sent] = ["planned_bytes", "sent_bytes"].map(|key| parameters[key].as_f64().unwrap());
        assert!((sent / planned - 1.0).abs() < 1e-3, "{sent} of {planned} planned bytes");
    }
}

/// Starts an endless run and kills it after `steps` steps.
fn kill_after(place: &Workplace, steps: usize) {
    let mut command = place.command(&["train", "c.json", "--steps", "1000000000", "--resume"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::read_to_string(place.path("out/metrics.jsonl")).unwrap_or_default().lines().count() < steps {
        assert!(Instant::now() < deadline, "the run does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_part_keeps_the_records_of_earlier_parts() {
    let place = Workplace::new();
    train(&place, 4, &[]).assert_done();
    let first = place.read_json("out/run.json");
    kill_after(&place, 7);
    place.run(&["report", "out"]).assert_done();
    assert!(place.read("out/report.html").contains("1 of 2 parts did not finish"));
    let killed = place.metrics("out/metrics.jsonl").len() as u64;
    train(&place, killed + 2, &["--resume"]).assert_done();
    let record = place.read_json("out/run.json");
    let earlier = record["earlier"].as_array().unwrap();
    assert_eq!(exchange(&earlier[0]), exchange(&first));
    assert_eq!((earlier.len(), &earlier[1]["first_step"]), (2, &json!(5)));
    assert!(earlier[1]["totals"].is_null() && record["totals"]["steps"].as_u64() > Some(0), "{record}");
    place.run(&["report", "out"]).assert_done();
    assert!(place.read("out/report.html").contains("from 5, not finished"));
}

#[test]
fn files_of_another_run_are_renamed() {
    let place = Workplace::new();
    train(&place, 4, &[]).assert_done();
    // Without checkpoints, so that the directory is accepted.
    place.write_config("other.json", json!({ "seed": 5, "ulysses": { "output": "other" } }));
    place.run(&["train", "other.json"]).assert_done();
    let metrics = place.read("other/metrics.jsonl");
    train(&place, 6, &["--output", "other", "--resume=out"]).assert_done();
    assert_eq!(place.read("other/metrics.1.jsonl"), metrics);
    let steps: Vec<_> =
        place.metrics("other/metrics.jsonl").iter().map(|line| line["step"].clone()).collect();
    assert_eq!(steps, [5, 6]);
    assert!(place.read_json("other/run.json")["earlier"].is_null());
    // Without any checkpoint to resume from, the run starts from the beginning.
    place.write_config("other.json", json!({ "ulysses": { "output": "third" } }));
    place.run(&["train", "other.json"]).assert_done();
    let metrics = place.read("third/metrics.jsonl");
    place.run(&["train", "other.json", "--resume"]).assert_done();
    assert_eq!(place.read("third/metrics.1.jsonl"), metrics);
}

#[test]
fn a_damaged_record_is_renamed_and_the_run_continues() {
    let place = Workplace::new();
    train(&place, 2, &[]).assert_done();
    place.write("out/run.json", "{\"version\": \"0.1");
    let outcome = train(&place, 4, &["--resume"]);
    assert!(outcome.assert_done().stderr.contains("out/run.json: damaged"), "{outcome:?}");
    assert_eq!(place.read("out/run.1.json"), "{\"version\": \"0.1");
    assert_eq!(place.metrics("out/metrics.jsonl").len(), 4);
    assert!(place.read_json("out/run.json")["totals"]["steps"] == 2);
}
