//! The plan as text and as a page, from the templates `plan.txt` and `plan.html`.

use super::budget::Available;
use super::json::{self, joined};
use super::{Report, pictures};
use crate::template::render;
use anyhow::Result;
use serde_json::{Value, json};
use ulysses::engine::StepPart;
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
    let shown = json!({
        "stage": config.zero_axes().with_stage(config.zero.stage),
        // Whether `--memory-gib` decided that attention outputs are saved.
        "is_save_decided": config.ulysses.save_attention_output.is_none(),
        "shown_moments": shown_moments(&report.planned),
        "time_parts": time.as_ref().map(|time| time.parts.named()),
        "flops_per_token": flops_per_token(report),
        "schedule_drawing": report.planned.decided.draw_schedule().ok().flatten(),
        "available": report.available.map(Available::per_rank),
        "excess": excess,
        "memory_chart": pictures::memory(&plan.timeline, &[]).content(),
    });
    joined([json::plan(report), shown])
}

/// Returns the FLOPs per token, if other ranks of a stage do as much as the planned one.
fn flops_per_token(report: &Report) -> f64 {
    let Candidate { workload: Workload { config, .. }, plan, .. } = &report.planned;
    let of_stages = report.stages.iter().map(|stage| stage.plan.model_flops).sum::<f64>();
    let per_rank = match report.stages.len() {
        0 => plan.model_flops,
        stages => of_stages / stages as f64,
    };
    per_rank * config.world_size() as f64 / (config.train_batch_size * report.seq_len) as f64
}

/// Returns first and last layer, everything outside of layers, and the peak.
fn shown_moments(Candidate { plan, .. }: &Candidate) -> Vec<&MomentMemory> {
    let layer = |moment: &MomentMemory| match moment.at {
        StepPart::Forward { layer } | StepPart::Backward { layer } | StepPart::WeightBackward { layer } => {
            Some(layer)
        }
        _ => None,
    };
    let layers = || plan.timeline.iter().filter_map(layer);
    let shown = [layers().min(), layers().max(), None];
    let is_shown = |moment: &&MomentMemory| moment.at == plan.peak_at || shown.contains(&layer(moment));
    plan.timeline.iter().filter(is_shown).collect()
}
