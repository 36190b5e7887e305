//! Monitoring of a run: time breakdown, DeepSpeed's logs and profilers, event files, CSV, `run.json`.

use crate::support::cli::Workplace;
use serde_json::{Value, json};
use std::fs;
use ulysses::checkpoint::OutputLock;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn the_parts_of_a_step_add_up_to_its_time() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "mesh_param": [2, 2], "zero_optimization": { "stage": 2 } }));
    let outcome = place.run(&["train", "c.json"]);
    let line =
        outcome.assert_done().stderr.lines().find(|line| line.contains("4/4  loss")).unwrap().to_owned();
    for part in ["loss ", "lr ", "grad norm ", " tokens/s", " mem ", " MiB", "MFU "] {
        assert!(line.contains(part), "no {part} in {line}");
    }
    assert!(line.chars().count() <= 100, "{line}");
    for step in place.metrics("out/metrics.jsonl") {
        let sum = |keys: &[&str]| keys.iter().map(|key| number(&step[*key])).sum::<f64>();
        let all = number(&step["step_seconds"]);
        let by_kind = sum(&[
            "compute_seconds",
            "all_to_all_seconds",
            "dp_comm_seconds",
            "sp_comm_seconds",
            "data_seconds",
        ]);
        assert!((by_kind - all).abs() < 1e-9, "{step}");
        assert!(
            sum(&["forward_seconds", "backward_seconds", "update_seconds", "data_seconds"]) <= all,
            "{step}"
        );
        for key in
            ["all_to_all_seconds", "dp_comm_seconds", "sp_comm_seconds", "forward_seconds", "update_seconds"]
        {
            assert!(number(&step[key]) > 0.0, "{key} in {step}");
        }
        let exposed = number(&step["exposed_exchange_seconds"]);
        assert!(exposed > 0.0 && exposed < number(&step["all_to_all_seconds"]), "{step}");
        assert!(number(&step["gemm_share"]) > 0.0 && number(&step["model_flops_per_second"]) > 0.0, "{step}");
    }
}

#[test]
fn a_single_rank_spends_no_time_in_communication() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    place.run(&["train", "c.json"]).assert_done();
    for step in place.metrics("out/metrics.jsonl") {
        for key in [
            "all_to_all_seconds",
            "exposed_exchange_seconds",
            "ring_seconds",
            "exposed_ring_seconds",
            "pp_comm_seconds",
            "tp_comm_seconds",
            "dp_comm_seconds",
            "sp_comm_seconds",
        ] {
            assert_eq!(step[key], 0.0, "{key}");
        }
        assert_eq!(step["idle_seconds"], json!([0.0]));
    }
}

/// Words of the line that begins with `first`.
fn row<'a>(text: &'a str, first: &[&str]) -> Vec<&'a str> {
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.into_iter()
        .find(|words| words.starts_with(first))
        .unwrap_or_else(|| panic!("no {first:?} in {text}"))
}

#[test]
fn deepspeeds_logs_print_their_tables() {
    let place = Workplace::new();
    let changes = json!({
        "mesh_param": [2, 2],
        "zero_optimization": { "stage": 3 },
        "steps_per_print": 2,
        "wall_clock_breakdown": true,
        "comms_logger": { "enabled": true },
    });
    place.write_config("c.json", changes);
    let outcome = place.run(&["train", "c.json"]);
    let breakdowns = outcome.assert_done().stderr.matches("time (ms) | fwd_microstep: ").count();
    assert_eq!(breakdowns, 3, "steps 1, 2 and 4: {outcome:?}");
    assert!(!outcome.stderr.contains("has no effect"), "{outcome:?}");

    let text = &outcome.stdout;
    assert!(text.contains("algbw (GB/s)") && text.contains("busbw (GB/s)"), "{text}");
    // Four steps of one micro batch, with two exchanges in each pass of a layer.
    let exchanges: u64 = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|words| words.len() == 8 && words[0] == "all_to_all_strided" && words[7] != "%")
        .map(|words| words[3].parse::<u64>().unwrap())
        .sum();
    let record = place.read_json("out/run.json");
    let layers = record["model"]["config"]["num_hidden_layers"].as_u64().unwrap();
    assert_eq!(exchanges, 4 * layers * 4, "{text}");
    assert_eq!(row(text, &["all_gather", "dp"]).len(), 8);
    assert_eq!(row(text, &["Ulysses", "exchange"])[2], row(text, &["Ulysses", "exchange"])[3], "{text}");
    let volumes = record["communication"]["volumes"].as_array().unwrap();
    assert_eq!(volumes.len(), 3);
    for volume in volumes {
        assert!(number(&volume["sent_bytes"]) > 0.0, "{volume}");
        // Outside of steps, ranks compare data and replicas with a few numbers.
        let beside = number(&volume["sent_bytes"]) - number(&volume["planned_bytes"]);
        assert!((0.0..2000.0).contains(&beside), "{volume}");
    }
}

#[test]
fn the_communication_log_shows_the_selected_operations() {
    let place = Workplace::new();
    let logger = json!({ "enabled": true, "prof_all": false, "prof_ops": ["all_to_all_single"] });
    place.write_config("c.json", json!({ "mesh_param": [2, 2], "comms_logger": logger }));
    let text = place.run(&["train", "c.json"]).assert_done().stdout.clone();
    let (_, table) = text.split_once("collectives of rank 0").unwrap();
    assert!(table.contains("all_to_all_strided") && !table.contains("all_reduce"), "{table}");
    place.write_config("c.json", json!({ "comms_logger": { "prof_ops": [1] } }));
    place.run(&["train", "c.json"]).assert_refused(2, &["`comms_logger.prof_ops`", "an array of names"]);
}

#[test]
fn event_files_and_csv_go_where_the_config_says() {
    let place = Workplace::new();
    let changes = json!({
        "tensorboard": { "enabled": true, "output_path": "", "job_name": "board" },
        "csv_monitor": { "enabled": true, "output_path": "tables", "job_name": "job" },
    });
    place.write_config("c.json", changes);
    place.run(&["train", "c.json"]).assert_done();
    let files: Vec<_> = std::fs::read_dir(place.path("out/board")).unwrap().collect();
    assert_eq!(files.len(), 1);
    let losses = place.losses("out/metrics.jsonl");
    let expected: String =
        losses.iter().enumerate().map(|(index, loss)| format!("{},{loss}\n", 4 * (index + 1))).collect();
    assert_eq!(place.read("tables/job/Train_Samples_train_loss.csv"), format!("step,train_loss\n{expected}"));
    assert_eq!(place.read("tables/job/Train_Steps_grad_norm.csv").lines().count(), 5);
}

#[test]
fn run_json_records_environment_and_results() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "mesh_param": [1, 2] }));
    place.run(&["train", "c.json", "--seed", "7"]).assert_done();
    let record = place.read_json("out/run.json");
    assert_eq!(
        record["mesh"],
        json!({ "axes": ["dp", "sp"], "shape": [1, 2], "ranks": [0, 1], "shard_size": null, "zero_partition_axes": ["dp"] })
    );
    assert_eq!(record["given_config"]["train_batch_size"], 4);
    assert_eq!(record["totals"]["steps"], 4);
    assert_eq!(record["ranks"].as_array().unwrap().len(), 2);
    assert!(number(&record["ranks"][1]["peak_bytes"]) > 0.0, "{record}");
    assert!(number(&record["environment"]["cores"]) >= 1.0, "{record}");
    let command = record["command"].as_array().unwrap();
    assert!(command.contains(&json!("--seed")), "{record}");
}

#[test]
fn unwritable_paths_are_refused_before_anything_starts() {
    let offload = |device: &str, section: &str, stage: u8| json!({ "zero_optimization": { "stage": stage, section: { "device": device, "nvme_path": "text.txt/x" } } });
    let board =
        |section: &str| json!({ section: { "enabled": true, "output_path": "text.txt/x", "job_name": "j" } });
    for (changes, key, path) in [
        (board("tensorboard"), "`tensorboard.output_path`", "text.txt/x/j"),
        (board("csv_monitor"), "`csv_monitor.output_path`", "text.txt/x/j"),
        (
            offload("nvme", "offload_optimizer", 1),
            "`zero_optimization.offload_optimizer.nvme_path`",
            "text.txt/x",
        ),
        (offload("nvme", "offload_param", 3), "`zero_optimization.offload_param.nvme_path`", "text.txt/x"),
        (
            json!({
                "activation_checkpointing": { "cpu_checkpointing": true },
                "ulysses": { "activation_checkpointing": true, "offload_path": "text.txt/x" },
            }),
            "`ulysses.offload_path`",
            "text.txt/x",
        ),
    ] {
        let place = Workplace::new();
        place.write_config("c.json", changes);
        let outcome = place.run(&["train", "c.json", "--mesh", "2x1"]);
        outcome.assert_refused(2, &[key, path]);
        assert!(!outcome.stderr.contains("mesh dp"), "no rank has started: {outcome:?}");
        assert!(!place.path("out").exists(), "nothing is written: {outcome:?}");
    }
    let place = Workplace::new();
    place.write("out/board", "a file");
    place.write_config("c.json", json!({ "tensorboard": { "enabled": true, "job_name": "board" } }));
    place.run(&["train", "c.json"]).assert_refused(2, &["`tensorboard.job_name`", "out/board"]);
    assert!(!place.path("out/metrics.jsonl").exists());
}

#[test]
fn a_refused_run_leaves_no_directory() {
    let board = json!({ "enabled": true, "output_path": "boards", "job_name": "j" });
    for (changes, code, key) in [
        (
            json!({ "csv_monitor": { "enabled": true, "output_path": "text.txt/x" } }),
            2,
            "`csv_monitor.output_path`",
        ),
        (
            json!({ "csv_monitor": { "enabled": true, "job_name": "j".repeat(300) } }),
            2,
            "`csv_monitor.job_name`",
        ),
        (json!({ "ulysses": { "output": "text.txt" } }), 1, "text.txt: expected a directory, found a file"),
        (json!({ "ulysses": { "output": "text.txt/out" } }), 1, "output directory text.txt/out"),
    ] {
        let place = Workplace::new();
        place.write_config("c.json", changes);
        let mut config = place.read_json("c.json");
        config["tensorboard"] = board.clone();
        place.write("c.json", config.to_string());
        place.run(&["train", "c.json"]).assert_refused(code, &[key]);
        let left: Vec<_> =
            fs::read_dir(place.path("")).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "the config and the text: {left:?}");
    }
}

#[test]
fn a_run_on_a_locked_directory_leaves_no_files() {
    let place = Workplace::new();
    let board = json!({ "enabled": true, "output_path": "boards", "job_name": "j" });
    place.write_config("c.json", json!({ "tensorboard": board, "csv_monitor": { "enabled": true } }));
    fs::create_dir(place.path("out")).unwrap();
    let held = OutputLock::acquire(&place.path("out"), "job 17").unwrap();
    place.run(&["train", "c.json"]).assert_refused(1, &["out is in use by job 17"]);
    assert!(!place.path("boards").exists());
    assert_eq!(fs::read_dir(place.path("out")).unwrap().count(), 1, "the lock");
    drop(held);
    place.run(&["train", "c.json"]).assert_done();
    assert!(place.path("boards/j").exists());
}
