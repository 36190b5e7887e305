//! Training, evaluation, plans and restarts' records on the axis pp.

use crate::golden;
use crate::support::cli::Workplace;
use serde_json::{Value, json};

#[test]
fn every_axis_at_once_trains_evaluates_and_records_its_mesh() {
    let place = Workplace::new();
    let micro_batches =
        json!({ "train_batch_size": 4, "gradient_accumulation_steps": 2, "ulysses": { "steps": 2 } });
    place.write_config("c.json", micro_batches);
    let train = |mesh: &str, output: &str| {
        let outcome = place.run(&["train", "c.json", "--mesh", mesh, "--output", output]);
        (outcome.assert_done().stderr.clone(), place.losses(&format!("{output}/metrics.jsonl")))
    };
    let (_, alone) = train("2x1", "alone");
    let (log, staged) = train("pp=2,dp=2,sp=2,tp=2", "staged");
    assert!(log.contains("mesh pp 2 × dp 2 × sp 2 × tp 2, "), "{log}");
    assert_eq!((alone.len(), staged.len()), (2, 2));
    for (alone, staged) in alone.iter().zip(&staged) {
        assert!((alone - staged).abs() < 1e-5 * alone, "{alone} on 2 ranks, {staged} on 16");
    }
    let record = place.read_json("staged/run.json");
    assert_eq!(record["mesh"]["axes"], json!(["pp", "dp", "sp", "tp"]));
    assert_eq!(record["ranks"].as_array().map(Vec::len), Some(16));
    let metrics = place.metrics("staged/metrics.jsonl");
    let sizes = ["pp", "dp", "sp", "tp"].map(|axis| metrics[0][format!("{axis}_size")].as_u64());
    assert_eq!(sizes, [Some(2); 4]);
    assert_eq!(place.metrics("alone/metrics.jsonl")[0].get("pp_size"), None);
    // Layers as stated, from the config.
    let stages = json!({ "pipeline_parallel_size": 2, "gradient_accumulation_steps": 2, "train_batch_size": 4,
        "ulysses": { "steps": 1, "pipeline": { "schedule": "gpipe", "layers_per_stage": [1, 2] } } });
    place.write_config("other.json", stages);
    let refused = place.run(&["train", "other.json"]);
    refused
        .assert_refused(2, &["`ulysses.pipeline.layers_per_stage` has 3 layers in all, but the model has 2"]);
    let batch = golden("tiny_strong", "inputs.safetensors");
    for command in [
        &["train", "c.json"][..],
        &["plan", "c.json"],
        &["eval", "nano", "--data", "text.txt"],
        &["verify", "--model", "nano", "--batch", &batch],
    ] {
        let many = place.run(&[command, &["--mesh", "pp=3"]].concat());
        many.assert_refused(2, &["pp is 3", "expected at most 2 stages"]);
    }
}

#[test]
fn stages_are_planned_and_stay_in_suggested_meshes() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "train_batch_size": 32, "gradient_accumulation_steps": 8 }));
    let plan = |mesh: &str| -> Value {
        let outcome = place.run(&[
            "plan",
            "c.json",
            "--model",
            "llama3-8b",
            "--seq-len",
            "4096",
            "--mesh",
            mesh,
            "--json",
        ]);
        serde_json::from_str(&outcome.assert_done().stdout).unwrap()
    };
    let (whole, staged) = (plan("2x2"), plan("pp=4,dp=2,sp=2"));
    assert_eq!(whole.get("pipeline"), None);
    assert_eq!((&staged["mesh"]["pp"], &staged["mesh"]["ranks"]), (&json!(4), &json!(16)));
    let stages = staged["pipeline"]["stages"].as_array().unwrap();
    let layers: Vec<&Value> = stages.iter().map(|stage| &stage["layers"]).collect();
    // The head has as many FLOPs as three layers.
    assert_eq!(layers, [&json!([0, 9]), &json!([9, 18]), &json!([18, 26]), &json!([26, 32])]);
    // Three of the eleven turns in which a stage has nothing to do.
    assert!((staged["pipeline"]["bubble"].as_f64().unwrap() - 3.0 / 11.0).abs() < 1e-12);
    let bytes = |value: &Value| value.as_u64().unwrap();
    let largest = stages.iter().map(|stage| bytes(&stage["peak_bytes"])).max();
    assert_eq!(largest, Some(bytes(&staged["rank"]["peak_bytes"])));
    let persistent: Vec<f64> = stages.iter().map(|stage| bytes(&stage["persistent_bytes"]) as f64).collect();
    // Together as much as one rank without stages.
    let share = persistent.iter().sum::<f64>() / bytes(&whole["rank"]["persistent_bytes"]) as f64;
    assert!((0.99..1.01).contains(&share), "{share}");
    // Of 8 micro batches of 2 sequences, a rank of sp sends its half of the hidden states, in f32.
    let sent = &staged["rank"]["sent_by_purpose"]["pass_activations"];
    let of_direction = 8 * 2 * (4096 / 2) * 4096 * 4;
    let sent = bytes(&sent["intra_node_bytes"]) + bytes(&sent["inter_node_bytes"]);
    assert!([of_direction, 2 * of_direction].contains(&sent), "{sent} and {of_direction}");
    let meshes = staged["meshes"].as_array().unwrap();
    assert!(meshes.len() > 1 && meshes.iter().all(|mesh| mesh["pp"] == 4), "{meshes:?}");
    for (schedule, parts) in [
        ("1f1b", ["mesh    pp 4 × dp 2 × sp 2, ", "schedule 1f1b: 27.3 %", "26 to 31", "passes (B)"]),
        ("zero_bubble", ["schedule zero_bubble: 11.1 %", "W: of weights", "rank 0   F0 F1", " I1 W0 "]),
    ] {
        let schedule = format!("ulysses.pipeline.schedule={schedule}");
        let flags =
            ["--model", "llama3-8b", "--seq-len", "4096", "--mesh", "pp=4,dp=2,sp=2", "--set", &schedule];
        let text = place.run(&[&["plan", "c.json"], &flags[..]].concat());
        for part in parts {
            assert!(text.assert_done().stdout.contains(part), "{part}: {}", text.stdout);
        }
    }
}

#[test]
fn verify_says_which_sizes_of_the_config_it_replaces() {
    let place = Workplace::new();
    place.write("c.json", r#"{ "pipeline_parallel_size": 2, "tensor_parallel_size": 2 }"#);
    let batch = golden("tiny_strong", "inputs.safetensors");
    let flags = ["verify", "--model", "nano", "--batch", &batch, "--config", "c.json", "--mesh"];
    let outcome = place.run(&[&flags[..], &["1x2"]].concat());
    for axis in ["pp", "tp"] {
        let expected = format!("--mesh sets {axis} 1 instead of 2 by `");
        assert!(outcome.assert_done().stdout.contains(&expected), "{}", outcome.stdout);
    }
    let same = place.run(&[&flags[..], &["pp=2,dp=1,sp=2,tp=2"]].concat());
    assert!(!same.assert_done().stdout.contains("instead of"), "{}", same.stdout);
}
