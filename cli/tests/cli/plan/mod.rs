//! `ulysses plan`.

mod fit;
mod times;

use crate::support::cli::Workplace;
use serde_json::{Value, json};

/// A workplace with a config that names no model.
pub(super) fn workplace(changes: Value) -> Workplace {
    let place = Workplace::new();
    place.write_config("config.json", json!({ "ulysses": { "model": null, "seq_len": 4096 } }));
    place.write_config("changed.json", changes);
    place
}

/// The layers of the model `shallow`, a fourth of those of llama3-8b.
const SHALLOW_LAYERS: u64 = 8;

/// A workplace with the model `shallow` too: searches of its longest sequences take a fourth of the time.
fn workplace_with_shallow(changes: Value) -> Workplace {
    let place = workplace(changes);
    let llama = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": SHALLOW_LAYERS, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    });
    place.write("shallow/config.json", llama.to_string());
    place
}

pub(super) fn plan(place: &Workplace, arguments: &[&str]) -> Value {
    let outcome = place.run(&[&["plan"], arguments, &["--json"]].concat());
    outcome.assert_done();
    serde_json::from_str(&outcome.stdout).unwrap()
}

fn peak(plan: &Value) -> u64 {
    plan["rank"]["peak_bytes"].as_u64().unwrap()
}

#[test]
fn a_plan_shows_memory_traffic_and_flops_that_add_up() {
    let place = workplace(json!({}));
    let text = place.run(&["plan", "config.json", "--model", "llama3-8b", "--mesh", "1x4"]);
    text.assert_done();
    for part in
        ["memory per rank: ", "exchange forward", "effect of single changes", "◄ sends the fewest bytes"]
    {
        assert!(text.stdout.contains(part), "{part}: {}", text.stdout);
    }
    assert!(text.stdout.contains("use --memory-gib N to check whether this fits"), "{}", text.stdout);
    let of_budget = |text: &str| text.lines().any(|line| line.ends_with("longest sequence (tokens)  fits"));
    assert!(!of_budget(&text.stdout), "without a memory nothing can fit: {}", text.stdout);
    let text =
        place.run(&["plan", "config.json", "--model", "llama3-8b", "--mesh", "1x4", "--memory-gib", "80"]);
    assert!(of_budget(&text.assert_done().stdout), "{}", text.stdout);
    let plan = plan(&place, &["config.json", "--model", "llama3-8b", "--mesh", "1x4"]);
    assert_eq!(plan["model"]["parameters"], 8_030_261_248_u64);
    let categories = plan["rank"]["peak_by_category"].as_object().unwrap();
    assert_eq!(categories.values().map(|bytes| bytes.as_u64().unwrap()).sum::<u64>(), peak(&plan));
    // Stage 0, f32: 16 bytes per parameter.
    let persistent = plan["rank"]["persistent_bytes"].as_u64().unwrap();
    assert!((16 * 8_030_261_248..17 * 8_030_261_248).contains(&persistent), "{persistent}");
    let timeline = plan["rank"]["timeline"].as_array().unwrap();
    let most = timeline.iter().map(|moment| moment["bytes"].as_u64().unwrap()).max().unwrap();
    assert!(most <= peak(&plan) && timeline.len() == 2 * 32 + 4);
}

#[test]
fn repeated_micro_batches_are_counted_not_listed() {
    let place = workplace(json!({}));
    let of_batch = |batch: Value| {
        place.write_config("batch.json", json!({ "train_batch_size": null, "ulysses": { "seq_len": 4096 } }));
        let mut config = place.read_json("batch.json");
        config.as_object_mut().unwrap().extend(batch.as_object().unwrap().clone());
        config["train_micro_batch_size_per_gpu"] = json!(1);
        place.write("batch.json", config.to_string());
    };
    let planned = |batch: Value| {
        of_batch(batch);
        plan(&place, &["batch.json", "--model", "small", "--mesh", "2x2"])
    };
    let accumulated = |steps: u64| planned(json!({ "gradient_accumulation_steps": steps }));
    let [four, billion] = [4, 1_000_000_000].map(accumulated);
    assert_eq!(peak(&billion), peak(&four));
    assert_eq!(billion["rank"]["timeline"], four["rank"]["timeline"]);
    assert_eq!(billion["tokens_per_step"], 2 * 4096 * 1_000_000_000_u64);
    let flops = |plan: &Value| plan["rank"]["model_flops"].as_f64().unwrap();
    assert!((flops(&billion) / flops(&four) / 2.5e8 - 1.0).abs() < 1e-12);
    let of_train_batch = planned(json!({ "train_batch_size": 2_000_000_000_u64 }));
    assert_eq!(of_train_batch["rank"], billion["rank"]);
    of_batch(json!({ "train_batch_size": 9_000_000_000_000_000_000_u64 }));
    let expected =
        ["a step of 9000000000000000000 sequences of 4096 tokens is too large", "`train_batch_size`"];
    place.run(&["plan", "batch.json", "--model", "small", "--mesh", "2x2"]).assert_refused(2, &expected);
}

#[test]
fn a_plan_counts_parameters_and_notes_a_single_partition() {
    let place = workplace(json!({}));
    place.write_config(
        "zero.json",
        json!({ "zero_optimization": { "stage": 3 }, "ulysses": { "seq_len": 64 } }),
    );
    let text = |mesh: &str| place.run(&["plan", "zero.json", "--mesh", mesh]).assert_done().stdout.clone();
    let alone = text("1x2");
    assert!(alone.contains("model   nano: 0.12 M parameters, "), "{alone}");
    assert!(alone.contains("\nnote    ZeRO stage 3 has 1 partition, because dp is 1: "), "{alone}");
    assert!(!text("2x1").contains("note  "));
    let of_shards = json!({ "stage": 1, "mics_shard_size": 1 });
    place.write_config("zero.json", json!({ "zero_optimization": of_shards, "ulysses": { "seq_len": 64 } }));
    let shards = text("2x1");
    assert!(shards.contains("ZeRO stage 1 has 1 partition, because its shard size is 1: "), "{shards}");
    place.write_config("zero.json", json!({ "ulysses": { "seq_len": 64 } }));
    assert!(!text("1x2").contains("note  "), "stage 0 promises no partitions");
}

#[test]
fn a_plan_warns_and_counts_the_values_of_auto() {
    let place = workplace(json!({}));
    let auto = json!({ "gradient_clipping": "auto", "communication_data_type": "bf16", "ulysses": { "seq_len": 64 } });
    place.write_config("auto.json", auto);
    let stderr = place.run(&["plan", "auto.json", "--mesh", "1x2"]).assert_done().stderr.clone();
    for expected in [
        "warning: `communication_data_type`",
        "1 value set by \"auto\"; list them with `ulysses config resolve auto.json`",
    ] {
        assert!(stderr.contains(expected), "{expected}: {stderr}");
    }
}

#[test]
fn flags_change_the_plan() {
    let place = workplace(json!({}));
    let arguments = ["config.json", "--model", "small", "--mesh", "2x1"];
    let flags = ["--set", "bf16.enabled=true", "--zero-stage", "3", "--batch-size", "8", "--lr", "0.1"];
    let plan = plan(&place, &[&arguments[..], &flags].concat());
    assert_eq!((&plan["dtype"], &plan["zero_stage"]), (&json!("bf16"), &json!(3)));
    assert_eq!(plan["micro_batch_size"], 4);
}

#[test]
fn the_longest_sequence_fits_and_one_token_more_per_rank_does_not() {
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
    assert_eq!(of(&(longest + 2).to_string())["budget"]["fits"], false);
}

#[test]
fn without_a_length_the_longest_sequence_that_fits_is_planned() {
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
fn features_and_meshes_change_memory_and_traffic() {
    let place = workplace(
        json!({ "mesh_param": [4, 2], "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "ulysses": { "seq_len": 4096 } }),
    );
    let plan = plan(&place, &["changed.json", "--model", "llama3-8b", "--ranks-per-node", "4"]);
    let peak_of = |change: &str| {
        let changes = plan["alternatives"].as_array().unwrap();
        let found = changes.iter().find(|known| known["change"].as_str().unwrap().starts_with(change));
        found.unwrap_or_else(|| panic!("no {change}"))["peak_bytes"].as_u64().unwrap()
    };
    let as_configured = peak_of("as configured");
    assert_eq!(as_configured, peak(&plan));
    for better in ["ZeRO stage 3 over dp × sp", "ZeRO stage 1", "ZeRO stage 2", "ZeRO stage 3"] {
        assert!(peak_of(better) < as_configured, "{better}");
    }
    // 18 bytes per parameter instead of 16: the master copy costs more than the few activations save.
    assert!(peak_of("bf16") > as_configured);
    assert!(peak_of("ZeRO stage 3") < peak_of("ZeRO stage 2"));
    let number = |mesh: &Value, key: &str| mesh[key].as_u64().unwrap();
    let meshes = plan["meshes"].as_array().unwrap().iter();
    let meshes: Vec<_> = meshes
        .map(|mesh| {
            let axes = mesh["zero_partition_axes"].as_array().unwrap().len();
            (["dp", "sp", "ring_size", "zero_stage"].map(|key| number(mesh, key)), axes)
        })
        .collect();
    // Across two nodes of four ranks there is also a ring of two groups that fit a node.
    let over_dp = [
        [8, 1, 1, 0],
        [8, 1, 1, 3],
        [4, 2, 1, 0],
        [4, 2, 1, 3],
        [2, 4, 1, 0],
        [2, 4, 1, 3],
        [1, 8, 2, 0],
        [1, 8, 1, 0],
    ];
    let over_sp = [[4, 2, 1, 3], [2, 4, 1, 3], [1, 8, 2, 3], [1, 8, 1, 3]];
    for (expected, num_axes) in [(&over_dp[..], 1), (&over_sp, 2)] {
        let found: Vec<_> =
            meshes.iter().filter(|(_, axes)| *axes == num_axes).map(|(mesh, _)| *mesh).collect();
        assert_eq!(found, expected);
    }
    let reasons = plan["meshes"].as_array().unwrap().iter().filter(|mesh| mesh["reason"].is_string());
    assert_eq!(reasons.count(), 1);
}

#[test]
fn tensor_parallel_ranks_divide_the_model_state_and_stay_in_suggested_meshes() {
    let place = workplace(json!({}));
    let of_mesh = |mesh| plan(&place, &["config.json", "--model", "llama3-8b", "--mesh", mesh]);
    let (whole, divided) = (of_mesh("2x2"), of_mesh("2x2x4"));
    let sizes = |plan: &Value| ["dp", "sp", "tp"].map(|axis| plan["mesh"][axis].as_u64());
    assert_eq!(sizes(&whole), [Some(2), Some(2), None]);
    assert_eq!(sizes(&divided), [Some(2), Some(2), Some(4)]);
    let persistent = |plan: &Value| plan["rank"]["persistent_bytes"].as_u64().unwrap() as f64;
    // All but the embedding and the head.
    let share = persistent(&divided) / persistent(&whole);
    assert!((0.25..0.4).contains(&share), "{share}");
    assert!(divided["rank"]["sent_by_purpose"]["exchange_tokens"].is_object(), "{}", divided["rank"]);
    let meshes = divided["meshes"].as_array().unwrap();
    assert!(meshes.len() > 2 && meshes.iter().all(|mesh| mesh["tp"] == 4), "{meshes:?}");
    assert!(meshes.iter().all(|mesh| mesh["zero_partition_axes"] == json!(["dp"])), "{meshes:?}");
    let text = place.run(&["plan", "config.json", "--model", "llama3-8b", "--mesh", "dp=2,sp=2,tp=4"]);
    assert!(text.assert_done().stdout.contains("mesh    dp 2 × sp 2 × tp 4, "), "{}", text.stdout);
    let heads = place.run(&["plan", "config.json", "--model", "nano", "--mesh", "1x1x5"]);
    heads.assert_refused(2, &["tp = 5", "tp of 1 to 4 is valid"]);
}

#[test]
fn suggested_meshes_are_multiples_of_the_shard_size() {
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
    assert_eq!(meshes, [json!([8, 1, 4]), json!([4, 2, null]), json!([4, 2, null])]);
    let text = place.run(&["plan", "changed.json", "--model", "nano"]);
    assert!(text.assert_done().stdout.contains("8 × 1 (2 replicas of 4)"), "{}", text.stdout);
    assert!(text.stdout.contains("dp a multiple of the shard size 4"), "{}", text.stdout);
    // Unlisted meshes are those that training refuses.
    place.write_config(
        "other.json",
        json!({
            "train_batch_size": 8, "zero_optimization": { "stage": 3, "mics_shard_size": 4 },
            "ulysses": { "model": "nano", "steps": 1 },
        }),
    );
    place
        .run(&["train", "other.json", "--mesh", "2x4"])
        .assert_refused(2, &["mics_shard_size", "dp 2 is not a multiple of"]);
    place.run(&["train", "other.json", "--mesh", "8x1"]).assert_done();
}

#[test]
fn offload_of_a_gpu_goes_to_host_memory_and_files_are_refused() {
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
        ["checkpointing with offload to host memory", "optimizer state in host memory", "host memory: "]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    let [on_gpu, on_cpu] = ["cuda", "cpu"].map(|device| plan(&place, &["changed.json", "--device", device]));
    let offloaded = |plan: &Value| plan["rank"]["offloaded_bytes"].as_u64().unwrap();
    // Activation checkpoints of 32 layers; on a GPU also the master copy, two moments and the gradient.
    let checkpoints = 32 * 65_536 * 4096 * 2;
    let state = 16 * on_gpu["model"]["parameters"].as_u64().unwrap();
    assert_eq!(offloaded(&on_cpu), checkpoints);
    // Host memory stays reserved for the updated parameters, in bf16, of three pieces of every size: the two of the
    // embedding and of the head, and that of a layer.
    let updated = offloaded(&on_gpu) - checkpoints - state;
    let most = 3 * 2 * (on_gpu["model"]["parameters"].as_u64().unwrap() / 32 + 2 * 128_256 * 4096 / 2);
    assert!(updated <= most, "{updated} of at most {most}: {on_gpu}");
    assert!(peak(&on_gpu) + state / 2 < peak(&on_cpu));
    changed(&on_gpu, "activation checkpoints on the GPU");
    let refused = at("nvme").run(&["plan", "changed.json", "--device", "cuda"]);
    refused.assert_refused(2, &["`zero_optimization.offload_optimizer.device`", "set it to \"cpu\""]);
}

/// The row of a single change.
fn changed<'a>(plan: &'a Value, change: &str) -> &'a Value {
    let rows = plan["alternatives"].as_array().unwrap();
    rows.iter().find(|row| row["change"] == change).unwrap_or_else(|| panic!("no {change}: {rows:?}"))
}

#[test]
fn memory_saving_features_are_planned_or_listed_as_changes() {
    let of = |ulysses: &Value, offload: bool, model: &[&str]| {
        let place = workplace_with_shallow(json!({
            "train_batch_size": 1, "bf16": { "enabled": true },
            "activation_checkpointing": { "cpu_checkpointing": offload }, "ulysses": ulysses,
        }));
        plan(&place, &[&["changed.json", "--mesh", "1x2", "--model"], model].concat())
    };
    // Peaks are those of llama3-8b, and longest sequences, which are searched, those of `shallow`.
    let both = |ulysses: Value, offload: bool| {
        [&["llama3-8b"][..], &["shallow", "--memory-gib", "96"]].map(|model| of(&ulysses, offload, model))
    };
    let effect = |[whole, shallow]: &[Value; 2], change: &str| {
        let longest = changed(shallow, change)["max_seq_len"].as_u64().unwrap();
        (changed(whole, change)["peak_bytes"].as_u64().unwrap(), longest)
    };
    let plain = both(json!({ "seq_len": 65536, "activation_checkpointing": true }), false);
    let (peak_without, longest_without) = effect(&plain, "as configured");
    for feature in ["tiles of 1024 tokens", "activation checkpoints in a file"] {
        let (peak, longest) = effect(&plain, feature);
        assert!(peak < peak_without && longest > longest_without, "{feature}: {peak}, {longest}");
    }
    effect(&plain, "2 head chunks");
    let (peak, longest) = effect(&plain, "ZeRO stage 1 with optimizer state in a file");
    assert!(peak < peak_without && longest > longest_without, "{peak}, {longest}");
    let (less, _) = effect(&plain, "ZeRO stage 3 with optimizer state and parameters in files");
    assert!(less < peak, "{less}");
    let frugal = json!({
        "seq_len": 1_048_576, "activation_checkpointing": true, "tile_tokens": 1024, "head_chunks": 2,
    });
    let frugal = both(frugal, true);
    let (peak, longest) = effect(&frugal, "as configured");
    assert_eq!(frugal[1]["features"]["head_chunks"], 2);
    assert_eq!(frugal[1]["budget"]["max_seq_len"], longest);
    for feature in ["all heads at once", "all tokens at once", "activation checkpoints in memory"] {
        let (peak_without, longest_without) = effect(&frugal, feature);
        assert!(peak < peak_without && longest > longest_without, "{feature}: {peak}, {longest}");
    }
    let frozen = json!({ "match": "_proj", "frozen": true });
    let frozen = of(&json!({ "seq_len": 65536, "parameter_groups": [frozen] }), false, &["llama3-8b"]);
    // 8.03 B parameters of 2 bytes; all but a billion are frozen, without gradient and state.
    let persistent = frozen["rank"]["persistent_bytes"].as_u64().unwrap();
    assert!((30 << 30..33_u64 << 30).contains(&persistent), "{persistent}");
}

#[test]
fn a_plan_that_does_not_fit_exits_with_0() {
    let place = workplace(json!({}));
    let arguments = ["config.json", "--model", "llama3-8b", "--memory-gib", "80"];
    let outcome = place.run(&[&["plan"], &arguments[..]].concat());
    outcome.assert_done();
    assert!(outcome.stdout.contains("DOES NOT FIT: rank 0 needs"), "{}", outcome.stdout);
    assert_eq!(plan(&place, &arguments)["budget"]["fits"], false);
}

#[test]
fn the_longest_sequences_of_a_schedule_are_planned() {
    let place = workplace(json!({
        "ulysses": { "model": "nano", "seq_len": 64, "seq_len_schedule": [[10, 512], [20, 128]] },
    }));
    assert_eq!(plan(&place, &["changed.json"])["seq_len"], 512);
    assert_eq!(plan(&place, &["changed.json", "--seq-len", "96"])["seq_len"], 96);
}

#[test]
fn a_hugging_face_config_is_planned_without_weights() {
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
fn invalid_plans_are_refused_by_name() {
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
    // Training refuses these with the same words.
    let checkpointing = json!({ "activation_checkpointing": true, "activation_checkpointing_interval": 9 });
    let group = json!({ "match": "no_such_name", "lr": 0.1 });
    for (features, names) in [
        (json!({ "head_chunks": 3 }), ["`ulysses.head_chunks` is 3", "expected at most 2"]),
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

#[test]
fn host_memory_of_a_node_limits_what_gpus_offload() {
    let seq_len = 131_072;
    let place = workplace_with_shallow(json!({
        "mesh_param": [1, 2], "train_batch_size": 1, "bf16": { "enabled": true },
        "zero_optimization": { "stage": 3, "offload_optimizer": { "device": "cpu" } },
        "activation_checkpointing": { "cpu_checkpointing": true },
        "ulysses": { "seq_len": seq_len, "activation_checkpointing": true, "zero_partition_axes": ["dp", "sp"] },
    }));
    let on_gpus = ["changed.json", "--model", "shallow", "--device", "cuda", "--memory-gib", "80"];
    let with = |host: &[&str]| plan(&place, &[&on_gpus[..], host].concat());
    let (unlimited, limited) = (with(&[]), with(&["--host-memory-gib", "49"]));
    // 8192 bytes per token and layer, and 16 bytes of state and gradient per parameter, together 49.7 GiB; and the parameters that are
    // being updated.
    let state = 16 * unlimited["model"]["parameters"].as_u64().unwrap();
    let least = 8192 * seq_len * SHALLOW_LAYERS + state;
    let host = unlimited["host_bytes_per_node"].as_u64().unwrap();
    assert!((least..least + (5 << 30)).contains(&host), "{host} of at least {least}");
    let longest = |plan: &Value| plan["budget"]["max_seq_len"].as_u64().unwrap();
    assert!(unlimited["budget"]["fits"] == true && limited["budget"]["fits"] == false);
    assert!(longest(&limited) < seq_len && seq_len < longest(&unlimited), "{}", longest(&limited));
    let at_longest = with(&["--host-memory-gib", "49", "--seq-len", &longest(&limited).to_string()]);
    assert!(at_longest["budget"]["fits"] == true, "{}", at_longest["budget"]);
    let text = |host: &[&str]| place.run(&[&["plan"], &on_gpus[..], host].concat());
    assert!(text(&[]).assert_done().stdout.contains("(host memory not checked; set --host-memory-gib)"));
    let text = text(&["--host-memory-gib", "49"]);
    assert!(text.assert_done().stdout.contains("GiB of host memory,"), "{text:?}");
    assert!(text.stdout.contains("more than 49.00 GiB per node"), "{text:?}");
    place.run(&["plan", "changed.json", "--host-memory-gib", "1"]).assert_refused(2, &["--memory-gib"]);
}
