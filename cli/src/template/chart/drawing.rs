//! Charts as an SVG file.

use super::{Chart, HEIGHT, WIDTH};
use std::fmt::Write;

/// Gap around charts, height of a title, height of a legend line.
const GAP: f64 = 14.0;
const TITLE: f64 = 26.0;
const LINE: f64 = 18.0;

/// Style of charts, also part of the page's style.
pub(super) const STYLE: &str = include_str!("../chart.css");

/// Renders charts in `columns` columns, each with title and legend. Charts without points are left out.
pub(crate) fn drawing(charts: &[Chart], columns: usize) -> String {
    let plots: Vec<(&Chart, String)> =
        charts.iter().filter_map(|chart| Some((chart, chart.plot()?))).collect();
    let columns = columns.clamp(1, plots.len().max(1));
    let lines = plots.iter().map(|(chart, _)| chart.legend().len()).max().unwrap_or(0);
    let cell = TITLE + HEIGHT + LINE * lines as f64 + GAP;
    let width = GAP + (WIDTH + GAP) * columns as f64;
    let height = GAP + cell * plots.len().div_ceil(columns) as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"system-ui, sans-serif\">\n<style>\n{STYLE}</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n"
    );
    for (index, (chart, plot)) in plots.iter().enumerate() {
        let (left, top) =
            (GAP + (WIDTH + GAP) * (index % columns) as f64, GAP + cell * (index / columns) as f64);
        let title = super::escape(&chart.title);
        // Writing to a string cannot fail.
        let _ = writeln!(svg, "<g transform=\"translate({left} {top})\">");
        let _ = writeln!(svg, "<text class=\"title\" x=\"0\" y=\"16\">{title}</text>");
        let _ = writeln!(svg, "<g transform=\"translate(0 {TITLE})\">\n{plot}</g>");
        for (line, (style, label, value)) in chart.legend().into_iter().enumerate() {
            let y = TITLE + HEIGHT + LINE * (line as f64 + 0.5);
            let _ = writeln!(
                svg,
                "<rect class=\"dot c{style}\" x=\"0\" y=\"{:.1}\" width=\"14\" height=\"4\" rx=\"2\"/>\
                 <text x=\"22\" y=\"{y:.1}\">{label}: <tspan class=\"ink\">{value}</tspan></text>",
                y - 6.0
            );
        }
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    svg
}
