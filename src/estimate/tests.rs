//! Dry steps of any size.

use super::{MemoryBudget, RankPlan, RankStep, Workload};
use crate::config::Config;
use crate::engine::EngineError;
use crate::model::{ModelConfig, preset, shape};
use crate::pipeline::{Action, Pass};
use serde_json::{Value, json};
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::memory::Category;

/// Every stage, with every feature that keeps something from one micro batch to the next.
pub(super) fn cases() -> Vec<(&'static str, DeviceKind, Value)> {
    let with = |stage: u8, mesh: [usize; 2], extra: Value| {
        let mut config = json!({ "zero_optimization": { "stage": stage }, "mesh_param": mesh });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let ulysses = |section: Value| json!({ "ulysses": section });
    let recompute = || json!({ "activation_checkpointing": true });
    let offload_checkpoints =
        || json!({ "activation_checkpointing": { "cpu_checkpointing": true }, "ulysses": recompute() });
    let offload = |device: &str| {
        let place = json!({ "device": device });
        let zero = json!({ "stage": 3, "offload_optimizer": place, "offload_param": place });
        json!({ "zero_optimization": zero, "bf16": { "enabled": true }, "ulysses": recompute() })
    };
    let frozen = json!({ "parameter_groups": [{ "match": "embed_tokens", "frozen": true }, { "match": "mlp", "frozen": true }] });
    let every_other = json!({ "activation_checkpointing": true, "activation_checkpointing_interval": 2 });
    let bounded = json!({ "activation_checkpointing": true, "tile_tokens": 5, "head_chunks": 2 });
    let hybrid = json!({ "zero_optimization": { "stage": 3, "mics_shard_size": 2 } });
    let (cpu, gpu) = (DeviceKind::Cpu, DeviceKind::Cuda);
    vec![
        ("stage 0", cpu, with(0, [1, 1], json!({}))),
        ("stage 0, sp 2", cpu, with(0, [1, 2], ulysses(recompute()))),
        ("stage 1, LAMB", cpu, with(1, [2, 1], json!({ "optimizer": { "type": "Lamb" } }))),
        ("stage 1, bf16", cpu, with(1, [2, 2], json!({ "bf16": { "enabled": true } }))),
        ("stage 2, means", cpu, with(2, [2, 2], json!({ "loss_normalization": "micro_batch" }))),
        ("stage 2, every other layer", cpu, with(2, [2, 1], ulysses(every_other))),
        ("stage 3", cpu, with(3, [2, 2], json!({}))),
        ("stage 3, tiles and chunks", cpu, with(3, [2, 2], ulysses(bounded.clone()))),
        ("stage 3, frozen", cpu, with(3, [2, 2], ulysses(frozen))),
        ("stage 3, hybrid", cpu, with(3, [4, 2], hybrid)),
        ("checkpoints in a file", cpu, with(2, [2, 2], offload_checkpoints())),
        ("checkpoints in host memory", gpu, with(2, [2, 2], offload_checkpoints())),
        ("state in files", cpu, with(3, [2, 2], offload("nvme"))),
        ("state in host memory", gpu, with(3, [2, 2], offload("cpu"))),
        ("a GPU's chunks", gpu, with(3, [1, 2], ulysses(bounded))),
        ("tp 2", cpu, with(0, [1, 1], json!({ "tensor_parallel_size": 2 }))),
        ("stage 2, pp 2, dp 2", cpu, with(2, [2, 1], json!({ "pipeline_parallel_size": 2 }))),
        (
            "stage 3, pp 3, sp 2, tp 2",
            cpu,
            with(3, [2, 2], json!({ "pipeline_parallel_size": 3, "tensor_parallel_size": 2 })),
        ),
        (
            "stage 2, pp 2 with 2 stages each",
            cpu,
            with(
                2,
                [1, 1],
                json!({ "pipeline_parallel_size": 2, "ulysses": { "pipeline": { "virtual_stages": 2 } } }),
            ),
        ),
        ("stage 3, tp 2, sp 2", cpu, with(3, [2, 2], json!({ "tensor_parallel_size": 2 }))),
    ]
}

fn model() -> ModelConfig {
    preset("nano").unwrap().with_num_layers(4)
}

pub(super) fn workload(config: &Value, device: DeviceKind, accumulation: usize) -> Workload {
    let mut config = config.clone();
    config["train_micro_batch_size_per_gpu"] = json!(2);
    config["gradient_accumulation_steps"] = json!(accumulation);
    config["ulysses"]["seq_len"] = json!(26);
    let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
    Workload { config, model: model(), document_len: None, ranks_per_node: 2, device }
}

#[test]
fn a_step_whose_repeated_micro_batches_are_counted_is_the_one_that_runs_each() {
    for (label, device, config) in cases() {
        // More than are run of the stages of a pipeline.
        let is_interleaved = config.pointer("/ulysses/pipeline").is_some();
        let all = if is_interleaved {
            14
        } else if config.get("pipeline_parallel_size").is_some() {
            9
        } else {
            6
        };
        let workload = workload(&config, device, all);
        let mesh = workload.mesh().unwrap();
        for rank in 0..workload.config.world_size() {
            let nodes = workload.nodes(&mesh, rank).unwrap();
            let step = |most| workload.warm_step_of(&mesh, rank, most).unwrap();
            let of = |most| RankPlan::sum(rank, step(most), &nodes).unwrap();
            let (counted, run) = (of(4), of(all));
            // A GPU keeps the losses of all tokens until the step, so more micro batches take more memory.
            let losses = if device == DeviceKind::Cuda { 2 * 2 * 26 * 4 } else { 0 };
            assert!((0..=losses).contains(&(run.peak_bytes - counted.peak_bytes)), "{label}, rank {rank}");
            assert_eq!(counted.sent_by_purpose, run.sent_by_purpose, "{label}, rank {rank}");
            assert_eq!(counted.offloaded_bytes, run.offloaded_bytes, "{label}, rank {rank}");
            let of = |most| RankStep::sum(step(most).events()).unwrap();
            assert_eq!(of(4), of(all), "{label}, rank {rank}");
        }
    }
}

#[test]
fn a_step_of_a_billion_micro_batches_runs_four() {
    for (label, device, config) in cases() {
        let workload = workload(&config, device, 1_000_000_000);
        let step = workload.first_step(&workload.mesh().unwrap(), 0).unwrap();
        let is_first = |action: Action| action.pass == Pass::Forward && action.chunk == 0;
        let forward = step.passes.iter().filter(|pass| is_first(pass.action));
        let times: Vec<u64> = forward.map(|pass| pass.times).collect();
        match workload.config.mesh.pp_size {
            _ if workload.config.ulysses.pipeline.virtual_stages > 1 => {
                let group = 499_999_996;
                assert_eq!(times, [1, 1, 1, 1, group, group, 1, 1, 1, 1], "{label}");
            }
            1 => assert_eq!(times, [1, 1, 999_999_997, 1], "{label}"),
            2 => assert_eq!(times, [1, 1, 1, 999_999_995, 1, 1], "{label}"),
            _ => assert_eq!(times, [1, 1, 1, 1, 999_999_993, 1, 1, 1], "{label}"),
        }
    }
}

#[test]
fn a_plan_of_a_huge_world_holds_neither_its_tensors_nor_its_tokens() {
    let config = json!({
        "train_micro_batch_size_per_gpu": 1, "mesh_param": [32, 128], "bf16": { "enabled": true },
        "zero_optimization": { "stage": 3 },
        "ulysses": { "seq_len": 1 << 24, "activation_checkpointing": true, "tile_tokens": 8192 },
    });
    let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
    let model = shape("llama3-405b").unwrap();
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        let (config, model) = (config.clone(), model.clone());
        let workload = Workload { config, model, document_len: None, ranks_per_node: 8, device };
        let plan = workload.plan().unwrap();
        // A checkpoint for each of 126 layers, of 131,072 tokens.
        assert!(plan.peak_bytes > 126 * 131_072 * 16_384 * 2, "{plan:?}");
    }
}

#[test]
fn a_step_that_cannot_be_counted_is_refused() {
    let (_, device, config) = cases().remove(6);
    let error = |accumulation: usize| workload(&config, device, accumulation).plan().unwrap_err();
    let micro_batch = |size: usize| {
        let mut workload = workload(&config, device, 1);
        (workload.config.micro_batch_size, workload.config.train_batch_size) = (size, 2 * size);
        workload.plan().unwrap_err()
    };
    for error in [error(1 << 57), error(1 << 46), micro_batch(1 << 46), micro_batch(1 << 56)] {
        assert!(matches!(error, EngineError::StepTooLarge { .. }), "{error}");
        assert!(error.to_string().contains("gradient_accumulation_steps"), "{error}");
    }
}

#[test]
fn tiles_of_tokens_are_counted_without_running_each() {
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        let of = |tile_tokens: Option<usize>| {
            let mut ulysses = json!({ "activation_checkpointing": true });
            if let Some(tile) = tile_tokens {
                ulysses["tile_tokens"] = json!(tile);
            }
            let workload = workload(&json!({ "mesh_param": [1, 2], "ulysses": ulysses }), device, 1);
            let step = workload.first_step(&workload.mesh().unwrap(), 0).unwrap();
            (RankStep::sum(step.events()).unwrap().flops, workload.plan().unwrap().peak_bytes)
        };
        // 26 tokens of two sequences on each rank: tiles of which the last is shorter, and one that is all.
        let (flops, peak) = of(None);
        for tile in [5, 13, 25, 26, 100] {
            let (of_tiles, peak_of_tiles) = of(Some(tile));
            assert_eq!(of_tiles, flops, "{device:?}, tiles of {tile}");
            // A tile of nearly all tokens saves nothing, and copies.
            assert!(
                tile > 13 || peak_of_tiles < peak,
                "{device:?}, tiles of {tile}: {peak_of_tiles} of {peak}"
            );
        }
    }
}

#[test]
fn a_micro_batch_of_more_documents_than_a_plan_lists_is_refused() {
    let (_, device, config) = cases().remove(0);
    let mut workload = workload(&config, device, 1);
    (workload.config.micro_batch_size, workload.config.train_batch_size) = (1 << 23, 1 << 23);
    workload.config.ulysses.seq_len = Some(1);
    let error = workload.plan().unwrap_err();
    assert!(matches!(error, EngineError::StepTooLarge { .. }), "{error}");
    assert!(error.to_string().contains("documents"), "{error}");
}

#[test]
fn state_in_host_memory_is_updated_there() {
    let most = |optimizer: &str, category: Category| {
        let place = json!({ "device": "cpu" });
        let config = json!({
            "mesh_param": [2, 1], "bf16": { "enabled": true }, "optimizer": { "type": optimizer },
            "zero_optimization": { "stage": 3, "offload_optimizer": place },
        });
        let plan = workload(&config, DeviceKind::Cuda, 2).plan_of(0).unwrap();
        plan.timeline.iter().map(|part| part.by_category[category as usize]).max().unwrap()
    };
    assert_eq!(most("AdamW", Category::Optimizer), 0, "no moment and no master copy is loaded");
    assert!(most("Lamb", Category::Optimizer) > 0, "LAMB is updated on the GPU");
    assert!(most("AdamW", Category::Gradients) > 0);
}

#[test]
fn an_undecided_attention_output_is_saved_only_if_it_fits() {
    let peak = |saves: Option<bool>| {
        let config = json!({ "mesh_param": [1, 2], "ulysses": { "activation_checkpointing": true } });
        let mut workload = workload(&config, DeviceKind::Cpu, 1).with_seq_len(1024);
        workload.config.ulysses.save_attention_output = saves;
        (workload.plan().unwrap().peak_bytes, workload)
    };
    let [(saved, _), (recomputed, _), (undecided, workload)] = [Some(true), Some(false), None].map(peak);
    assert!(saved > recomputed && undecided == saved);
    for (budget, saves) in [(None, true), (Some(saved), true), (Some(saved - 1), false), (Some(1), false)] {
        let candidate = workload.candidate(budget.map(MemoryBudget::from)).unwrap();
        assert_eq!(candidate.decided.config.ulysses.save_attention_output, Some(saves), "{budget:?}");
        assert_eq!(candidate.plan.peak_bytes, if saves { saved } else { recomputed }, "{budget:?}");
    }
}
