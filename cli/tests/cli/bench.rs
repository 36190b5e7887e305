//! `ulysses bench`: the content of its reports.

use crate::support::cli::Workplace;
use serde_json::{Value, json};
use std::fs;

/// Measures once, checks the keys that all reports have, and returns the report.
fn report(place: &Workplace, arguments: &[&str]) -> Value {
    let outcome = place.run(&[&["bench"], arguments, &["--repeats", "1", "--json"]].concat());
    let report: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    assert_eq!(report["bench"], arguments[0]);
    for key in ["method", "processor"] {
        assert!(report[key].as_str().is_some_and(|text| !text.is_empty()), "{key} in {report}");
    }
    for key in ["cores", "ranks", "threads_per_rank"] {
        assert!(report[key].as_u64().is_some_and(|number| number > 0), "{key} in {report}");
    }
    for (name, figure) in report["figures"].as_object().unwrap() {
        assert!(figure["ms"].as_f64().is_some_and(|ms| ms > 0.0), "{name}: {figure}");
        assert_eq!(figure["repeats"], 1, "{name}: {figure}");
    }
    for (name, ratio) in report["ratios"].as_object().unwrap() {
        assert!(ratio.as_f64().is_some_and(|ratio| ratio > 0.0 && ratio.is_finite()), "{name}: {ratio}");
    }
    report
}

fn keys(report: &Value, key: &str) -> Vec<String> {
    report[key].as_object().unwrap().keys().cloned().collect()
}

#[test]
fn saves_are_compared_with_copies_and_leave_no_files() {
    let place = Workplace::new();
    fs::create_dir(place.path("disk")).unwrap();
    for mesh in ["1x1", "2x2"] {
        let training = ["--model", "nano", "--mesh", mesh, "--zero-stage", "2", "--output", "disk"];
        let report = report(&place, &[&["checkpoint"][..], &training].concat());
        assert_eq!(keys(&report, "figures"), ["copy", "save"]);
        assert_eq!(keys(&report, "ratios"), ["save / copy"]);
        // Parameters and both moments of every element, in f32.
        let state = 3 * 4 * 123_712;
        let bytes = report["settings"]["bytes"].as_u64().unwrap();
        assert!((state..state + 20_000).contains(&bytes), "{bytes}");
        assert_eq!(fs::read_dir(place.path("disk")).unwrap().count(), 0);
    }
}

#[test]
fn a_measured_machine_profile_is_accepted_by_plan() {
    let place = Workplace::new();
    place.write_config("c.json", serde_json::json!({ "mesh_param": [1, 2], "ulysses": { "model": "nano" } }));
    let few = ["--model", "nano", "--tokens", "64", "--mib", "1", "--repeats", "1"];
    let outcome = place.run(&[&["bench", "profile", "--output", "m.json"], &few[..]].concat());
    outcome.assert_done();
    let profile: Value = serde_json::from_str(&place.read("m.json")).unwrap();
    assert_eq!((&profile["ranks_per_node"], &profile["links"]["inter_node"]), (&2.into(), &Value::Null));
    assert!(profile["origin"].as_str().unwrap().contains("2 rank(s)"), "{profile}");
    let outcome = place.run(&["plan", "c.json", "--machine", "m.json", "--json"]);
    let plan: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    for part in ["products_seconds", "exchange_seconds", "update_seconds", "total_seconds"] {
        assert!(plan["step_time"][part].as_f64().is_some_and(|seconds| seconds > 0.0), "{part}: {plan}");
    }
    // A profile of one rank has no links; the error names the missing key.
    let alone = place.run(&[&["bench", "profile", "--ranks", "1"], &few[..]].concat());
    place.write("alone.json", &alone.assert_done().stdout);
    place.run(&["plan", "c.json", "--machine", "alone.json"]).assert_refused(2, &["links.inter_node"]);
    let nowhere = place.run(&[&["bench", "profile", "--offload-path", "nowhere"], &few[..]].concat());
    nowhere.assert_refused(2, &["nowhere", "--offload-path"]);
}

#[test]
fn exchanges_and_collectives_are_compared_with_copies() {
    let place = Workplace::new();
    let exchange = report(&place, &["all-to-all", "--ranks", "3", "--mib", "1"]);
    assert_eq!(exchange["ranks"], 3);
    assert_eq!(keys(&exchange, "ratios"), ["seq_to_head / copy", "head_to_seq / copy"]);
    let collectives = report(&place, &["collectives", "--ranks", "3", "--mib", "1"]);
    let ops = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"];
    assert_eq!(keys(&collectives, "figures")[1..], ops);
    // The ratio of busbw to algbw in nccl-tests.
    for (op, factor) in ops.into_iter().zip([4.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0, 1.0]) {
        let figure = &collectives["figures"][op];
        let [bus, algorithm] = ["gb_per_s", "algbw_gb_per_s"].map(|key| figure[key].as_f64().unwrap());
        assert!((bus / algorithm - factor).abs() < 1e-9, "{op}: {figure}");
    }
}

#[test]
fn an_overlapped_exchange_is_compared_with_one_that_is_awaited_at_once() {
    let place = Workplace::new();
    let overlap = report(&place, &["overlap", "--seq-len", "64", "--head-chunks", "2", "--ranks", "3"]);
    assert_eq!((&overlap["ranks"], &overlap["settings"]["head_chunks"]), (&3.into(), &2.into()));
    assert_eq!(keys(&overlap, "ratios"), ["overlapped / apart"]);
    // The link transfers as long in either case, so what is exposed is at least what nothing can hide.
    for figure in ["apart", "overlapped"] {
        assert!(overlap["figures"][figure]["exposed_ms"].as_f64().unwrap() > 0.0, "{overlap}");
    }
    assert!(overlap["figures"]["overlapped"]["hidden_share"].is_f64(), "{overlap}");
    let ring = report(&place, &["overlap", "--seq-len", "64", "--ring", "--ranks", "3"]);
    assert_eq!((&ring["settings"]["ring"], &ring["settings"]["head_chunks"]), (&true.into(), &1.into()));
    assert!(ring["figures"]["overlapped"]["hidden_share"].is_f64(), "{ring}");
}

#[test]
fn gemms_attention_and_steps_are_compared_with_a_square_gemm() {
    let place = Workplace::new();
    let gemm = report(&place, &["gemm", "--model", "nano", "--tokens", "64"]);
    assert_eq!(keys(&gemm, "ratios").len(), 6 * 3, "forward and both gradients of six shapes");
    let in_bf16 = report(&place, &["gemm", "--model", "nano", "--tokens", "64", "--dtype", "bf16"]);
    assert_eq!(keys(&in_bf16, "ratios").len(), 3 * 6 * 3, "the same, again in bf16, and those beside f32");
    assert!(in_bf16["ratios"]["lm_head forward bf16 / lm_head forward"].is_f64(), "{in_bf16:#}");
    let arguments = ["attention", "--seq-len", "64", "--num-heads", "2", "--head-dim", "16"];
    let attention = report(&place, &arguments);
    let beside_square = ["forward / square_gemm", "backward / square_gemm"];
    assert_eq!(keys(&attention, "ratios"), beside_square);
    let in_fp16 = report(&place, &[&arguments[..], &["--dtype", "fp16"]].concat());
    for ratio in
        ["forward fp16 / forward", "backward fp16 / backward", "delta fp16 / delta", beside_square[1]]
    {
        assert!(in_fp16["ratios"][ratio].is_f64(), "no {ratio} in {in_fp16:#}");
    }
    let alone = report(&place, &[&arguments[..], &["--dtype", "fp16", "--no-f32"]].concat());
    assert_eq!(keys(&alone, "ratios"), ["forward fp16 / square_gemm", "backward fp16 / square_gemm"]);
    let grouped =
        report(&place, &["attention", "--seq-len", "64", "--num-heads", "4", "--num-kv-heads", "2"]);
    assert_eq!(grouped["settings"]["num_kv_heads"], 2);
    let heads = ["--num-value-heads", "2", "--num-key-heads", "1", "--head-dim", "16"];
    let linear = report(&place, &[&["linear-attention", "--seq-len", "64"][..], &heads].concat());
    let beside_square = |name| format!("{name} / square_gemm");
    assert_eq!(
        keys(&linear, "ratios"),
        [
            "forward",
            "backward",
            "per channel forward",
            "per channel backward",
            "sums forward",
            "sums backward"
        ]
        .map(beside_square)
    );
    let training = ["train", "--model", "nano", "--seq-len", "64"];
    assert_eq!(keys(&report(&place, &training), "ratios"), ["train_step / square_gemm"]);
    let ring = report(&place, &[&training[..], &["--mesh", "ring=2,ulysses=2"]].concat());
    assert_eq!((&ring["ranks"], &ring["settings"]["mesh"]), (&json!(4), &json!("ring=2,ulysses=2")));
    let set = ["--set", "gradient_accumulation_steps=2", "--set", "zero_optimization.stage=1"];
    let on_mesh = [&["--mesh", "2x2", "--zero-stage", "3"], &set[..]].concat();
    let outcome = place.run(&[&["bench"], &training[..], &on_mesh, &["--against-single", "--json"]].concat());
    let train: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    assert_eq!(keys(&train, "ratios"), ["train_step / square_gemm", "train_step / single_rank_step"]);
    assert_eq!(train["settings"]["zero_stage"], 3, "flags come after --set: {train:#}");
    for step in ["train_step", "single_rank_step"] {
        let figure = &train["figures"][step];
        let tokens = figure["tokens_per_second"].as_f64().unwrap() * figure["ms"].as_f64().unwrap() * 1e-3;
        assert!((tokens - 4.0 * 64.0).abs() < 1e-6, "four rows of 64 tokens: {figure}");
    }
}

#[test]
fn a_layer_of_a_published_shape_is_measured() {
    let place = Workplace::new();
    let shape = ["--model", "qwen3-0.6b", "--num-layers", "1", "--vocab-size", "32"];
    let train = report(&place, &[&["train", "--seq-len", "8"], &shape[..]].concat());
    assert_eq!((&train["settings"]["num_layers"], &train["settings"]["vocab_size"]), (&json!(1), &json!(32)));
    // 6 FLOPs per token and parameter of the matmuls, and attention's: 1024 → 2048 + 2 · 1024, 2048 → 1024, 3 · 1024 × 3072.
    let matmuls = 1024.0 * (4096.0 + 2048.0 + 3.0 * 3072.0 + 32.0);
    let (pairs, head_elems) = (8.0 * 9.0 / 2.0, 2048.0);
    let flops = 6.0 * 8.0 * matmuls + 12.0 * pairs * head_elems;
    let step = &train["figures"]["train_step"];
    let counted = step["gflop_per_s"].as_f64().unwrap() * 1e9 * step["ms"].as_f64().unwrap() * 1e-3;
    assert!((counted / flops - 1.0).abs() < 1e-6, "{counted} counted, {flops} by the formula");
}

#[test]
fn the_table_has_the_figures_and_their_baseline() {
    let outcome = Workplace::new().run(&["bench", "all-to-all", "--mib", "1", "--repeats", "1"]);
    for expected in ["GB/s", "copy", "seq_to_head", " × copy", "2 rank(s)"] {
        assert!(outcome.assert_done().stdout.contains(expected), "no {expected:?} in {outcome:?}");
    }
}

#[test]
fn invalid_benchmarks_are_refused() {
    let place = Workplace::new();
    let cases: [(&[&str], &str); 15] = [
        (&["all-to-all", "--ranks", "17"], "--ranks"),
        (&["all-to-all", "--ranks", "0"], "1..=16"),
        (&["collectives", "--ranks", "1"], "2..=64"),
        (&["overlap", "--ranks", "3"], "3 rank(s) with 4 head chunk(s): expected 2 to 2"),
        (&["overlap", "--link-share", "0"], "--link-share 0: expected a number above 0"),
        (&["gemm", "--model", "huge"], "nano, tiny"),
        (&["gemm", "--tokens", "16777216"], "but the benchmark's tensors take"),
        (&["train", "--mesh", "1x99"], "99"),
        (&["train", "--set", "sede=1"], "--set sede=1: unknown key `sede`, did you mean `seed`?"),
        (&["checkpoint", "--output", "nowhere"], "--output: cannot create nowhere/"),
        (
            &["train", "--model", ".", "--num-layers", "1"],
            "--num-layers and --vocab-size need a preset or a shape",
        ),
        (&["attention", "--repeats", "0"], "--repeats"),
        (&["attention", "--num-kv-heads", "3"], "--num-kv-heads 3 does not divide the 8 query heads"),
        (
            &["max-seq-len", "c.json", "--gib-per-rank", "0"],
            "expected a number of GiB of at least 0.03125, such as 2 or 0.5",
        ),
        (
            &["max-seq-len", "c.json", "--memory-gib", "-1"],
            "expected a number of GiB of at least 0.03125, such as 2 or 0.5",
        ),
    ];
    for (arguments, expected) in cases {
        place.run(&[&["bench"], arguments].concat()).assert_refused(2, &[expected]);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn the_longest_sequence_fits_and_a_longer_one_does_not() {
    let place = Workplace::new();
    place.write("c.json", r#"{ "train_batch_size": 2 }"#);
    let limits = ["--gib-per-rank", "0.0625", "--from", "1024", "--resolution", "1024"];
    let search =
        ["bench", "max-seq-len", "c.json", "--model", "nano", "--mesh", "2x1", "--threads-per-rank", "1"];
    let outcome = place.run(&[&search[..], &limits, &["--json"]].concat());
    let report: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    let lengths = |fits: bool| {
        let attempts = report["attempts"].as_array().unwrap().iter();
        attempts
            .filter(move |attempt| attempt["fits"] == fits)
            .map(|attempt| attempt["seq_len"].as_u64().unwrap())
    };
    let (longest, too_long) = (lengths(true).max().unwrap(), lengths(false).min().unwrap());
    assert_eq!(report["max_seq_len"], longest);
    assert!(longest < too_long && too_long - longest <= 1024, "{report}");
    assert!(outcome.stderr.contains(&format!("{too_long} tokens do not fit")), "{outcome:?}");
    // The plan covers allocated memory; mapped memory never exceeds the limit.
    let bytes = |what: &str| report["memory"][what].as_u64().unwrap() as f64;
    assert!(bytes("at_start") > 0.0 && bytes("resident") > 0.0, "{report}");
    let limit = 2.0 * 0.0625 * f64::from(1 << 30);
    assert!(bytes("mapped") > 0.0 && bytes("mapped") <= limit, "{report}");
    let planned = bytes("planned") / bytes("in_use");
    assert!((0.8..1.2).contains(&planned), "{report}");
    assert!(report["planned_max_seq_len"].as_u64().unwrap() >= longest, "{report}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_step_that_fails_for_another_reason_ends_the_search() {
    let place = Workplace::new();
    place.write(
        "c.json",
        r#"{ "train_batch_size": 1, "ulysses": { "activation_checkpointing": true },
        "activation_checkpointing": { "cpu_checkpointing": true } }"#,
    );
    let search = ["bench", "max-seq-len", "c.json", "--from", "64", "--resolution", "64"];
    // --set applies to the steps too.
    let outcome = place.run(&[&search[..], &["--set", "ulysses.offload_path=nowhere"]].concat());
    outcome.assert_refused(2, &["a step on 64 tokens failed", "nowhere"]);
    place.write("c.json", r#"{ "train_batch_size": 1 }"#);
    let outcome = place.run(&[&search[..], &["--model", "base", "--gib-per-rank", "0.0625"]].concat());
    outcome.assert_refused(1, &["0.0625 GiB per rank is too little for sequences of 64 tokens"]);
}

#[test]
#[cfg(target_os = "linux")]
fn the_longest_sequence_is_found() {
    let place = Workplace::new();
    place.write(
        "c.json",
        r#"{ "train_batch_size": 1, "ulysses": { "activation_checkpointing": true, "tile_tokens": 256 } }"#,
    );
    let search = ["bench", "max-seq-len", "c.json", "--model", "nano", "--threads-per-rank", "1"];
    let limits = ["--memory-gib", "0.125", "--from", "8192", "--resolution", "8192", "--json"];
    let outcome = place.run(&[&search[..], &limits].concat());
    let report: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    let [longest, planned] = ["max_seq_len", "planned_max_seq_len"].map(|key| report[key].as_u64().unwrap());
    assert!(0 < longest && longest <= planned, "{report}");
    let attempts = report["attempts"].as_array().unwrap();
    let fits =
        |seq_len: u64| attempts.iter().find(|attempt| attempt["seq_len"] == seq_len).unwrap()["fits"].clone();
    assert_eq!((fits(longest), fits(longest + 8192)), (json!(true), json!(false)), "{report}");
}
