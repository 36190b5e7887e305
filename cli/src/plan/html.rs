//! `ulysses plan --html`: the memory of a step, its traffic and its time as a page.

use super::choices::Choices;
use super::table::seconds;
use super::{Report, choices, pictures};
use crate::html::chart::{Unit, text};
use crate::html::{escape, html, table, tiles};
use ulysses::estimate::{MomentMemory, StepTime};

pub(super) fn page_of(report: &Report) -> String {
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
    if let Some(time) = &report.step_time {
        facts.push(("a step", seconds(time.total_seconds)));
        facts.push(("tokens/s", text(time.tokens_per_second, Unit::Number)));
        facts.push(("of the peak (MFU)", text(time.mfu, Unit::Percent)));
    }
    let body = format!(
        "{}<section class=\"grid-of-charts\">\n{}</section>\n{}",
        tiles(&facts),
        pictures::memory(&rank.timeline, &[]).figure() + &pictures::scaling(&report.scaling).figure(),
        [
            report.step_time.as_ref().map_or(String::new(), time),
            card("Meshes of as many ranks for the same batch", choices::meshes(report)),
            card("What one change would make of it", choices::alternatives(report)),
            parts(&rank.timeline),
        ]
        .concat()
    );
    html(&title, &body, "<code>ulysses plan</code>: a prediction of what <code>ulysses train</code> does")
}

/// A table of alternatives; what stands beside its rows is a last column.
fn card(title: &str, Choices { mut head, mut rows, remarks, note }: Choices) -> String {
    if remarks.iter().any(Option::is_some) {
        head.push("");
        rows.iter_mut().zip(remarks).for_each(|(row, remark)| row.push(remark.unwrap_or_default()));
    }
    let note = note.map_or(String::new(), |note| format!("<p></p><p class=\"faint\">{}</p>", escape(&note)));
    format!("<div class=\"card\"><h3>{title}</h3>\n{}{note}</div>\n", table(&head, rows.into_iter()))
}

/// Where the time of a step goes.
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
        "<div class=\"card\"><h3>Predicted time of a step on {}</h3>\n<table>\n\
         <tr><th>what</th><th class=\"n\">time</th><th class=\"n\">share</th></tr>\n{rows}</table>\n\
         <p></p><p class=\"faint\">{} of it is arithmetic that is done twice. Communication beside arithmetic, not in it: \
         {}.</p></div>\n",
        escape(&time.machine),
        seconds(time.recompute_seconds),
        seconds(time.hidden_seconds)
    )
}

/// What the numbers of the parts mean.
fn parts(timeline: &[MomentMemory]) -> String {
    let row = |(part, moment): (usize, &MomentMemory)| {
        let (at, held) = (escape(&moment.at.to_string()), text(moment.bytes as f64, Unit::Bytes));
        format!("<tr><td>{}</td><td>{at}</td><td class=\"n\">{held}</td></tr>\n", part + 1)
    };
    let rows: String = timeline.iter().enumerate().map(row).collect();
    format!(
        "<div class=\"card\"><details><summary>Parts of the step</summary>\n<table>\n\
         <tr><th>part</th><th>what</th><th class=\"n\">most held</th></tr>\n{rows}</table></details></div>\n"
    )
}
