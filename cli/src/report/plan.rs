//! The plan of a run next to its measurements.

use super::run::RunFiles;
use crate::html::chart::{Chart, Unit, text};
use crate::html::table;
use crate::plan::{pictures, scaling_of, use_longest_sequences};
use serde_json::Value;
use ulysses::device::DeviceKind;
use ulysses::estimate::{RankPlan, Workload};
use ulysses::memory::ByCategory;
use ulysses::memory::Category;
use ulysses::model::LlamaConfig;

/// The caption of memory by category.
const IDLE_STORAGE: &str = "Idle storage that a rank will reuse counts in the category that allocated it.";

/// Renders charts of memory and traffic; empty if config or model are missing or of another version.
pub(super) fn figures(run: &RunFiles) -> String {
    let Some(workload) = workload(run) else { return String::new() };
    let memory = workload.plan().map_or(String::new(), |plan| memory(run, &plan));
    let (config, model) = (&workload.config, &workload.model);
    let name = config.require_model().unwrap_or(&run.name);
    let tokens_per_rank = config.ulysses.seq_len.unwrap_or(1).div_ceil(config.mesh.sp_size);
    let traffic = scaling_of(name, model, tokens_per_rank);
    memory + &traffic.map_or(String::new(), |traffic| pictures::scaling(&traffic).figure())
}

/// Returns the workload of the run with its longest sequences.
fn workload(run: &RunFiles) -> Option<Workload> {
    let mut config = run.parsed_config()?;
    use_longest_sequences(&mut config);
    let record = &run.record;
    let threads = record["environment"]["threads_per_rank"].as_u64();
    config.ulysses.threads_per_rank =
        threads.and_then(|threads| usize::try_from(threads).ok()).or(config.ulysses.threads_per_rank);
    let model = LlamaConfig::from_hf_json(record["model"]["config"].clone(), "run.json").ok()?;
    // Nodes do not affect memory.
    let device = if record["environment"]["device"] == "cuda" { DeviceKind::Cuda } else { DeviceKind::Cpu };
    Some(Workload { ranks_per_node: config.world_size(), config, model, document_len: None, device })
}

fn memory(run: &RunFiles, plan: &RankPlan) -> String {
    let rank = measured(run, plan.rank);
    let peak = rank.and_then(|rank| rank["peak_bytes"].as_u64()).filter(|peak| *peak > 0);
    let line = peak.map(|peak| (format!("measured peak, rank {}", plan.rank), peak));
    let mut figure = pictures::memory(&plan.timeline, line.as_slice()).figure();
    if let (Some(rank), Some(_)) = (rank, peak) {
        let by_category = by_category(plan, rank);
        figure = figure.replace("</figure>", &format!("{by_category}</figure>"));
    }
    let note = format!("<p class=\"faint\">{IDLE_STORAGE}</p></figure>");
    figure + &over_step(run, plan).map_or(String::new(), |chart| chart.figure().replace("</figure>", &note))
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

/// Renders the peak by category, if recorded.
fn by_category(plan: &RankPlan, measured: &Value) -> String {
    let held = |category: Category| measured["peak_by_category"][category.name()].as_f64();
    let bytes = |bytes: f64| text(bytes, Unit::Bytes);
    let row = |(category, planned): (Category, u64)| {
        Some(vec![category.name().to_owned(), bytes(planned as f64), bytes(held(category)?)])
    };
    let rows: Option<Vec<_>> = Category::ALL.into_iter().zip(plan.peak_by_category).map(row).collect();
    let Some(mut rows) = rows else { return String::new() };
    let all = measured["peak_bytes"].as_f64().unwrap_or_default();
    rows.push(vec!["total".to_owned(), bytes(plan.peak_bytes as f64), bytes(all)]);
    format!(
        "<details><summary>Peak memory, planned and measured</summary>\n{}<p></p><p class=\"faint\">{IDLE_STORAGE}</p></details>",
        table(&["", "planned", "measured"], rows.into_iter())
    )
}
