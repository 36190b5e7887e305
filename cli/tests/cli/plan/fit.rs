//! `ulysses plan --fit`, and plans without a config.

use super::{plan, workplace};
use crate::support::cli::Workplace;
use serde_json::{Value, json};

fn peak(plan: &Value) -> u64 {
    plan["rank"]["peak_bytes"].as_u64().unwrap()
}

/// Returns the result of a search for `--memory-gib` of `mib` MiB.
fn fit(place: &Workplace, arguments: &[&str], mib: f64) -> Value {
    let gib = (mib / 1024.0).to_string();
    plan(place, &[arguments, &["--fit", "--memory-gib", &gib]].concat())
}

#[test]
fn the_cheapest_config_is_planned_again_and_trained_with_the_predicted_peak() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "train_batch_size": 4, "ulysses": { "seq_len": 512, "steps": 2 } }));
    let arguments = ["c.json", "--ranks", "2"];
    let plain = fit(&place, &arguments, 1024.0);
    // A budget that some setting must save for.
    let mib = 0.72 * peak(&plain["choices"][0]) as f64 / (1 << 20) as f64;
    let written = fit(&place, &[&arguments[..], &["--output", "best.json"]].concat(), mib);
    let best = &written["choices"][0];
    assert!(peak(best) as f64 <= mib * (1 << 20) as f64, "{best}");
    assert_eq!(place.read_json("best.json"), written["config"]);
    for choice in written["choices"].as_array().unwrap() {
        place.write("choice.json", choice["config"].to_string());
        assert_eq!(
            plan(&place, &["choice.json"])["rank"]["peak_bytes"],
            choice["rank"]["peak_bytes"],
            "{choice}"
        );
        assert!(choice["save_attention_output"].is_boolean(), "{choice}");
    }
    let size = |key: &str| best[key].as_u64().unwrap();
    assert_eq!(size("micro_batch_size") * size("gradient_accumulation_steps") * size("dp"), 4);
    assert!(written["tried"].as_u64() < written["combinations"].as_u64());

    let again = plan(&place, &["best.json"]);
    assert_eq!(again["rank"]["peak_by_category"], best["rank"]["peak_by_category"]);
    place.run(&["train", "best.json"]).assert_done();
    let ranks = place.read_json("out/run.json")["ranks"].as_array().unwrap().clone();
    let measured = ranks.iter().map(|rank| rank["peak_bytes"].as_u64().unwrap()).max().unwrap();
    let error = measured as f64 / peak(best) as f64 - 1.0;
    assert!(error.abs() < 0.1, "{measured} measured, {} planned", peak(best));
}

#[test]
fn settings_that_fit_are_a_table_and_a_config() {
    let place = workplace(json!({}));
    let arguments = ["plan", "--model", "nano", "--ranks", "2", "--seq-len", "512", "--fit", "--memory-gib"];
    let text = place.run(&[&arguments[..], &["1"]].concat());
    let stdout = &text.assert_done().stdout;
    for part in [
        "assumed train_batch_size 2, bf16, AdamW, ranks on CPUs (--device cuda for GPUs)",
        "settings that fit into 1.00 GiB per rank, cheapest first",
        "micro batch × accumulation  ZeRO stage  recomputed layers",
        "cheapest: fewest bytes offloaded, then fewest FLOPs recomputed",
    ] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    let (_, config) = stdout.split_once("config of the first:\n").unwrap();
    let config: Value = serde_json::from_str(config).unwrap();
    assert_eq!((&config["train_batch_size"], &config["ulysses"]["seq_len"]), (&json!(2), &json!(512)));
    let rows = stdout.lines().filter(|line| line.starts_with("  2 × 1 ") || line.starts_with("  1 × 2 "));
    assert_eq!(rows.count(), 2, "{stdout}");
}

#[test]
fn host_memory_is_shown_per_node_and_compared_if_it_is_given() {
    let place = workplace(json!({}));
    let search = |memory: &[&str]| {
        let arguments =
            ["--model", "small", "--ranks", "4", "--seq-len", "8192", "--device", "cuda", "--fit"];
        let reserve = ["--reserve-gib", "0", "--memory-gib"];
        let text = place.run(&[&["plan"], &arguments[..], &reserve, memory].concat());
        text.assert_done().stdout.clone()
    };
    let note = "  host memory: not checked; set --host-memory-gib\n";
    // Little memory, for which something must be offloaded.
    let offloading = search(&["0.08"]);
    assert!(
        offloading.contains("offloaded per rank  host memory per node") && offloading.contains(note),
        "{offloading}"
    );
    assert!(!search(&["8"]).contains(note), "nothing is offloaded");
    let limited = search(&["0.08", "--host-memory-gib", "64"]);
    assert!(
        limited.contains("  host memory: at most 64.00 GiB per node\n") && !limited.contains(note),
        "{limited}"
    );
}

#[test]
fn where_nothing_fits_the_nearest_settings_and_their_limit_are_shown() {
    let place = workplace(json!({}));
    let search = ["plan", "--model", "nano", "--ranks", "2", "--seq-len", "512", "--fit"];
    let with = |memory: &[&str]| place.run(&[&search[..], memory].concat());
    let small = with(&["--memory-gib", "0.001"]);
    let stdout = &small.assert_done().stdout;
    let limit = stdout.lines().find(|line| line.starts_with("limit   rank 0: peak "));
    let limit = limit.unwrap_or_else(|| panic!("{stdout}"));
    assert!(limit.contains("exceeds the available memory by ") && limit.contains("activations "), "{limit}");
    assert!(
        stdout.contains("NOTHING FITS into 1.02 MiB per rank; nearest of those planned: dp × sp "),
        "{stdout}"
    );
    assert!(stdout.contains("longest sequence that fits with these settings: "), "{stdout}");
    let written = with(&["--memory-gib", "0.001", "--output", "best.json"]);
    written.assert_refused(1, &["--output", "nothing fits"]);
    assert!(!place.path("best.json").exists());
}

#[test]
fn searches_that_cannot_be_are_refused() {
    let place = workplace(json!({}));
    let refused = |arguments: &[&str], names: &[&str]| {
        place.run(&[&["plan", "--model", "nano"], arguments].concat()).assert_refused(2, names);
    };
    refused(&["--fit", "--ranks", "2", "--seq-len", "64"], &["--memory-gib"]);
    refused(&["--ranks", "2"], &["--fit"]);
    refused(&["--fit", "--memory-gib", "1", "--ranks", "2", "--mesh", "1x2"], &["--ranks", "--mesh"]);
    refused(&["--fit", "--memory-gib", "1", "--ranks", "2"], &["--seq-len"]);
    let short =
        ["--fit", "--memory-gib", "1", "--ranks", "8", "--seq-len", "4", "--set", "train_batch_size=1"];
    refused(&short, &["no mesh of 8 ranks divides train_batch_size 1 and the 4 tokens of a sequence"]);
}

#[test]
fn more_ranks_than_heads_fit_in_a_ring() {
    let place = workplace(json!({}));
    let arguments = ["--model", "nano", "--ranks", "8", "--seq-len", "64", "--set", "train_batch_size=1"];
    let found = fit(&place, &arguments, 1024.0);
    // The model has 4 query heads.
    for choice in found["choices"].as_array().unwrap() {
        let ring_size = choice["ring_size"].as_u64().unwrap();
        assert!(choice["sp"] == 8 && ring_size >= 2, "{choice}");
        assert_eq!(choice["config"]["ulysses"]["ring_size"], ring_size);
    }
    assert_ne!(found["choices"], json!([]));
}

#[test]
fn a_plan_without_a_config_states_what_it_assumes() {
    let place = workplace(json!({}));
    let arguments = ["plan", "--model", "llama3-8b", "--mesh", "1x8", "--seq-len", "65536"];
    let text = place.run(&arguments);
    let assumed = "assumed micro batches of 1 sequence, ZeRO stage 3 over dp × sp, activation checkpointing, bf16, \
                   AdamW, ranks on CPUs (--device cuda for GPUs); --set KEY=VALUE or a config changes them\n";
    assert!(text.assert_done().stdout.starts_with(assumed), "{}", text.stdout);
    let config = json!({
        "mesh_param": [1, 8], "train_micro_batch_size_per_gpu": 1, "bf16": { "enabled": true },
        "zero_optimization": { "stage": 3 },
        "ulysses": { "model": "llama3-8b", "activation_checkpointing": true, "zero_partition_axes": ["dp", "sp"] },
    });
    place.write("same.json", config.to_string());
    let same = plan(&place, &["same.json", "--seq-len", "65536"]);
    let without = plan(&place, &arguments[1..]);
    assert_eq!(same["rank"], without["rank"]);
    assert!(without["assumed"].is_string() && same.get("assumed").is_none());
    let over_dp =
        plan(&place, &[&arguments[1..], &["--zero-partition-axes", "dp", "--zero-stage", "0"]].concat());
    assert!(peak(&over_dp) > peak(&without), "flags change what is assumed");
    place.run(&["plan"]).assert_refused(2, &["--model"]);
    let unsupported = place.run(&["plan", "--model", "openai/gpt-oss-120b", "--seq-len", "64"]);
    unsupported.assert_refused(2, &["`openai/gpt-oss-120b` is not supported", "mixture of experts"]);
}

#[test]
fn memory_that_is_reserved_is_subtracted() {
    let place = workplace(json!({}));
    let nano = ["--model", "nano", "--seq-len", "64", "--memory-gib"];
    let with = |memory: &str, flags: &[&str]| {
        let budget = plan(&place, &[&nano[..], &[memory], flags].concat())["budget"].clone();
        ["bytes", "reserve_bytes"].map(|key| budget[key].as_u64().unwrap() >> 20)
    };
    assert_eq!(with("4.03125", &["--device", "cuda"]), [32, 4096]);
    assert_eq!(with("0.03125", &["--device", "cuda", "--reserve-gib", "0"]), [32, 0]);
    assert_eq!(with("0.03125", &[]), [32, 0]);
    assert_eq!(with("1.03125", &["--reserve-gib", "1"]), [32, 1024]);
    let line = "fits into 32.00 MiB per rank (4.03 GiB less 4.00 GiB for the CUDA context and libraries: --reserve-gib)";
    let text = place.run(&[&["plan"], &nano[..], &["4.03125", "--device", "cuda"]].concat());
    assert!(text.assert_done().stdout.contains(line), "{text:?}");
    let refused = place.run(&[&["plan"], &nano[..], &["8", "--reserve-gib", "8"]].concat());
    refused.assert_refused(2, &["--reserve-gib 8", "less than --memory-gib 8"]);
}

#[test]
fn meshes_have_the_largest_micro_batch_that_fits() {
    let place = workplace(json!({}));
    let of = |memory: &[&str]| {
        let arguments = ["--model", "nano", "--seq-len", "512", "--mesh", "2x1", "--batch-size", "8"];
        let plan = plan(&place, &[&arguments, memory].concat());
        let meshes = plan["meshes"].as_array().unwrap().clone();
        let sizes = |mesh: &Value| {
            let [dp, micro, steps] = ["dp", "micro_batch_size", "gradient_accumulation_steps"]
                .map(|key| mesh[key].as_u64().unwrap());
            assert_eq!(dp * micro * steps, 8, "{mesh}");
            (dp, micro, mesh["fits"] == true)
        };
        (meshes.iter().map(sizes).collect::<Vec<_>>(), meshes)
    };
    assert!(of(&[]).0.iter().all(|(_, micro, _)| *micro == 1), "the configured one without a budget");
    assert!(of(&["--memory-gib", "1"]).0.iter().all(|(dp, micro, fits)| *fits && micro * dp == 8));
    let (sizes, meshes) = of(&["--memory-gib", "0.006"]);
    assert!(sizes.iter().any(|(dp, micro, fits)| *fits && *micro > 1 && micro * dp < 8), "{sizes:?}");
    assert!(meshes.iter().filter(|mesh| mesh["is_longest"] == true).count() == 1, "{meshes:?}");
    let (sizes, _) = of(&["--memory-gib", "0.001"]);
    assert!(sizes.iter().all(|(_, micro, fits)| !fits && *micro == 1), "{sizes:?}");
}

#[test]
fn the_largest_micro_batch_may_need_attention_to_be_recomputed() {
    let place = workplace(json!({}));
    let of = |settings: &[&str]| {
        let arguments = ["--model", "nano", "--seq-len", "512", "--mesh", "1x1", "--batch-size", "8"];
        plan(&place, &[&arguments[..], settings].concat())
    };
    let whole = ["--set", "train_micro_batch_size_per_gpu=8", "--set"];
    let [saved, recomputed] = ["true", "false"].map(|saves| {
        let save = format!("ulysses.save_attention_output={saves}");
        peak(&of(&[&whole[..], &[save.as_str()]].concat()))
    });
    assert!(recomputed < saved);
    let gib = ((saved + recomputed) / 2) as f64 / f64::from(1 << 30);
    let mesh = of(&["--memory-gib", &gib.to_string()])["meshes"][0].clone();
    assert_eq!((&mesh["micro_batch_size"], &mesh["fits"]), (&json!(8), &json!(true)), "{mesh}");
}
