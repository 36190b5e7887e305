//! The section of a run: time, memory, mesh, communication, config, environment.

use super::run::RunFiles;
use super::{communication, parts, plan, ranks, restarts, settings};
use crate::html::chart::{Chart, Scale, Series, Unit, text};
use crate::html::{escape, plain};
use serde_json::Value;
use std::fmt::Write;

/// Maximum rows and columns of ranks to draw.
const MAX_CELLS: usize = 16;

/// Renders the section of a run. `is_one_of_several`: its title is the run's name; `is_open`: tables are unfolded.
pub(super) fn of_run(run: &RunFiles, is_one_of_several: bool, is_open: bool) -> String {
    let title = if is_one_of_several { escape(&run.name) } else { "Details".to_owned() };
    let charts = format!(
        "{}{}<div class=\"stack\">{}{}</div>\n{}",
        time_shares(run, "Step time of rank 0 by activity", &BY_KIND),
        time_shares(run, "Step time of rank 0 by phase", &BY_PHASE),
        memory(run),
        mesh(run),
        plan::figures(run)
    );
    let parts = [
        ("Parts of the run", parts::of_run(run)),
        ("Restarts", restarts::table_of(&run.lines.restarts)),
        ("Communication", communication::tables(run)),
        ("Ranks", ranks::tables(run)),
        ("Configuration", settings::table(run)),
        ("Environment", environment(run)),
    ];
    let folded = parts.into_iter().filter(|(_, body)| !body.is_empty()).map(|(title, body)| {
        let open = if is_open { " open" } else { "" };
        format!("<div class=\"card\"><details{open}><summary>{title}</summary>\n{body}</details></div>\n")
    });
    format!(
        "<h2>{title}</h2>\n<section class=\"grid-of-charts\">\n{charts}</section>\n{}",
        folded.collect::<String>()
    )
}

/// Parts of the step time: names and metric keys.
type TimeParts = [(&'static str, &'static str)];

/// Collectives count the time inside their calls.
const BY_KIND: [(&str, &str); 6] = [
    ("compute", "compute_seconds"),
    ("all-to-all", "all_to_all_seconds"),
    ("ring", "ring_seconds"),
    ("dp: all-gather, reduce-scatter, all-reduce", "dp_comm_seconds"),
    ("sp: all-reduce", "sp_comm_seconds"),
    ("data loading", "data_seconds"),
];

const BY_PHASE: [(&str, &str); 4] = [
    ("forward", "forward_seconds"),
    ("backward, with recomputation", "backward_seconds"),
    ("optimizer step", "update_seconds"),
    ("data loading", "data_seconds"),
];

/// Renders stacked shares of the step time.
fn time_shares(run: &RunFiles, title: &str, parts: &TimeParts) -> String {
    let share = |line: &Value, key: &str| {
        let share = line[key].as_f64()? / line["step_seconds"].as_f64()?;
        Some((line["step"].as_f64()?, share)).filter(|_| share.is_finite())
    };
    let timed = run.lines.steps.iter().filter(|line| line["compute_seconds"].is_number());
    let series = parts.iter().enumerate().map(|(style, (label, key))| Series {
        label: (*label).to_owned(),
        points: timed.clone().filter_map(|line| share(line, key)).collect(),
        style,
        is_dotted: false,
    });
    let chart = Chart {
        title: title.to_owned(),
        along: "step",
        unit: Unit::Percent,
        scale: Scale::FromZero,
        is_stacked: true,
        series: series.collect(),
        lines: Vec::new(),
    };
    chart.figure()
}

/// Renders a bar per rank: bytes stored between steps by category, up to the peak.
fn memory(run: &RunFiles) -> String {
    const PARTS: [&str; 3] = ["parameters", "gradients", "optimizer"];
    const WIDTH: f64 = 440.0;
    let ranks: Vec<&Value> = run.ranks().into_iter().flatten().collect();
    let peak = |rank: &Value| rank["peak_bytes"].as_f64().unwrap_or(0.0);
    let most = ranks.iter().map(|rank| peak(rank)).fold(0.0, f64::max);
    if most == 0.0 {
        return String::new();
    }
    let shown = ranks.len().min(2 * MAX_CELLS);
    let height = 20.0 * shown as f64 + 6.0;
    let mut svg =
        format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"memory of each rank\">\n");
    let scale = (WIDTH - 70.0 - 76.0) / most;
    for (index, rank) in ranks.iter().take(shown).enumerate() {
        let y = 20.0 * index as f64 + 4.0;
        let number = plain(&rank["rank"]);
        // Writing to a string cannot fail.
        let _ =
            writeln!(svg, "<text x=\"62\" y=\"{:.1}\" text-anchor=\"end\">rank {number}</text>", y + 10.5);
        let _ = writeln!(
            svg,
            "<rect class=\"bar c3\" x=\"70\" y=\"{y}\" width=\"{:.1}\" height=\"13\" rx=\"2\"/>",
            scale * peak(rank)
        );
        let mut x = 70.0;
        for (style, part) in PARTS.iter().enumerate() {
            let width = scale * rank["held_bytes"][*part].as_f64().unwrap_or(0.0);
            let _ = writeln!(
                svg,
                "<rect class=\"bar c{style}\" x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"13\"/>"
            );
            x += width;
        }
        let (x, label) = (76.0 + scale * peak(rank), text(peak(rank), Unit::Bytes));
        let _ = writeln!(svg, "<text class=\"ink\" x=\"{x:.1}\" y=\"{:.1}\">{label}</text>", y + 10.5);
    }
    svg.push_str("</svg>\n");
    let names = PARTS.iter().chain(&["other, at the peak"]).enumerate();
    let legend: String =
        names.map(|(style, name)| format!("<li class=\"c{style}\"><i></i>{name}</li>")).collect();
    let more = if ranks.len() > shown {
        format!(" <small>(first {shown} of {} ranks)</small>", ranks.len())
    } else {
        String::new()
    };
    format!(
        "<figure><figcaption>Peak memory of each rank{more}</figcaption>\n{svg}<ul class=\"legend\">{legend}</ul></figure>\n"
    )
}

/// Renders the ranks as a grid with a color per sp group.
fn mesh(run: &RunFiles) -> String {
    let mesh = &run.record["mesh"];
    let size = |axis: usize| mesh["shape"][axis].as_u64().and_then(|size| usize::try_from(size).ok());
    let (Some(dp), Some(sp)) = (size(0), size(1)) else { return String::new() };
    let (rows, columns) = (dp.min(MAX_CELLS), sp.min(MAX_CELLS));
    let cell = (360.0 / columns as f64).clamp(20.0, 64.0);
    let high = cell.min(34.0);
    let (width, height) = (440.0, 30.0 + (high + 6.0) * rows as f64);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"mesh dp {dp} by sp {sp}\">\n"
    );
    for row in 0..rows {
        let y = 26.0 + (high + 6.0) * row as f64;
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"44\" y=\"{:.1}\" text-anchor=\"end\">dp {row}</text>",
            y + 0.5 * high + 4.0
        );
        for column in 0..columns {
            let x = 52.0 + cell * column as f64;
            if row == 0 {
                let _ = writeln!(
                    svg,
                    "<text x=\"{:.1}\" y=\"16\" text-anchor=\"middle\">sp {column}</text>",
                    x + 0.5 * cell
                );
            }
            let rank = plain(&mesh["ranks"][row * sp + column]);
            let _ = writeln!(
                svg,
                "<rect class=\"cell c{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{cell:.1}\" height=\"{high:.1}\"/>\
                 <text class=\"ink\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{rank}</text>",
                row % 6,
                x + 0.5 * cell,
                y + 0.5 * high + 4.0
            );
        }
    }
    svg.push_str("</svg>\n");
    let cut =
        if rows < dp || columns < sp { format!(" (first {rows} × {columns} shown)") } else { String::new() };
    let replicas = match mesh["shard_size"].as_u64() {
        Some(size) => format!(" of {size} adjacent rows"),
        None => String::new(),
    };
    let sharing = match mesh["zero_partition_axes"].as_array().is_some_and(|axes| axes.len() == 2) {
        true if replicas.is_empty() => "all ranks share the ZeRO partitions".to_owned(),
        true => format!("ranks{replicas} share the ZeRO partitions"),
        false => format!("ranks of a column{replicas} share the ZeRO partitions"),
    };
    let note = run.parsed_config().and_then(|config| config.zero_partition_note());
    let note = note.map_or(String::new(), |note| format!("<p>{}.</p>", escape(&note)));
    format!(
        "<figure><figcaption>Mesh dp {dp} × sp {sp}{cut}</figcaption>\n{svg}<p class=\"faint\">Ranks of a row share sequences \
         and exchange heads; {sharing}.</p>{note}</figure>\n"
    )
}

fn environment(run: &RunFiles) -> String {
    let record = &run.record;
    if record.is_null() {
        return String::new();
    }
    let command = record["command"].as_array().into_iter().flatten().map(plain).collect::<Vec<_>>().join(" ");
    let mut facts = vec![
        ("command".to_owned(), command),
        ("version".to_owned(), plain(&record["version"])),
        ("directory".to_owned(), run.dir.display().to_string()),
    ];
    for (name, value) in record["environment"].as_object().into_iter().flatten() {
        let value = match (name.as_str(), value.as_f64()) {
            ("memory_bytes", Some(bytes)) => text(bytes, Unit::Bytes),
            _ => plain(value),
        };
        facts.push((name.trim_end_matches("_bytes").replace('_', " "), value));
    }
    if let Some(peak) = record["peak_flops"].as_f64() {
        facts.push(("GEMM rate of all ranks".to_owned(), format!("{}FLOP/s", text(peak, Unit::Number))));
    }
    let rows = facts.iter().filter(|(_, value)| value != "null" && value != "[]").map(|(name, value)| {
        format!("<tr><th>{}</th><td class=\"v\"><code>{}</code></td></tr>\n", escape(name), escape(value))
    });
    format!("<table>\n{}</table>\n", rows.collect::<String>())
}
