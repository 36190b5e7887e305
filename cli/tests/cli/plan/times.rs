//! `ulysses plan --machine`: step time of the config, of every change and of every mesh.

use super::{plan, workplace};
use serde_json::{Value, json};

/// A machine profile whose rates are all equal.
fn machine(rate: f64) -> Value {
    let link = json!({
        "latency_seconds": 0.0, "all_to_all_bytes_per_second": rate, "all_reduce_bytes_per_second": rate,
        "reduce_scatter_bytes_per_second": rate, "all_gather_bytes_per_second": rate,
    });
    json!({
        "version": 1, "name": "a paper machine", "origin": "a test", "ranks_per_node": 2,
        "rates": { "f32": {
            "peak_flops_per_second": 2.0 * rate, "product_flops_per_second": rate,
            "attention_forward_flops_per_second": rate, "attention_backward_flops_per_second": rate,
            "elementwise_bytes_per_second": rate,
        } },
        "update_bytes_per_second": rate, "overlaps_communication": false,
        "links": { "intra_node": link, "inter_node": link },
    })
}

#[test]
fn with_a_machine_the_step_time_is_predicted() {
    let place = workplace(json!({}));
    place.write("m.json", machine(1e9).to_string());
    place.write("fast.json", machine(4e9).to_string());
    let arguments = ["config.json", "--model", "nano", "--mesh", "2x2", "--machine"];
    let text = place.run(&[&["plan"], &arguments[..], &["m.json", "--html", "plan.html"]].concat());
    text.assert_done();
    assert!(text.stdout.contains("predicted step time on a paper machine"), "{}", text.stdout);
    assert!(place.read("plan.html").contains("Predicted step time on a paper machine"));
    let of = |file: &str| plan(&place, &[&arguments[..], &[file]].concat());
    let (slow, fast) = (of("m.json"), of("fast.json"));
    assert_eq!(slow["mesh"]["ranks_per_node"], 2);
    let number = |plan: &Value, key: &str| plan["step_time"][key].as_f64().unwrap();
    let parts = ["products", "attention", "elementwise", "exchange", "zero", "update", "file"];
    let seconds = parts.iter().map(|part| number(&slow, &format!("{part}_seconds"))).sum::<f64>();
    assert!((seconds / number(&slow, "total_seconds") - 1.0).abs() < 1e-12);
    // Four times the rates give a quarter of the time and the same MFU.
    assert!((number(&slow, "total_seconds") / number(&fast, "total_seconds") - 4.0).abs() < 1e-9);
    assert!((number(&slow, "mfu") / number(&fast, "mfu") - 1.0).abs() < 1e-9);
    assert!((0.05..0.5).contains(&number(&slow, "mfu")), "{}", slow["step_time"]);
    // Without a machine there are no times.
    assert_eq!(plan(&place, &arguments[..5]).get("step_time"), None);
}

#[test]
fn a_search_with_a_machine_sorts_settings_by_step_time() {
    let place = workplace(json!({ "train_batch_size": 4, "ulysses": { "model": null } }));
    place.write("m.json", machine(1e9).to_string());
    let search =
        ["changed.json", "--model", "nano", "--ranks", "4", "--seq-len", "512", "--fit", "--memory-gib", "1"];
    let with = |machine: &[&str]| plan(&place, &[&search[..], machine].concat());
    let timed = with(&["--machine", "m.json"]);
    let seconds = |choice: &Value| choice["step_seconds"].as_f64().unwrap();
    let seconds: Vec<f64> = timed["choices"].as_array().unwrap().iter().map(seconds).collect();
    assert!(seconds.len() > 1 && seconds.is_sorted() && seconds[0] < *seconds.last().unwrap(), "{seconds:?}");
    // Without a machine there are no times, and bytes decide.
    assert_eq!(with(&[])["choices"][0].get("step_seconds"), None);
}

#[test]
fn an_invalid_or_incomplete_machine_profile_is_refused_by_name() {
    let place = workplace(json!({ "bf16": { "enabled": true } }));
    let mut damaged = machine(1e9);
    damaged["links"]["intra_node"]["all_gather_bytes_per_second"] = json!(0);
    damaged["rate"] = json!(1);
    place.write("damaged.json", damaged.to_string());
    place.write("m.json", machine(1e9).to_string());
    let refused = |config: &str, file: &str, names: &[&str]| {
        let arguments = ["plan", config, "--model", "nano", "--machine", file];
        place.run(&arguments).assert_refused(2, names);
    };
    let faults = [
        "--machine",
        "damaged.json:1:",
        "links.intra_node.all_gather_bytes_per_second",
        "unknown key `rate`",
    ];
    refused("config.json", "damaged.json", &faults);
    refused("config.json", "nowhere.json", &["--machine", "cannot read the machine profile nowhere.json"]);
    refused("changed.json", "m.json", &["a paper machine", "rates.bf16"]);
}

/// Returns the line of the text that begins with these words.
fn line<'a>(text: &'a str, first: &str) -> &'a str {
    let found = text.lines().find(|line| line.trim_start().starts_with(first));
    found.unwrap_or_else(|| panic!("no {first:?} in {text}"))
}

#[test]
fn with_a_machine_every_change_and_mesh_has_a_time() {
    let batch = json!({ "mesh_param": [2, 2], "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1 });
    let place = workplace(batch);
    let mut profile = machine(1e9);
    profile["ranks_per_node"] = json!(4);
    // The latency is so high that the number of collectives dominates.
    profile["links"]["intra_node"]["latency_seconds"] = json!(0.1);
    place.write("m.json", profile.to_string());
    let arguments = ["changed.json", "--model", "nano", "--seq-len", "64"];
    let timed = [&arguments[..], &["--machine", "m.json"]].concat();
    let with = plan(&place, &timed);
    let rows = |plan: &Value, key: &str| plan[key].as_array().unwrap().clone();
    assert_eq!(rows(&with, "alternatives")[0]["step_seconds"], with["step_time"]["total_seconds"]);
    assert_eq!(rows(&with, "alternatives")[0]["tokens_per_second"], with["step_time"]["tokens_per_second"]);
    let bf16 = rows(&with, "alternatives").into_iter().find(|row| row["change"] == "bf16").unwrap();
    assert_eq!((&bf16["profile_lacks"], &bf16["step_seconds"]), (&json!("rates.bf16"), &Value::Null));
    let seconds = |mesh: &Value| mesh["step_seconds"].as_f64().unwrap();
    let meshes = rows(&with, "meshes");
    let fastest = meshes.iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap();
    assert_eq!(fastest["reason"], format!("fastest of all {}", meshes.len()));
    // Four reductions and the sum of the losses, 0.1 s each; compute is negligible.
    assert_eq!((&fastest["dp"], &fastest["zero_stage"]), (&json!(4), &json!(0)));
    assert!((0.5..0.6).contains(&seconds(fastest)), "{fastest}");
    let text = place.run(&[&["plan"], &timed[..], &["--html", "plan.html"]].concat());
    let text = &text.assert_done().stdout;
    for head in ["change", "dp × sp"] {
        assert!(line(text, head).contains(" step time (s)  tokens/s"), "{text}");
    }
    assert!(line(text, "4 × 1").contains("◄ fastest of all"), "{text}");
    let note = "–: no time, because the machine profile lacks `file_bytes_per_second`, `rates.bf16`";
    assert!(text.contains(note), "{text}");
    let page = place.read("plan.html");
    assert!(
        page.contains("fastest of all") && page.contains("tokens/s</th>") && page.contains(note),
        "{page}"
    );

    let without = plan(&place, &arguments);
    for row in rows(&without, "alternatives").iter().chain(&rows(&without, "meshes")) {
        assert!(row.get("step_seconds").is_none() && row.get("profile_lacks").is_none(), "{row}");
    }
    let text = place.run(&[&["plan"], &arguments[..], &["--html", "plan.html"]].concat());
    assert!(!text.assert_done().stdout.contains("tokens/s"), "{text:?}");
    let page = place.read("plan.html");
    assert!(page.contains("sends the fewest bytes of all") && !page.contains("tokens/s"), "{page}");
}
