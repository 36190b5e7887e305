//! Building blocks of HTML pages: escaped text, tables, tiles and charts.

pub(crate) mod chart;

use chart::{Unit, text};
use serde_json::Value;

const STYLE: &str = concat!(include_str!("chart.css"), include_str!("style.css"));

/// Escapes text for HTML, including attributes.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Renders a page. `body` and `made_by` are HTML.
pub(crate) fn html(title: &str, body: &str, made_by: &str) -> String {
    let (title, version) = (escape(title), env!("CARGO_PKG_VERSION"));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}: ulysses</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}\
         <footer>ulysses {version}, {made_by}</footer>\n</main>\n</body>\n</html>\n"
    )
}

/// Renders named values side by side.
pub(crate) fn tiles(facts: &[(&str, String)]) -> String {
    let tile =
        |(name, value): &(&str, String)| format!("<li><span>{name}</span><b>{}</b></li>\n", escape(value));
    format!("<ul class=\"tiles\">\n{}</ul>\n", facts.iter().map(tile).collect::<String>())
}

/// Renders a table. The first column is text, the others are numbers.
pub(crate) fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let class = |index: usize| if index == 0 { "" } else { " class=\"n\"" };
    let cells = |tag: &str, cells: &[String]| -> String {
        let cell =
            |(index, cell): (usize, &String)| format!("<{tag}{}>{}</{tag}>", class(index), escape(cell));
        cells.iter().enumerate().map(cell).collect()
    };
    let head = cells("th", &head.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
    let rows: String = rows.map(|row| format!("<tr>{}</tr>\n", cells("td", &row))).collect();
    format!("<div class=\"scroll\"><table>\n<tr>{head}</tr>\n{rows}</table></div>\n")
}

/// Formats a duration.
pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        short if short < 120.0 => format!("{} s", text(short, Unit::Number)),
        medium if medium < 7200.0 => format!("{:.0} min", medium / 60.0),
        long => format!("{:.1} h", long / 3600.0),
    }
}

/// Formats a JSON value, strings without quotes.
pub(crate) fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
