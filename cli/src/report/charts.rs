//! The charts of metrics.

use super::run::RunFiles;
use crate::template::chart::{Chart, Point, Scale, Series, Unit};
use serde_json::Value;

/// A part of the step time.
struct Part {
    label: &'static str,
    key: &'static str,
}

const fn part(label: &'static str, key: &'static str) -> Part {
    Part { label, key }
}

/// Collectives count the time inside their calls.
const BY_ACTIVITY: [Part; 8] = [
    part("compute", "compute_seconds"),
    part("all-to-all", "all_to_all_seconds"),
    part("ring", "ring_seconds"),
    part("tp: gathers and sums around divided modules", "tp_comm_seconds"),
    part("pp: waiting for other stages", "pp_comm_seconds"),
    part("dp: all-gather, reduce-scatter, all-reduce", "dp_comm_seconds"),
    part("sp: all-reduce", "sp_comm_seconds"),
    part("data loading", "data_seconds"),
];

const BY_PHASE: [Part; 4] = [
    part("forward", "forward_seconds"),
    part("backward, with recomputation", "backward_seconds"),
    part("optimizer step", "update_seconds"),
    part("data loading", "data_seconds"),
];

/// Returns the charts with curves of all runs.
pub(super) fn curves(runs: &[RunFiles]) -> Vec<Option<String>> {
    let chart = |title: &str, key: &str, unit, scale| {
        let curve = |(style, run): (usize, &RunFiles)| Series::new(&run.name, run.curve(key), style);
        let (title, series) = (title.to_owned(), runs.iter().enumerate().map(curve).collect());
        Chart { title, along: "step", unit, scale, series, ..Chart::default() }
    };
    let mut loss = chart("Loss", "loss", Unit::Number, Scale::Around);
    loss.series.extend(runs.iter().enumerate().map(|(style, run)| Series {
        label: format!("{}, evaluation", run.name),
        points: run.evaluation_curve("eval_loss"),
        // A color that no other curve has.
        style: if runs.len() == 1 { 1 } else { style },
        is_dotted: true,
    }));
    let others = [
        ("Tokens per second", "tokens_per_second", Unit::Number),
        ("Label tokens per second", "label_tokens_per_second", Unit::Number),
        ("Gradient norm before clipping", "grad_norm", Unit::Number),
        ("Learning rate", "lr", Unit::Number),
        ("MFU", "gemm_share", Unit::Percent),
        ("Memory of rank 0 after a step", "memory_bytes", Unit::Bytes),
    ];
    let others = others.map(|(title, key, unit)| chart(title, key, unit, Scale::FromZero));
    std::iter::once(loss).chain(others).map(|chart| chart.content()).collect()
}

/// Returns stacked shares of the step time, by activity and by phase.
pub(super) fn time_shares(run: &RunFiles) -> [Option<String>; 2] {
    [shares(run, "activity", &BY_ACTIVITY), shares(run, "phase", &BY_PHASE)]
}

fn shares(run: &RunFiles, by: &str, parts: &[Part]) -> Option<String> {
    let share = |line: &Value, key: &str| {
        let y = line[key].as_f64()? / line["step_seconds"].as_f64()?;
        Some(Point { x: line["step"].as_f64()?, y }).filter(|_| y.is_finite())
    };
    let timed = run.lines.steps.iter().filter(|line| line["compute_seconds"].is_number());
    let series = parts.iter().enumerate().map(|(style, Part { label, key })| {
        Series::new(*label, timed.clone().filter_map(|line| share(line, key)).collect(), style)
    });
    let chart = Chart {
        title: format!("Step time of rank 0 by {by}"),
        along: "step",
        unit: Unit::Percent,
        is_stacked: true,
        series: series.collect(),
        ..Chart::default()
    };
    chart.content()
}
