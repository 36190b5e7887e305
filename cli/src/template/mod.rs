//! Texts and HTML pages from templates. A template has the words and the marks; the code that renders it gives it data.

pub(crate) mod chart;
mod filters;

use anyhow::Result;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, Output, State, UndefinedBehavior, Value};
use serde::Serialize;

/// The templates by name.
const TEMPLATES: [(&str, &str); 13] = [
    ("chart.css", include_str!("chart.css")),
    ("style.css", include_str!("style.css")),
    ("page.html", include_str!("page.html")),
    ("macros.html", include_str!("macros.html")),
    ("plan.html", include_str!("../plan/plan.html")),
    ("plan.txt", include_str!("../plan/plan.txt")),
    ("changes.txt", include_str!("../plan/changes.txt")),
    ("meshes.txt", include_str!("../plan/meshes.txt")),
    ("words.txt", include_str!("../plan/words.txt")),
    ("fit.txt", include_str!("../plan/fit.txt")),
    ("report.html", include_str!("../report/report.html")),
    ("pictures.html", include_str!("../report/pictures.html")),
    ("tables.html", include_str!("../report/tables.html")),
];

/// Renders a template.
pub(crate) fn render(name: &str, data: impl Serialize) -> Result<String> {
    let mut environment = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    environment.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build()?);
    // A record of an earlier version lacks fields.
    environment.set_undefined_behavior(UndefinedBehavior::Chainable);
    environment.set_formatter(write_value);
    environment.add_global("version", env!("CARGO_PKG_VERSION"));
    filters::add(&mut environment);
    for (name, source) in TEMPLATES {
        environment.add_template(name, source)?;
    }
    Ok(environment.get_template(name)?.render(Serde(data))?)
}

/// Writes a value: none as `–`, and text escaped in HTML.
fn write_value(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = if value.is_none() { "–".to_owned() } else { value.to_string() };
    match state.auto_escape() {
        AutoEscape::Html if !value.is_safe() => out.write_str(&escape(&text))?,
        _ => out.write_str(&text)?,
    }
    Ok(())
}

/// Escapes text for HTML, including attributes.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
