//! The plan of a run next to its measurements.

use super::run::RunFiles;
use crate::plan::pictures;
use crate::template::chart::Chart;
use serde_json::{Value, json};
use ulysses::device::DeviceKind;
use ulysses::estimate::{RankPlan, Workload};
use ulysses::memory::{ByCategory, Category};
use ulysses::model::ModelConfig;

/// Returns charts of memory; none if config or model are missing or of another version.
pub(super) fn charts(run: &RunFiles) -> Value {
    let Some(workload) = workload(run) else { return Value::Null };
    let Ok(plan) = workload.plan() else { return Value::Null };
    let rank = measured(run, plan.rank).filter(|rank| rank["peak_bytes"].as_u64() > Some(0));
    let peak = rank.and_then(|rank| rank["peak_bytes"].as_u64());
    let line = peak.map(|peak| (format!("measured peak, rank {}", plan.rank), peak));
    let is_recorded =
        |category: &Category| rank.is_some_and(|rank| rank["peak_by_category"][category.name()].is_number());
    json!({
        "memory": pictures::memory(&plan.timeline, line.as_slice()).content(),
        "measured_rank": rank.filter(|_| Category::ALL.iter().all(is_recorded)),
        "over_step": over_step(run, &plan).map(|chart| chart.content()),
        "rank": plan,
    })
}

/// Returns the workload of the run with its longest sequences.
fn workload(run: &RunFiles) -> Option<Workload> {
    let mut config = run.parsed_config()?;
    config.ulysses.seq_len = config.longest_seq_len();
    let record = &run.record;
    let threads = record["environment"]["threads_per_rank"].as_u64();
    config.ulysses.threads_per_rank =
        threads.and_then(|threads| usize::try_from(threads).ok()).or(config.ulysses.threads_per_rank);
    let model = ModelConfig::from_hf_json(record["model"]["config"].clone(), "run.json").ok()?;
    // Nodes do not affect memory.
    let device = if record["environment"]["device"] == "cuda" { DeviceKind::Cuda } else { DeviceKind::Cpu };
    Some(Workload { ranks_per_node: config.world_size(), config, model, document_len: None, device })
}

/// Charts the rank's measured memory over a step, if recorded.
fn over_step(run: &RunFiles, plan: &RankPlan) -> Option<Chart> {
    let is_of_rank = |watched: &&Value| watched["rank"].as_u64() == Some(plan.rank as u64);
    let watched = run.record["memory_over_step"].as_array()?.iter().find(is_of_rank)?;
    let held = watched["parts"].as_array()?.iter().map(|part| {
        let held: ByCategory = serde_json::from_value(part["by_category"].clone()).ok()?;
        Some(held.values())
    });
    let held: Vec<_> = held.collect::<Option<_>>()?;
    let is_counted = held.iter().flatten().any(|bytes| *bytes > 0);
    is_counted
        .then(|| pictures::measured_memory(watched["step"].as_u64().unwrap_or(0), &held, &plan.timeline))
}

/// Returns the record of a rank, if its memory is host memory, which is counted.
fn measured(run: &RunFiles, rank: usize) -> Option<&Value> {
    let is_on_host = run.record["environment"]["device"] == "cpu";
    let mut ranks = run.record["ranks"].as_array().filter(|_| is_on_host)?.iter();
    ranks.find(|measured| measured["rank"].as_u64() == Some(rank as u64))
}
