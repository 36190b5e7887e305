//! `ulysses plan`.

use crate::support::cli::Workplace;
use serde_json::{Value, json};

/// A workplace with a config that names no model.
fn workplace(changes: Value) -> Workplace {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "ulysses": { "model": null, "seq_len": 4096 } }));
    place.write_config("changed.json", changes);
    place
}

fn plan(place: &Workplace, arguments: &[&str]) -> Value {
    let outcome = place.run(&[&["plan"], arguments, &["--json"]].concat());
    outcome.assert_done();
    serde_json::from_str(&outcome.stdout).unwrap()
}

fn peak(plan: &Value) -> u64 {
    plan["rank"]["peak_bytes"].as_u64().unwrap()
}

#[test]
fn a_plan_says_what_a_rank_holds_sends_and_computes_and_adds_up() {
    let place = workplace(json!({}));
    let text = place.run(&["plan", "config.json", "--model", "llama3-8b", "--mesh", "1x4"]);
    text.assert_done();
    for part in ["memory of rank 0", "exchange forward", "what one change would make", "◄ sends least"] {
        assert!(text.stdout.contains(part), "{part}: {}", text.stdout);
    }
    assert!(text.stdout.contains("--memory-gib N tells whether this fits"), "{}", text.stdout);
    let of_budget = |text: &str| text.lines().any(|line| line.ends_with("longest sequence  fits"));
    assert!(!of_budget(&text.stdout), "without a memory nothing can fit: {}", text.stdout);
    let text =
        place.run(&["plan", "config.json", "--model", "llama3-8b", "--mesh", "1x4", "--memory-gib", "80"]);
    assert!(of_budget(&text.assert_done().stdout), "{}", text.stdout);
    let plan = plan(&place, &["config.json", "--model", "llama3-8b", "--mesh", "1x4"]);
    assert_eq!(plan["model"]["parameters"], 8_030_261_248_u64);
    let categories = plan["rank"]["peak_by_category"].as_object().unwrap();
    assert_eq!(categories.values().map(|bytes| bytes.as_u64().unwrap()).sum::<u64>(), peak(&plan));
    // Stage 0, f32: 16 bytes a parameter.
    let persistent = plan["rank"]["persistent_bytes"].as_u64().unwrap();
    assert!((16 * 8_030_261_248..17 * 8_030_261_248).contains(&persistent), "{persistent}");
    let timeline = plan["rank"]["timeline"].as_array().unwrap();
    let most = timeline.iter().map(|moment| moment["bytes"].as_u64().unwrap()).max().unwrap();
    assert!(most <= peak(&plan) && timeline.len() == 2 * 32 + 4);
}

#[test]
fn the_longest_sequence_fits_and_one_token_more_does_not() {
    let place = workplace(json!({}));
    let of = |seq_len: &str| {
        plan(
            &place,
            &[
                "config.json",
                "--model",
                "small",
                "--mesh",
                "1x2",
                "--memory-gib",
                "0.5",
                "--seq-len",
                seq_len,
            ],
        )
    };
    let first = of("512");
    assert_eq!(first["budget"]["fits"], true);
    let longest = first["budget"]["max_seq_len"].as_u64().unwrap();
    assert!(longest > 1024, "{longest}");
    assert_eq!(of(&longest.to_string())["budget"]["fits"], true);
    assert_eq!(of(&(longest + 1).to_string())["budget"]["fits"], false);
}

#[test]
fn without_a_length_the_longest_that_fits_is_planned() {
    let place = workplace(json!({ "ulysses": { "model": "nano", "seq_len": null } }));
    let plan = plan(&place, &["changed.json", "--memory-gib", "0.125"]);
    assert_eq!(plan["seq_len"], plan["budget"]["max_seq_len"]);
    assert!(peak(&plan) <= 1 << 27);
    let outcome = place.run(&["plan", "changed.json"]);
    outcome.assert_refused(2, &["seq_len", "--seq-len"]);
    let outcome = place.run(&["plan", "changed.json", "--memory-gib", "0.000001"]);
    assert_eq!(outcome.code, Some(1));
}

#[test]
fn features_and_meshes_change_what_they_are_for() {
    let place = workplace(
        json!({ "mesh_param": [4, 2], "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "ulysses": { "seq_len": 4096 } }),
    );
    let plan = plan(
        &place,
        &["changed.json", "--model", "llama3-8b", "--memory-gib", "80", "--ranks-per-node", "4"],
    );
    let peak_of = |change: &str| {
        let changes = plan["alternatives"].as_array().unwrap();
        let found = changes.iter().find(|known| known["change"].as_str().unwrap().starts_with(change));
        found.unwrap_or_else(|| panic!("no {change}"))["peak_bytes"].as_u64().unwrap()
    };
    let as_configured = peak_of("as configured");
    assert_eq!(as_configured, peak(&plan));
    for better in ["ZeRO stage 1", "ZeRO stage 2", "ZeRO stage 3"] {
        assert!(peak_of(better) < as_configured, "{better}");
    }
    // 18 bytes a parameter instead of 16: the master copy costs more than the few activations save.
    assert!(peak_of("bf16") > as_configured);
    assert!(peak_of("ZeRO stage 3") < peak_of("ZeRO stage 2"));
    let number = |mesh: &Value, key: &str| mesh[key].as_u64().unwrap();
    let meshes = plan["meshes"].as_array().unwrap().iter();
    let meshes: Vec<_> = meshes.map(|mesh| ["dp", "sp", "zero_stage"].map(|key| number(mesh, key))).collect();
    assert_eq!(meshes, [[8, 1, 0], [8, 1, 3], [4, 2, 0], [4, 2, 3], [2, 4, 0], [2, 4, 3], [1, 8, 0]]);
    let reasons = plan["meshes"].as_array().unwrap().iter().filter(|mesh| mesh["reason"].is_string());
    assert_eq!(reasons.count(), 1);
}

#[test]
fn suggested_meshes_are_those_that_the_size_of_the_partitions_lets_train() {
    let zero = json!({ "stage": 3, "mics_shard_size": 4 });
    let place = workplace(json!({
        "mesh_param": [4, 2], "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
        "ulysses": { "model": "nano", "seq_len": 64, "steps": 1 },
    }));
    let plan = plan(&place, &["changed.json", "--model", "nano"]);
    let meshes: Vec<Value> = plan["meshes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mesh| json!([mesh["dp"], mesh["sp"], mesh["shard_size"]]))
        .collect();
    assert_eq!(meshes, [json!([8, 1, 4]), json!([4, 2, null])]);
    let text = place.run(&["plan", "changed.json", "--model", "nano"]);
    assert!(text.assert_done().stdout.contains("8 × 1 (2 replicas of 4)"), "{}", text.stdout);
    assert!(text.stdout.contains("dp in multiples of 4 partitions"), "{}", text.stdout);
    // What is not listed is what training refuses.
    place.write_config(
        "other.json",
        json!({
            "train_batch_size": 8, "zero_optimization": { "stage": 3, "mics_shard_size": 4 },
            "ulysses": { "model": "nano", "steps": 1 },
        }),
    );
    place.run(&["train", "other.json", "--mesh", "2x4"]).assert_refused(2, &["mics_shard_size", "dp is 2"]);
    place.run(&["train", "other.json", "--mesh", "8x1"]).assert_done();
}

#[test]
fn what_a_gpu_offloads_is_counted_in_the_hosts_memory_and_files_are_refused() {
    let at = |device: &str| {
        workplace(json!({
            "train_batch_size": 1,
            "bf16": { "enabled": true }, "activation_checkpointing": { "cpu_checkpointing": true },
            "zero_optimization": { "stage": 3, "offload_optimizer": { "device": device } },
            "ulysses": { "model": "llama3-8b", "seq_len": 65536, "activation_checkpointing": true },
        }))
    };
    let place = at("cpu");
    let text = place.run(&["plan", "changed.json", "--device", "cuda"]);
    let said = &text.assert_done().stdout;
    for part in
        ["checkpointing to the host's memory", "optimizer state in the host's memory", "beside that up to"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    let [on_gpu, on_cpu] = ["cuda", "cpu"].map(|device| plan(&place, &["changed.json", "--device", device]));
    let offloaded = |plan: &Value| plan["rank"]["offloaded_bytes"].as_u64().unwrap();
    // Checkpoints of 32 layers; of a GPU the master copy and two moments besides.
    let checkpoints = 32 * 65_536 * 4096 * 2;
    let state = 12 * on_gpu["model"]["parameters"].as_u64().unwrap();
    assert_eq!(offloaded(&on_cpu), checkpoints);
    assert!((offloaded(&on_gpu) as f64 / (checkpoints + state) as f64 - 1.0).abs() < 1e-3, "{on_gpu}");
    assert!(peak(&on_gpu) + state / 2 < peak(&on_cpu));
    changed(
        &plan(&place, &["changed.json", "--device", "cuda", "--memory-gib", "999"]),
        "checkpoints on the GPU",
    );
    let refused = at("nvme").run(&["plan", "changed.json", "--device", "cuda"]);
    refused.assert_refused(2, &["`zero_optimization.offload_optimizer.device`", "set it to \"cpu\""]);
}

/// A row of what one change would make of a plan: its peak and its longest sequence.
fn changed(plan: &Value, change: &str) -> (u64, u64) {
    let rows = plan["alternatives"].as_array().unwrap();
    let row =
        rows.iter().find(|row| row["change"] == change).unwrap_or_else(|| panic!("no {change}: {rows:?}"));
    (row["peak_bytes"].as_u64().unwrap(), row["max_seq_len"].as_u64().unwrap())
}

#[test]
fn what_saves_memory_is_planned_where_it_is_configured_and_told_where_it_is_not() {
    let arguments = ["changed.json", "--model", "llama3-8b", "--mesh", "1x2", "--memory-gib", "192"];
    let of = |ulysses: Value, offload: bool| {
        let place = workplace(json!({
            "train_batch_size": 1, "bf16": { "enabled": true },
            "activation_checkpointing": { "cpu_checkpointing": offload }, "ulysses": ulysses,
        }));
        plan(&place, &arguments)
    };
    let plain = of(json!({ "seq_len": 65536, "activation_checkpointing": true }), false);
    let (peak_without, longest_without) = changed(&plain, "as configured");
    for feature in ["tiles of 1024 tokens", "checkpoints in a file"] {
        let (peak, longest) = changed(&plain, feature);
        assert!(peak < peak_without && longest > longest_without, "{feature}: {peak}, {longest}");
    }
    changed(&plain, "2 chunks of heads");
    let (peak, longest) = changed(&plain, "ZeRO stage 1 with optimizer state in a file");
    assert!(peak < peak_without && longest > longest_without, "{peak}, {longest}");
    let (less, _) = changed(&plain, "ZeRO stage 3 with optimizer state and parameters in files");
    assert!(less < peak, "{less}");
    let frugal = json!({
        "seq_len": 1_048_576, "activation_checkpointing": true, "tile_tokens": 1024, "head_chunks": 2,
    });
    let frugal = of(frugal, true);
    let (peak, longest) = changed(&frugal, "as configured");
    assert_eq!(frugal["features"]["head_chunks"], 2);
    assert_eq!(frugal["budget"]["max_seq_len"], longest);
    for feature in ["all heads at once", "all tokens at once", "checkpoints in memory"] {
        let (peak_without, longest_without) = changed(&frugal, feature);
        assert!(peak < peak_without && longest > longest_without, "{feature}: {peak}, {longest}");
    }
    let frozen = json!({ "match": "_proj", "frozen": true });
    let frozen = of(json!({ "seq_len": 65536, "parameter_groups": [frozen] }), false);
    // 8.03 B parameters of 2 bytes; all but a billion of them have neither gradient nor state.
    let persistent = frozen["rank"]["persistent_bytes"].as_u64().unwrap();
    assert!((30 << 30..33_u64 << 30).contains(&persistent), "{persistent}");
}

#[test]
fn a_plan_that_does_not_fit_says_so_and_is_no_failure() {
    let place = workplace(json!({}));
    let arguments = ["config.json", "--model", "llama3-8b", "--memory-gib", "80"];
    let outcome = place.run(&[&["plan"], &arguments[..]].concat());
    outcome.assert_done();
    assert!(outcome.stdout.contains("THIS DOES NOT FIT: rank 0 needs"), "{}", outcome.stdout);
    assert_eq!(plan(&place, &arguments)["budget"]["fits"], false);
}

#[test]
fn the_longest_rows_of_a_schedule_are_planned() {
    let place = workplace(json!({
        "ulysses": { "model": "nano", "seq_len": 64, "seq_len_schedule": [[10, 512], [20, 128]] },
    }));
    assert_eq!(plan(&place, &["changed.json"])["seq_len"], 512);
    assert_eq!(plan(&place, &["changed.json", "--seq-len", "96"])["seq_len"], 96);
}

#[test]
fn any_description_of_hugging_face_is_planned_without_weights() {
    let place = workplace(json!({}));
    let llama = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    place.write("hf/config.json", llama.to_string());
    let by_dir = plan(&place, &["config.json", "--model", "hf"]);
    let by_file = plan(&place, &["config.json", "--model", "hf/config.json"]);
    assert_eq!(peak(&by_dir), peak(&by_file));
    assert_eq!(by_dir["model"]["num_layers"], 3);
}

#[test]
fn what_cannot_be_planned_is_refused_by_name() {
    let place = workplace(json!({}));
    let refused = |arguments: &[&str], names: &[&str]| {
        place.run(&[&["plan", "config.json"], arguments].concat()).assert_refused(2, names);
    };
    refused(&[], &["--model"]);
    refused(&["--model", "llama9"], &["llama9", "llama3-405b"]);
    refused(&["--model", "nano", "--mesh", "1x8"], &["num_heads = 4", "sp = 8"]);
    refused(&["--model", "nano", "--memory-gib", "-1"], &["--memory-gib"]);
    refused(&["--model", "nano", "--ranks-per-node", "0"], &["--ranks-per-node"]);
    for seq_len in ["4294967296", "18446744073709551615"] {
        refused(&["--model", "nano", "--seq-len", seq_len], &["--seq-len", "4294967295", seq_len]);
    }
    let chunks = json!({ "ulysses": { "model": "nano", "seq_len": 64, "head_chunks": 16 } });
    let place = workplace(chunks);
    place.run(&["plan", "changed.json"]).assert_refused(2, &["head_chunks", "16"]);
    // What training refuses, in the same words.
    let checkpointing = json!({ "activation_checkpointing": true, "activation_checkpointing_interval": 9 });
    let group = json!({ "match": "no_such_name", "lr": 0.1 });
    for (features, names) in [
        (json!({ "head_chunks": 3 }), ["`ulysses.head_chunks` is 3", "at most 2 chunks"]),
        (checkpointing, ["activation_checkpointing_interval` is 9", "at most 2"]),
        (json!({ "parameter_groups": [group] }), ["no_such_name", "parameter_groups[0]"]),
    ] {
        let mut changes = json!({ "ulysses": { "model": "nano", "seq_len": 64, "steps": 1 } });
        changes["ulysses"].as_object_mut().unwrap().extend(features.as_object().unwrap().clone());
        let place = workplace(changes);
        let [planned, trained] = ["plan", "train"].map(|command| place.run(&[command, "changed.json"]));
        planned.assert_refused(2, &names);
        assert_eq!(planned.stderr.lines().last(), trained.stderr.lines().last());
    }
}

/// A profile whose rates are all the same number.
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
fn with_a_machine_the_time_of_a_step_is_told_and_drawn() {
    let place = workplace(json!({}));
    place.write("m.json", machine(1e9).to_string());
    place.write("fast.json", machine(4e9).to_string());
    let arguments = ["config.json", "--model", "nano", "--mesh", "2x2", "--machine"];
    let text = place.run(&[&["plan"], &arguments[..], &["m.json", "--html", "plan.html"]].concat());
    text.assert_done();
    assert!(text.stdout.contains("predicted time of a step on a paper machine"), "{}", text.stdout);
    assert!(place.read("plan.html").contains("Predicted time of a step on a paper machine"));
    let of = |file: &str| plan(&place, &[&arguments[..], &[file]].concat());
    let (slow, fast) = (of("m.json"), of("fast.json"));
    assert_eq!(slow["mesh"]["ranks_per_node"], 2);
    let number = |plan: &Value, key: &str| plan["step_time"][key].as_f64().unwrap();
    let parts = ["products", "attention", "elementwise", "exchange", "zero", "update", "file"];
    let seconds = parts.iter().map(|part| number(&slow, &format!("{part}_seconds"))).sum::<f64>();
    assert!((seconds / number(&slow, "total_seconds") - 1.0).abs() < 1e-12);
    // Four times the rates are a quarter of the time, and the same share of the peak.
    assert!((number(&slow, "total_seconds") / number(&fast, "total_seconds") - 4.0).abs() < 1e-9);
    assert!((number(&slow, "mfu") / number(&fast, "mfu") - 1.0).abs() < 1e-9);
    assert!((0.05..0.5).contains(&number(&slow, "mfu")), "{}", slow["step_time"]);
    // Without a machine nothing is said of time.
    assert_eq!(plan(&place, &arguments[..5]).get("step_time"), None);
}

#[test]
fn a_profile_that_is_none_or_does_not_tell_enough_is_refused_by_name() {
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

/// The words of the line of the text that begins with these.
fn line<'a>(text: &'a str, first: &str) -> &'a str {
    let found = text.lines().find(|line| line.trim_start().starts_with(first));
    found.unwrap_or_else(|| panic!("no {first:?} in {text}"))
}

#[test]
fn with_a_machine_every_change_and_mesh_has_its_time_and_the_fastest_is_told() {
    let batch = json!({ "mesh_param": [2, 2], "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1 });
    let place = workplace(batch);
    let mut profile = machine(1e9);
    profile["ranks_per_node"] = json!(4);
    // So slow to begin with that the number of collectives decides.
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
    // Four reductions and the sum of the losses, a tenth of a second each; the arithmetic is little beside them.
    assert_eq!((&fastest["dp"], &fastest["zero_stage"]), (&json!(4), &json!(0)));
    assert!((0.5..0.6).contains(&seconds(fastest)), "{fastest}");
    let text = place.run(&[&["plan"], &timed[..], &["--html", "plan.html"]].concat());
    let text = &text.assert_done().stdout;
    for head in ["change", "dp × sp"] {
        assert!(line(text, head).contains(" step  tokens/s"), "{text}");
    }
    assert!(line(text, "4 × 1").contains("◄ fastest of all"), "{text}");
    let note = "–: no time, since the machine profile does not tell `file_bytes_per_second`, `rates.bf16`";
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
    assert!(page.contains("sends least of all") && !page.contains("tokens/s"), "{page}");
}

#[test]
fn the_memory_of_a_plan_is_drawn_by_itself() {
    let place = workplace(json!({}));
    place.run(&["plan", "config.json", "--model", "nano", "--svg", "memory.svg"]).assert_done();
    let svg = place.read("memory.svg");
    assert!(svg.starts_with("<svg xmlns") && svg.ends_with("</svg>\n"), "{svg}");
    assert_eq!(svg.matches("<polygon").count(), 6, "an area for each category");
    assert!(svg.contains("prefers-color-scheme: dark") && !svg.contains("NaN"));
    let outcome = place.run(&["plan", "config.json", "--model", "nano", "--svg", "no/such/folder.svg"]);
    outcome.assert_refused(1, &["--svg", "no/such/folder.svg"]);
}

#[test]
fn the_scaling_study_is_one_command() {
    let place = Workplace::new();
    let outcome = place.run(&["plan", "--scaling", "--svg", "scaling.svg"]);
    outcome.assert_done();
    assert!(
        outcome.stdout.contains("synthetic MHA") && outcome.stdout.contains("too few heads"),
        "{}",
        outcome.stdout
    );
    assert!(place.read("scaling.svg").contains("llama3-405b"));
    let models = plan(&place, &["--scaling"]);
    let claimed = |point: usize| models[0]["points"][point]["claimed_bytes"].as_f64().unwrap();
    assert_eq!((claimed(0), models[0]["points"].as_array().unwrap().len()), (claimed(7), 8));
}
