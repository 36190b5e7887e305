//! The page: overview, charts of all runs, and a section per run.

use super::run::RunFiles;
use super::sections;
use crate::html::chart::{Chart, Scale, Series, Unit, text};
use crate::html::{duration, escape, html, tiles};

/// Renders the page.
pub(super) fn page(runs: &[RunFiles]) -> String {
    let names = runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", ");
    let mut body = match runs {
        [run] => tiles(&facts(run)),
        _ => overview(runs),
    };
    body.push_str("<section class=\"grid-of-charts\">\n");
    curves(runs).iter().for_each(|chart| body.push_str(&chart.figure()));
    body.push_str("</section>\n");
    for (index, run) in runs.iter().enumerate() {
        body.push_str(&sections::of_run(run, runs.len() > 1, index == 0));
    }
    html(&names, &body, "<code>ulysses report</code>; keys are documented in <code>docs/monitoring.md</code>")
}

/// Key figures of a run with their names.
type Facts = Vec<(&'static str, String)>;

fn facts(run: &RunFiles) -> Facts {
    let number = |value: Option<f64>| value.map_or("–".to_owned(), |value| text(value, Unit::Number));
    let shape = &run.record["mesh"]["shape"];
    let mesh = match (shape[0].as_u64(), shape[1].as_u64()) {
        (Some(dp), Some(sp)) => format!("dp {dp} × sp {sp}"),
        _ => "–".to_owned(),
    };
    let ranks = run.parts().into_iter().flat_map(|part| part["ranks"].as_array().into_iter().flatten());
    let peak = ranks.filter_map(|rank| rank["peak_bytes"].as_f64()).fold(0.0, f64::max);
    let state = if run.record["totals"].is_null() { "not finished" } else { "finished" };
    let spans_sp = run.record["mesh"]["zero_partition_axes"].as_array().is_some_and(|axes| axes.len() == 2);
    let axes = if spans_sp { " over dp × sp" } else { "" };
    let stage = run.config["zero_optimization"]["stage"].as_u64().map(|stage| format!("{stage}{axes}"));
    let skipped = run.lines.steps.iter().filter(|line| line["skipped"] == true).count();
    let steps = run.lines.steps.last().and_then(|line| line["step"].as_u64()).unwrap_or(0);
    let mut facts = vec![
        ("steps", if skipped > 0 { format!("{steps}, {skipped} skipped") } else { steps.to_string() }),
        ("last loss", run.last("loss").map_or("–".to_owned(), |loss| format!("{loss:.4}"))),
    ];
    if let Some((_, loss)) = run.evaluation_curve("eval_loss").last() {
        facts.push(("evaluation loss", format!("{loss:.4}")));
    }
    facts.extend([
        ("mean tokens/s", number(run.rate("tokens"))),
        ("mean label tokens/s", number(run.rate("label_tokens"))),
        (
            "MFU of the last step",
            run.last("gemm_share").map_or("–".to_owned(), |share| text(share, Unit::Percent)),
        ),
        ("largest peak memory per rank", if peak > 0.0 { text(peak, Unit::Bytes) } else { "–".to_owned() }),
        ("mesh", mesh),
        ("ZeRO stage", stage.unwrap_or_else(|| "–".to_owned())),
        ("training time", duration(run.sum("step_seconds"))),
        ("parameters", number(run.record["model"]["parameters"].as_f64())),
        ("state", state.to_owned()),
    ]);
    facts
}

/// Renders a table with a row per run and all columns that any run has.
fn overview(runs: &[RunFiles]) -> String {
    let of_runs: Vec<_> = runs.iter().map(facts).collect();
    let widest = of_runs.iter().max_by_key(|facts| facts.len());
    let columns: Vec<&str> = widest.into_iter().flatten().map(|(name, _)| *name).collect();
    let head: String = columns.iter().map(|name| format!("<th class=\"n\">{name}</th>")).collect();
    let row = |(index, (run, facts)): (usize, (&RunFiles, &Facts))| {
        let value =
            |column: &&str| facts.iter().find(|(name, _)| name == column).map_or("–", |(_, value)| value);
        let cells: String =
            columns.iter().map(|column| format!("<td class=\"n\">{}</td>", escape(value(column)))).collect();
        let name = escape(&run.name);
        format!(
            "<tr><td><ul class=\"legend\"><li class=\"c{}\"><i></i><b>{name}</b></li></ul></td>{cells}</tr>\n",
            index % 6
        )
    };
    let rows: String = runs.iter().zip(&of_runs).enumerate().map(row).collect();
    format!(
        "<div class=\"card scroll\"><table>\n<tr><th>run</th>{head}</tr>\n{rows}</table></div>\n<p></p>\n"
    )
}

/// Returns the charts with curves of all runs.
fn curves(runs: &[RunFiles]) -> Vec<Chart> {
    let series = |key: &str| -> Vec<Series> {
        let of_run = |(style, run): (usize, &RunFiles)| Series {
            label: run.name.clone(),
            points: run.curve(key),
            style,
            is_dotted: false,
        };
        runs.iter().enumerate().map(of_run).collect()
    };
    let chart = |title: &str, key, unit, scale| {
        let (title, series, lines) = (title.to_owned(), series(key), Vec::new());
        Chart { title, along: "step", unit, scale, is_stacked: false, series, lines }
    };
    let mut loss = chart("Loss", "loss", Unit::Number, Scale::Around);
    loss.series.extend(runs.iter().enumerate().map(|(style, run)| Series {
        label: format!("{}, evaluation", run.name),
        points: run.evaluation_curve("eval_loss"),
        // A color that no other curve has.
        style: if runs.len() == 1 { 1 } else { style },
        is_dotted: true,
    }));
    vec![
        loss,
        chart("Tokens per second", "tokens_per_second", Unit::Number, Scale::FromZero),
        chart("Label tokens per second", "label_tokens_per_second", Unit::Number, Scale::FromZero),
        chart("Gradient norm before clipping", "grad_norm", Unit::Number, Scale::FromZero),
        chart("Learning rate", "lr", Unit::Number, Scale::FromZero),
        chart("MFU", "gemm_share", Unit::Percent, Scale::FromZero),
        chart("Memory of rank 0 after a step", "memory_bytes", Unit::Bytes, Scale::FromZero),
    ]
}
