//! Training with more sequence-parallel ranks than heads.

use crate::support::cli::Workplace;
use serde_json::json;

#[test]
fn a_ring_trains_and_resumes_on_more_ranks_than_heads() {
    let place = Workplace::new();
    // The preset `nano` has four heads.
    place.write_config("c.json", json!({ "checkpoint": { "interval": 2 }, "ulysses": { "steps": 4 } }));
    let train = |mesh: &str, output: &str, more: &[&str]| {
        let arguments = ["train", "c.json", "--mesh", mesh, "--output", output];
        place.run(&[&arguments[..], more].concat())
    };
    train("1x2", "flat", &[]).assert_done();
    let ring = train("ring=2,ulysses=3", "ring", &["--steps", "2"]);
    assert!(ring.assert_done().stderr.contains("sp 6 (ring 2 × ulysses 3)"), "{ring:?}");
    let resumed = train("ring=8,ulysses=1", "ring", &["--resume"]);
    assert!(resumed.assert_done().stderr.contains("step 2"), "{resumed:?}");
    let [flat, ring] = ["flat", "ring"].map(|output| place.losses(&format!("{output}/metrics.jsonl")));
    assert_eq!((flat.len(), ring.len()), (4, 4));
    // Six ranks in two steps, of which one is the slowest; then eight.
    let metrics = place.metrics("ring/metrics.jsonl");
    for (step, ranks) in metrics.iter().zip([6, 6, 8, 8]) {
        let number = |key: &str| step[key].as_f64().unwrap();
        assert!(number("ring_seconds") > number("exposed_ring_seconds"), "{step}");
        assert!(number("exposed_ring_seconds") > 0.0, "{step}");
        // Groups of one rank exchange nothing.
        assert_eq!(number("all_to_all_seconds") > 0.0, ranks == 6, "{step}");
        let idle: Vec<f64> =
            step["idle_seconds"].as_array().unwrap().iter().filter_map(|s| s.as_f64()).collect();
        assert_eq!(idle.len(), ranks, "{step}");
        let slowest = usize::try_from(step["slowest_rank"].as_u64().unwrap()).unwrap();
        assert!(idle[slowest] == 0.0 && idle.iter().all(|seconds| *seconds >= 0.0), "{step}");
    }
    for (flat, ring) in flat.iter().zip(&ring) {
        assert!((flat - ring).abs() < 1e-5 * flat, "{flat} on 1x2, {ring} on rings");
    }
    place.write_config(
        "auto.json",
        json!({ "mesh_param": [1, 8], "ulysses": { "ring_size": "auto", "steps": 1 } }),
    );
    let auto = place.run(&["train", "auto.json", "--output", "auto"]);
    assert!(auto.assert_done().stderr.contains("sp 8 (ring 2 × ulysses 4)"), "{auto:?}");
    let error = ["num_heads = 4", "sp 16 in a ring of 2", "or `--mesh dp=1,ring=4,ulysses=4`"];
    train("ring=2,ulysses=8", "wrong", &[]).assert_refused(2, &error);
    train("1x2", "wrong", &["--set", "ulysses.ring_size=3"]).assert_refused(2, &["does not divide sp 2"]);
}

#[test]
fn every_notation_of_a_ring_is_planned_as_it_trains() {
    let place = Workplace::new();
    let plan = |mesh: &[&str]| {
        let arguments = [&["plan", "--model", "nano", "--seq-len", "256", "--json"][..], mesh].concat();
        let outcome = place.run(&arguments);
        serde_json::from_str::<serde_json::Value>(&outcome.assert_done().stdout).unwrap()
    };
    let [stated, set, flat] = [
        &["--mesh", "dp=1,ring=2,ulysses=4"][..],
        &["--mesh", "1x8", "--set", "ulysses.ring_size=2"],
        &["--mesh", "1x4"],
    ]
    .map(plan);
    assert_eq!(stated["mesh"], set["mesh"]);
    assert_eq!(stated["rank"], set["rank"]);
    assert_eq!((&stated["mesh"]["ring_size"], &flat["mesh"]["ring_size"]), (&json!(2), &json!(1)));
    // Sixteen ranks exceed the heads, and the mesh that the error names does not.
    let refused = place.run(&["plan", "--model", "nano", "--seq-len", "256", "--mesh", "1x16"]);
    refused.assert_refused(2, &["or `--mesh dp=1,ring=4,ulysses=4`"]);
    plan(&["--mesh", "dp=1,ring=4,ulysses=4"]);
    place.write_config("c.json", json!({}));
    let resolved = place.run(&["config", "resolve", "c.json", "--mesh", "ring=2,ulysses=4"]);
    let resolved: serde_json::Value = serde_json::from_str(&resolved.assert_done().stdout).unwrap();
    assert_eq!(resolved["ulysses"]["ring_size"], json!(2));
}
