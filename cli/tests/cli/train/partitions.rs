//! `ulysses.zero_partition_axes`, and the note on a single partition.

use crate::support::cli::Workplace;
use serde_json::json;

#[test]
fn a_zero_stage_with_one_partition_is_noted_before_the_run() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "zero_optimization": { "stage": 3 } }));
    let note =
        "warning: ZeRO stage 3 has 1 partition, because dp is 1: every rank stores the whole model state";
    let says_so = |mesh| place.run(&["train", "c.json", "--mesh", mesh]).assert_done().stderr.contains(note);
    assert!(says_so("1x2"));
    assert!(!says_so("2x1") && !says_so("1x1"));
    let explained = place.run(&["config", "explain", "zero_optimization.stage"]);
    assert!(explained.assert_done().stdout.contains("`ulysses.zero_partition_axes`"), "{explained:?}");
}

#[test]
fn offload_to_host_memory_is_noted_on_cpu_ranks() {
    let place = Workplace::new();
    let note = "warning: `offload_optimizer` with device \"cpu\" saves no memory on CPU ranks";
    let says_so = |offload| {
        let zero = json!({ "zero_optimization": { "stage": 3, "offload_optimizer": offload } });
        place.write_config("c.json", zero);
        place.run(&["train", "c.json"]).assert_done().stderr.contains(note)
    };
    assert!(says_so(json!({ "device": "cpu" })));
    assert!(!says_so(json!({ "device": "nvme", "nvme_path": "." })) && !says_so(json!({ "device": "none" })));
}

#[test]
fn zero_partitions_over_sp_by_flag_key_or_deepspeeds_mesh() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "zero_optimization": { "stage": 3 } }));
    let by_flag = place.run(&["train", "c.json", "--mesh", "1x2", "--zero-partition-axes", "dp,sp"]);
    let stderr = &by_flag.assert_done().stderr;
    assert!(stderr.contains("ZeRO stage 3 over dp × sp,") && !stderr.contains("has 1 partition"), "{stderr}");
    assert_eq!(place.read_json("out/config.json")["ulysses"]["zero_partition_axes"], json!(["dp", "sp"]));
    assert_eq!(place.read_json("out/run.json")["mesh"]["zero_partition_axes"], json!(["dp", "sp"]));

    place.write_config(
        "alst.json",
        json!({ "zero_optimization": { "stage": 3 }, "sequence_parallel_size": 2 }),
    );
    let implied = place.run(&["train", "alst.json", "--output", "alst"]);
    let stderr = &implied.assert_done().stderr;
    assert!(stderr.contains("ZeRO stage 3 over dp × sp,"), "{stderr}");
    let resolved = place.run(&["config", "resolve", "alst.json"]);
    assert!(resolved.assert_done().stderr.contains("over dp × sp, as in DeepSpeed"), "{resolved:?}");
    for (key, value, expected) in [
        ("axes.json", json!(["sp"]), "[\"dp\"] or [\"dp\", \"sp\"]"),
        ("name.json", json!(["dp", "tp"]), "\"dp\", \"sp\""),
    ] {
        place.write_config(key, json!({ "ulysses": { "zero_partition_axes": value } }));
        place.run(&["train", key]).assert_refused(2, &["`ulysses.zero_partition_axes", expected]);
    }
    let refused = place.run(&["train", "c.json", "--zero-partition-axes", "sp"]);
    refused.assert_refused(2, &["--zero-partition-axes", "expected `dp` or `dp,sp`"]);
}
