//! `ulysses report`.

use crate::support::cli::Workplace;
use serde_json::json;
use std::fs;

/// Returns the row of a key in the table of settings.
fn setting<'a>(page: &'a str, key: &str) -> &'a str {
    let cell = format!("<code>{}</code>", key.replace('_', "_<wbr>"));
    page.lines().find(|line| line.contains(&cell)).unwrap_or_else(|| panic!("no {key} in {page}"))
}

/// Checks that every element is closed in order, except void elements.
fn assert_well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    for tag in page.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
        let name = tag.split([' ', '/', '\n']).find(|word| !word.is_empty()).unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "</{name}> closes another");
        } else if !tag.ends_with('/') && !["!DOCTYPE", "meta", "wbr"].contains(&name) {
            open.push(name);
        }
    }
    assert_eq!(open, Vec::<&str>::new());
}

#[test]
fn a_page_of_two_runs_is_self_contained_and_shares_charts() {
    let place = Workplace::new();
    let changes = json!({ "mesh_param": [2, 2], "comms_logger": { "enabled": true }, "ulysses": { "validation": { "fraction": 0.1 } } });
    place.write_config("c.json", changes);
    place.run(&["train", "c.json"]).assert_done();
    place.run(&["train", "c.json", "--seed", "5", "--output", "a<b"]).assert_done();
    let outcome = place.run(&["report", "out", "a<b", "--output", "page.html"]);
    assert!(outcome.assert_done().stderr.contains("page.html"), "{outcome:?}");
    let page = place.read("page.html");
    assert_well_formed(&page);
    for foreign in ["http:", "https:", "<script", "src=", "url(", "@import", "NaN", "a<b"] {
        assert!(!page.contains(foreign), "{foreign} in the page");
    }
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("width=device-width"));
    // Loss, tokens/s, label tokens/s, norm, learning rate, MFU and memory of two runs; evaluation losses are dots.
    let (curves, of_runs) = page.split_once("<h2>").unwrap();
    assert_eq!(curves.matches("<polyline").count(), 7 * 2);
    assert_eq!(page.matches("<circle").count(), 2);
    // Per run: the measured peak, and the plan over the measured memory.
    assert_eq!(of_runs.matches("<polyline").count(), (1 + 1) * 2);
    // Step time by activity (rings, tp and stages among them) and by phase, planned and measured memory.
    assert_eq!(of_runs.matches("<polygon").count(), (8 + 4 + 6 + 6) * 2);
    assert_eq!(
        of_runs.matches("the optimizer step, measured in step 2").count(),
        2 * 2,
        "a title and a label each"
    );
    assert_eq!(of_runs.matches("measured peak, rank 0").count(), 2);
    for part in [
        "a&lt;b, evaluation",
        "Peak memory of each rank",
        "Mesh dp 2 × sp 2",
        "Ulysses exchange",
        "slowest rank",
        "backward, with recomputation",
        "Bytes sent per rank, by axis and operation",
        "Bytes stored per rank between steps",
        "Waiting for data: ",
    ] {
        assert!(page.contains(part), "no {part:?}");
    }
    let (first, second) = page.split_once("<h2>a&lt;b</h2>").unwrap();
    assert!(setting(first, "train_batch_size").contains(">file<"));
    assert!(setting(first, "seed").contains(">default<") && setting(second, "seed").contains(">flag<"));
}

#[test]
fn a_run_with_only_metrics_is_reported() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    place.run(&["train", "c.json"]).assert_done();
    for name in ["config.json", "run.json"] {
        fs::remove_file(place.path("out").join(name)).unwrap();
    }
    let metrics = place.read("out/metrics.jsonl");
    place.write("out/metrics.jsonl", format!("{metrics}{{\"step\": 5, \"lo"));
    let outcome = place.run(&["report", "out"]);
    let expected = "note: out/metrics.jsonl:5: skipped an incomplete line";
    assert!(outcome.assert_done().stderr.contains(expected), "{outcome:?}");
    let page = place.read("out/report.html");
    assert_well_formed(&page);
    assert!(page.contains("<polyline") && !page.contains("NaN"));
}

#[test]
fn the_page_shows_bytes_per_rank_next_to_formulas() {
    let place = Workplace::new();
    let optimizer = json!({ "type": "AdamW", "params": { "lr": 1e-3 } });
    let changes =
        json!({ "mesh_param": [1, 2], "zero_optimization": { "stage": 1 }, "optimizer": optimizer });
    place.write_config("c.json", changes);
    place.run(&["train", "c.json"]).assert_done();
    let record = place.read_json("out/run.json");
    for rank in record["ranks"].as_array().unwrap() {
        let (sent, formula) = (&rank["sent_bytes"], &rank["formula_bytes"]);
        assert_eq!(sent["sp all_to_all_strided"], formula["exchange"], "{rank}");
        let stored = rank["held_bytes"]["parameters"].as_f64().unwrap();
        let ratio = stored / formula["parameters"].as_f64().unwrap();
        assert!((1.0..1.1).contains(&ratio), "{rank}");
    }
    place.run(&["report", "out"]).assert_done();
    let page = place.read("out/report.html");
    assert_well_formed(&page);
    assert!(page.contains("ZeRO stage 1 has 1 partition, because dp is 1"), "{page}");
    assert!(setting(&page, "optimizer.<wbr>type").contains("<code>AdamW</code>"));
    // Records of earlier versions have neither formulas nor sent bytes.
    let mut earlier = record;
    for rank in earlier["ranks"].as_array_mut().unwrap() {
        rank.as_object_mut()
            .unwrap()
            .retain(|key, _| !["sent_bytes", "formula_bytes"].contains(&key.as_str()));
    }
    place.write("out/run.json", earlier.to_string());
    place.run(&["report", "out"]).assert_done();
    let page = place.read("out/report.html");
    assert_well_formed(&page);
    assert!(
        page.contains("Bytes per rank at the peak") && !page.contains("Bytes sent per rank, by axis"),
        "{page}"
    );
}

#[test]
fn metrics_of_an_earlier_version_are_reported_as_tokens_with_labels() {
    let place = Workplace::new();
    let line = |step: u64| json!({ "step": step, "loss": 2.0, "tokens": 90, "tokens_per_second": 45.0, "step_seconds": 2.0 });
    place.write("run/metrics.jsonl", format!("{}\n{}\n", line(1), line(2)));
    place.run(&["report", "run"]).assert_done();
    let page = place.read("run/report.html");
    assert_well_formed(&page);
    assert!(page.contains("<span>mean tokens/s</span><b>–</b>"), "{page}");
    assert!(page.contains("<span>mean label tokens/s</span><b>45</b>"), "{page}");
    assert!(page.contains("Label tokens per second") && !page.contains("<figcaption>Tokens per second"));
}

#[test]
fn an_invalid_record_or_config_is_refused_by_name() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    place.run(&["train", "c.json"]).assert_done();
    for name in ["out/config.json", "out/run.json"] {
        let sound = place.read(name);
        for (text, fault) in [("[1]", "expected a JSON object"), ("{", "EOF while parsing")] {
            place.write(name, text);
            place.run(&["report", "out"]).assert_refused(2, &[name, fault]);
        }
        place.write(name, sound);
    }
    place.run(&["report", "out"]).assert_done();
}

#[test]
fn the_measured_memory_of_a_step_is_recorded_by_part() {
    let place = Workplace::new();
    let changes = json!({
        "mesh_param": [1, 2], "gradient_accumulation_steps": 2, "train_batch_size": 2,
        "ulysses": { "steps": 5, "seq_len": 64, "seq_len_schedule": [[2, 2048], [4, 32]] },
    });
    place.write_config("c.json", changes);
    place.run(&["train", "c.json"]).assert_done();
    let record = place.read_json("out/run.json");
    let watched = record["memory_over_step"].as_array().unwrap();
    assert_eq!(watched.len(), 2, "the ranks of one sp group");
    let metrics = place.metrics("out/metrics.jsonl");
    for (rank, watched) in watched.iter().enumerate() {
        // The second step with the longest sequences.
        assert_eq!([&watched["rank"], &watched["step"], &watched["seq_len"]], [rank, 4, 2048]);
        let parts = watched["parts"].as_array().unwrap();
        let names: Vec<&str> = parts.iter().map(|part| part["at"].as_str().unwrap()).collect();
        let expected = [
            "embedding",
            "forward of layer 0",
            "forward of layer 1",
            "LM head and loss",
            "backward of layer 1",
            "backward of layer 0",
            "embedding backward",
            "optimizer step",
        ];
        assert_eq!(names, expected, "of the last micro batch");
        let most = parts.iter().map(|part| part["bytes"].as_u64().unwrap()).max().unwrap();
        if rank == 0 {
            let peak = metrics[3]["peak_memory_bytes"].as_u64().unwrap();
            // Both micro batches and both steps hold the same, except for prefetched data and new allocations.
            assert!(most <= peak && peak - most < peak / 100, "{most} of {peak}");
        }
    }
    place.run(&["report", "out"]).assert_done();
    let page = place.read("out/report.html");
    assert_well_formed(&page);
    assert!(page.contains("measured in step 4") && page.contains("planned peak"), "{page}");
}

#[test]
fn a_plan_is_written_as_a_page() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "mesh_param": [2, 4], "train_batch_size": 2 }));
    let arguments = ["plan", "c.json", "--model", "llama3-8b", "--seq-len", "65536", "--memory-gib", "80"];
    place.run(&[&arguments[..], &["--html", "plan.html"]].concat()).assert_done();
    let page = place.read("plan.html");
    assert_well_formed(&page);
    assert_eq!(page.matches("<polygon").count(), 6, "an area for each category");
    let rows = ["<tr><td>2 × 4</td>", "<tr><td>sp 8 (twice the ranks)</td>"];
    for part in ["llama3-8b on dp 2 × sp 4", "activations", "optimizer", "80 GiB"].into_iter().chain(rows) {
        assert!(page.contains(part), "no {part:?}");
    }
}

#[test]
fn invalid_run_directories_are_refused_by_name() {
    let place = Workplace::new();
    place.run(&["report", "nothing"]).assert_refused(2, &["nothing", "expected an output directory"]);
    place.write("empty/a.txt", "");
    place.run(&["report", "empty"]).assert_refused(2, &["empty/metrics.jsonl"]);
    place.write("damaged/metrics.jsonl", "{\"step\":1,\"loss\":2.0}\n{]\n{\"step\":2,\"loss\":2.0}\n");
    place.run(&["report", "damaged"]).assert_refused(2, &["damaged/metrics.jsonl:2:2: not valid JSON"]);
    let expected = ["damaged/metrics.jsonl: expected an output directory"];
    place.run(&["report", "damaged/metrics.jsonl"]).assert_refused(2, &expected);
}

#[test]
fn invalid_metrics_are_refused_with_their_line() {
    let place = Workplace::new();
    let report = |second: &str| {
        place.write("run/metrics.jsonl", format!("{{\"step\":1,\"loss\":-1e100}}\n{second}\n"));
        place.run(&["report", "run"])
    };
    report("{\"step\":-1,\"loss\":2}").assert_refused(2, &["error: run/metrics.jsonl:2: `step`", "found -1"]);
    report("{\"step\":2,\"loss\":1e308}").assert_refused(2, &["error: run/metrics.jsonl:2: `loss`"]);
    report("{\"step\":2,\"loss\":1e100}").assert_done();
    let page = place.read("run/report.html");
    assert_well_formed(&page);
    assert!(page.contains("<polyline") && !page.contains("NaN") && !page.contains("inf"), "{page}");
}
