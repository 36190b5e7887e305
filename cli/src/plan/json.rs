//! Plans as JSON.

use super::Report;
use super::budget::Available;
use serde_json::{Value, json};
use std::ops::Range;
use ulysses::config::{Config, ParameterGroup};
use ulysses::estimate::{Alternative, Candidate, MeshChoice, RankPlan, StagePlan, StepTime};

/// Keys of a plan that are left out if they have no value.
const OPTIONAL: [&str; 5] = ["assumed", "zero_note", "copies_in_memory", "step_time", "pipeline"];

pub(super) fn plan(report: &Report) -> Value {
    let Candidate { workload, decided, plan, .. } = &report.planned;
    let (config, model) = (&workload.config, &workload.model);
    let layer = model.attention();
    let (ulysses, zero) = (&config.ulysses, &config.zero);
    let is_frozen = |name: &str| ParameterGroup::is_frozen(&ulysses.parameter_groups, name);
    let features = json!({
        "activation_checkpointing_interval": ulysses.activation_checkpointing_interval,
        "offload_checkpoints": config.activation_checkpointing.cpu_checkpointing,
        "save_attention_output": decided.config.saves_attention_output(),
        "offload_optimizer": zero.offload_optimizer.device(), "offload_param": zero.offload_param.device(),
        "tile_tokens": ulysses.tile_tokens, "head_chunks": ulysses.head_chunks,
        "frozen_parameters": model.num_parameters_where(is_frozen),
    });
    let model = json!({
        "name": report.name, "parameters": model.num_parameters(), "num_layers": model.num_layers(),
        "hidden_size": model.hidden_size, "num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads,
        "vocab_size": model.vocab_size,
    });
    let budget = report.available.map(|available| {
        let (fits, longest) = (report.planned.fits(), report.planned.max_seq_len);
        joined([memory(available), json!({ "fits": fits, "max_seq_len": longest })])
    });
    let settings = json!({
        "device": workload.device.name(),
        "assumed": report.assumed,
        "model": model,
        "mesh": joined([sizes(config), json!({
            "shape": config.training_shape().to_string(), "ranks": config.world_size(),
            "ring_size": config.seq_sharding().ring_size, "ranks_per_node": workload.ranks_per_node,
        })]),
        "shard_size": zero.mics_shard_size,
        "zero_stage": zero.stage, "zero_partition_axes": config.zero_axes(),
        "zero_note": config.zero_partition_note(),
        "dtype": config.precision.dtype().as_str(),
        "activation_checkpointing": ulysses.activation_checkpointing,
        "features": features,
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "seq_len": report.seq_len, "tokens_per_step": config.train_batch_size * report.seq_len,
    });
    let found = json!({
        "rank": plan,
        "host_bytes_per_node": report.planned.host_bytes_per_node,
        "copies_in_memory": report.copies_in_memory,
        "pipeline": pipeline(report),
        "step_time": report.planned.time,
        "budget": budget,
        "alternatives": report.alternatives.iter().map(alternative).collect::<Vec<_>>(),
        "meshes": report.meshes.iter().map(mesh).collect::<Vec<_>>(),
    });
    let mut json = joined([settings, found]);
    if let Some(entries) = json.as_object_mut() {
        entries.retain(|key, value| !value.is_null() || !OPTIONAL.contains(&key.as_str()));
    }
    json
}

/// The stages of a pipeline, if there are several.
fn pipeline(report: &Report) -> Option<Value> {
    let workload = &report.planned.workload;
    let stage = |StagePlan { layers, plan }: &StagePlan| {
        json!({
            "layers": ranges(layers), "rank": plan.rank, "peak_bytes": plan.peak_bytes,
            "persistent_bytes": plan.persistent_bytes, "model_flops": plan.model_flops,
        })
    };
    let json = json!({
        "schedule": workload.config.ulysses.pipeline.schedule,
        "virtual_stages": workload.config.ulysses.pipeline.virtual_stages,
        "bubble": workload.pipeline_bubble(),
        "stages": report.stages.iter().map(stage).collect::<Vec<_>>(),
    });
    (!report.stages.is_empty()).then_some(json)
}

/// The range of layers of a stage, or those of a rank's virtual stages.
fn ranges(layers: &[Range<usize>]) -> Value {
    match layers {
        [layers] => json!([layers.start, layers.end]),
        several => several.iter().map(|layers| json!([layers.start, layers.end])).collect(),
    }
}

/// The memory for tensors.
pub(super) fn memory(Available { budget, reserve_bytes }: Available) -> Value {
    json!({
        "bytes": budget.rank_bytes, "reserve_bytes": reserve_bytes,
        "host_bytes_per_node": budget.host_bytes_per_node,
    })
}

fn alternative(Alternative { change, keys, candidate }: &Alternative) -> Value {
    let RankPlan { peak_bytes, persistent_bytes, sent, model_flops, recompute_flops, .. } = &candidate.plan;
    let effect = json!({
        "change": change, "keys": keys, "peak_bytes": peak_bytes, "persistent_bytes": persistent_bytes,
        "host_bytes_per_node": candidate.host_bytes_per_node, "sent_bytes": sent.total(),
        "flops": model_flops + recompute_flops,
    });
    joined([effect, speed(candidate), json!({ "max_seq_len": candidate.max_seq_len })])
}

fn mesh(MeshChoice { candidate, reason, is_longest }: &MeshChoice) -> Value {
    let Candidate { workload, plan, .. } = candidate;
    let config = &workload.config;
    let settings = json!({
        "ring_size": config.seq_sharding().ring_size,
        "shard_size": config.zero_shard_size(), "num_partitions": config.zero_world_size(),
        "zero_stage": config.zero.stage, "zero_partition_axes": config.zero_axes(),
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "peak_bytes": plan.peak_bytes, "persistent_bytes": plan.persistent_bytes,
        "host_bytes_per_node": candidate.host_bytes_per_node, "fits": candidate.fits(),
        "intra_node_bytes": plan.sent.intra_node_bytes, "inter_node_bytes": plan.sent.inter_node_bytes,
    });
    let marks = json!({ "max_seq_len": candidate.max_seq_len, "reason": reason, "is_longest": is_longest });
    joined([sizes(config), settings, speed(candidate), marks])
}

/// Settings that were searched, and their plan.
pub(super) fn choice(candidate: &Candidate) -> Value {
    let config = &candidate.workload.config;
    let ulysses = &config.ulysses;
    let json = json!({
        "ring_size": ulysses.ring_size,
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "zero_stage": config.zero.stage, "zero_partition_axes": config.zero_axes(),
        "activation_checkpointing": ulysses.activation_checkpointing,
        "activation_checkpointing_interval": ulysses.activation_checkpointing_interval,
        "save_attention_output": config.saves_attention_output(),
        "offload_checkpoints": config.activation_checkpointing.cpu_checkpointing,
        "offload_optimizer": config.zero.offload_optimizer.device(),
        "offload_param": config.zero.offload_param.device(),
        "tile_tokens": ulysses.tile_tokens, "head_chunks": ulysses.head_chunks,
        "rank": candidate.plan, "host_bytes_per_node": candidate.host_bytes_per_node,
    });
    joined([sizes(config), json, speed(candidate)])
}

/// The sizes of a mesh; pp and tp only if they have more than one rank.
fn sizes(config: &Config) -> Value {
    config.mesh.shape().axes().into_iter().map(|axis| (axis.name, Value::from(axis.size))).collect()
}

/// The step time, or the rate that it lacks.
fn speed(candidate: &Candidate) -> Value {
    match (&candidate.time, candidate.profile_lacks) {
        (Some(StepTime { total_seconds, tokens_per_second, .. }), _) => {
            json!({ "step_seconds": total_seconds, "tokens_per_second": tokens_per_second })
        }
        (None, Some(key)) => json!({ "profile_lacks": key }),
        (None, None) => Value::Null,
    }
}

/// Joins objects; other values are left out.
pub(super) fn joined<const N: usize>(objects: [Value; N]) -> Value {
    let entries = objects.into_iter().filter_map(|object| match object {
        Value::Object(entries) => Some(entries),
        _ => None,
    });
    Value::Object(entries.flatten().collect())
}
