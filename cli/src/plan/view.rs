//! The plan as text and as a page, from the templates `plan.txt` and `plan.html`.

use super::budget::Available;
use super::json::{self, joined};
use super::{Report, pictures};
use crate::template::render;
use anyhow::Result;
use serde_json::{Value, json};
use ulysses::engine::Moment;
use ulysses::estimate::{Candidate, MomentMemory, Workload};

pub(super) fn text(report: &Report) -> Result<String> {
    render("plan.txt", data(report))
}

pub(super) fn page(report: &Report) -> Result<String> {
    render("plan.html", data(report))
}

/// Returns what the templates show: the plan's JSON, and what follows from it.
fn data(report: &Report) -> Value {
    let Candidate { workload: Workload { config, .. }, plan, time, excess, .. } = &report.planned;
    let charts = [pictures::memory(&plan.timeline, &[]), pictures::scaling(&report.scaling)];
    let shown = json!({
        "stage": config.zero_axes().with_stage(config.zero.stage),
        // Whether `--memory-gib` decided that attention outputs are saved.
        "is_save_decided": config.ulysses.save_attention_output.is_none(),
        "shown_moments": shown_moments(&report.planned),
        "time_parts": time.as_ref().map(|time| time.parts.named()),
        "available": report.available.map(Available::per_rank),
        "excess": excess,
        "charts": charts.map(|chart| chart.content()),
    });
    joined([json::plan(report), shown])
}

/// Returns first and last layer, everything outside of layers, and the peak.
fn shown_moments(Candidate { workload, plan, .. }: &Candidate) -> Vec<&MomentMemory> {
    let last = workload.model.num_layers().saturating_sub(1);
    let is_shown = |moment: &&MomentMemory| match moment.at {
        at if at == plan.peak_at => true,
        Moment::Forward { layer } | Moment::Backward { layer } => layer == 0 || layer == last,
        _ => true,
    };
    plan.timeline.iter().filter(is_shown).collect()
}
