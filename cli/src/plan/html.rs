//! `ulysses plan --html`: memory, traffic and time of a step as a page.

use super::budget::Available;
use super::table::{Table, seconds};
use super::{Report, choices, pictures};
use crate::html::chart::{Unit, text};
use crate::html::{escape, html, table, tiles};
use ulysses::estimate::{Candidate, MomentMemory, StepTime, Workload};

pub(super) fn page_of(report: &Report) -> String {
    let Candidate { workload, plan: rank, host_bytes_per_node, max_seq_len, .. } = &report.planned;
    let Workload { config, model, .. } = workload;
    let title = format!("{} on dp {} × sp {}", report.name, config.mesh.dp_size, config.mesh.sp_size);
    let bytes = |bytes: u64| text(bytes as f64, Unit::Bytes);
    let mut facts = vec![
        ("parameters", text(model.num_parameters() as f64, Unit::Number)),
        ("sequence length", report.seq_len.to_string()),
        ("ZeRO stage", config.zero_axes().with_stage(config.zero.stage)),
        ("dtype", config.precision.dtype().as_str().to_owned()),
        ("peak memory per rank", bytes(rank.peak_bytes)),
        ("peak during", rank.peak_at.to_string()),
        ("host memory per node, offloaded", bytes(*host_bytes_per_node)),
        ("sent per rank and step", bytes(rank.sent.total())),
        ("FLOPs per rank and step", format!("{}FLOP", text(rank.model_flops, Unit::Number))),
    ];
    if let Some(Available { budget, reserve_bytes }) = report.available {
        let fits = if report.planned.fits() { "fits" } else { "does not fit" };
        facts.push(("available per rank", format!("{}: {fits}", bytes(budget.rank_bytes))));
        if reserve_bytes > 0 {
            facts.push(("reserved per rank", bytes(reserve_bytes)));
        }
        facts.extend(budget.host_bytes_per_node.map(|host| ("available host memory per node", bytes(host))));
        let longest = max_seq_len.map_or("none".to_owned(), |tokens| tokens.to_string());
        facts.push(("longest sequence that fits (tokens)", longest));
    }
    if let Some(time) = &report.planned.time {
        facts.push(("step time", seconds(time.total_seconds)));
        facts.push(("tokens/s, all ranks", text(time.tokens_per_second, Unit::Number)));
        facts.push(("MFU", text(time.mfu, Unit::Percent)));
    }
    let body = format!(
        "{}<section class=\"grid-of-charts\">\n{}</section>\n{}",
        tiles(&facts),
        pictures::memory(&rank.timeline, &[]).figure() + &pictures::scaling(&report.scaling).figure(),
        [
            report.planned.time.as_ref().map_or(String::new(), time),
            card("Meshes with the same number of ranks and the same batch", choices::meshes(report)),
            card("Effect of single changes", choices::alternatives(report)),
            parts(&rank.timeline),
        ]
        .concat()
    );
    html(&title, &body, "<code>ulysses plan</code>: a prediction of what <code>ulysses train</code> does")
}

/// Formats a table of choices; notes on rows become a last column.
fn card(title: &str, choices: Table<'_, Candidate>) -> String {
    let Table { mut head, mut rows, row_notes, row_notes_head, footnotes, .. } = choices;
    if row_notes.iter().any(Option::is_some) {
        head.push(row_notes_head);
        rows.iter_mut().zip(row_notes).for_each(|(row, note)| row.push(note.unwrap_or_default()));
    }
    let footnotes: String =
        footnotes.iter().map(|note| format!("<p></p><p class=\"faint\">{}</p>", escape(note))).collect();
    format!("<div class=\"card\"><h3>{title}</h3>\n{}{footnotes}</div>\n", table(&head, rows.into_iter()))
}

/// Formats the parts of the predicted step time.
fn time(time: &StepTime) -> String {
    let row = |(what, part): &(&str, f64)| {
        let share = text(part / time.total_seconds, Unit::Percent);
        format!(
            "<tr><td>{what}</td><td class=\"n\">{}</td><td class=\"n\">{share}</td></tr>\n",
            seconds(*part)
        )
    };
    let rows: String = time.parts.named().iter().map(row).collect();
    format!(
        "<div class=\"card\"><h3>Predicted step time on {}</h3>\n<table>\n\
         <tr><th>part</th><th class=\"n\">time</th><th class=\"n\">share</th></tr>\n{rows}</table>\n\
         <p></p><p class=\"faint\">Recomputation, included: {}. Communication overlapped with compute, not included: \
         {}.</p></div>\n",
        escape(&time.machine),
        seconds(time.recompute_seconds),
        seconds(time.hidden_seconds)
    )
}

/// Formats the legend of the numbered parts of a step.
fn parts(timeline: &[MomentMemory]) -> String {
    let row = |(part, moment): (usize, &MomentMemory)| {
        let (at, held) = (escape(&moment.at.to_string()), text(moment.bytes as f64, Unit::Bytes));
        format!("<tr><td>{}</td><td>{at}</td><td class=\"n\">{held}</td></tr>\n", part + 1)
    };
    let rows: String = timeline.iter().enumerate().map(row).collect();
    format!(
        "<div class=\"card\"><details><summary>Parts of the step</summary>\n<table>\n\
         <tr><th>number</th><th>part</th><th class=\"n\">peak memory per rank</th></tr>\n{rows}</table></details></div>\n"
    )
}
