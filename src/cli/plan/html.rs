//! `ulysses plan --html`: the memory of a step as a picture.

use super::Report;
use crate::cli::report::chart::{Chart, Series, Unit, text};
use crate::cli::report::page;
use crate::cli::{Failure, OrFail, note};
use anyhow::Context;
use std::path::Path;
use ulysses::engine::plan::MomentMemory;
use ulysses::engine::schedule::Category;

pub(super) fn write(path: &Path, report: &Report) -> Result<(), Failure> {
    std::fs::write(path, page_of(report))
        .with_context(|| format!("--html: cannot write {}", path.display()))
        .or_run()?;
    note(format_args!("drawn to {}", path.display()));
    Ok(())
}

fn page_of(report: &Report) -> String {
    let Report { model, mesh, rank, .. } = report;
    let title = format!("{} on dp {} × sp {}", model.name, mesh.dp, mesh.sp);
    let bytes = |bytes: u64| text(bytes as f64, Unit::Bytes);
    let mut facts = vec![
        ("parameters", text(model.parameters as f64, Unit::Number)),
        ("tokens in a row", report.seq_len.to_string()),
        ("ZeRO stage", report.zero_stage.to_string()),
        ("numbers", report.dtype.clone()),
        ("peak of a rank", bytes(rank.peak_bytes)),
        ("when", rank.peak_at.to_string()),
        ("sent per step and rank", bytes(rank.sent.total())),
        ("arithmetic per step and rank", format!("{}FLOP", text(rank.model_flops, Unit::Number))),
    ];
    if let Some(budget) = &report.budget {
        let fits = if budget.fits { "fits" } else { "does not fit" };
        facts.push(("memory of a rank", format!("{}: {fits}", bytes(budget.bytes))));
        let longest = budget.max_seq_len.map_or("none".to_owned(), |tokens| tokens.to_string());
        facts.push(("longest row that fits", longest));
    }
    let body = format!(
        "{}<section class=\"grid-of-charts\">\n{}</section>\n{}",
        page::tiles(&facts),
        memory(&rank.timeline).figure(),
        parts(&rank.timeline)
    );
    page::html(
        &title,
        &body,
        "<code>ulysses plan</code>: a prediction of what <code>ulysses train</code> does",
    )
}

/// The most that the rank holds in each part of its last micro batch, by category.
fn memory(timeline: &[MomentMemory]) -> Chart {
    let series = Category::ALL.iter().enumerate().map(|(index, category)| {
        let at =
            |(part, moment): (usize, &MomentMemory)| ((part + 1) as f64, moment.by_category[index] as f64);
        let points = timeline.iter().enumerate().map(at).collect();
        Series { label: category.name().to_owned(), points, style: index, is_dotted: false }
    });
    Chart {
        title: "Memory over the last micro batch and the update",
        along: "part of the step",
        unit: Unit::Bytes,
        from_zero: true,
        is_stacked: true,
        series: series.collect(),
    }
}

/// What the numbers of the parts mean.
fn parts(timeline: &[MomentMemory]) -> String {
    let row = |(part, moment): (usize, &MomentMemory)| {
        let (at, held) = (page::escape(&moment.at.to_string()), text(moment.bytes as f64, Unit::Bytes));
        format!("<tr><td>{}</td><td>{at}</td><td class=\"n\">{held}</td></tr>\n", part + 1)
    };
    let rows: String = timeline.iter().enumerate().map(row).collect();
    format!(
        "<div class=\"card\"><details><summary>Parts of the step</summary>\n<table>\n\
         <tr><th>part</th><th>what</th><th class=\"n\">most held</th></tr>\n{rows}</table></details></div>\n"
    )
}
