//! The parts of a resumed run.

use super::run::RunFiles;
use crate::html::chart::{Unit, text};
use crate::html::{duration, plain, table};
use serde_json::Value;

/// Renders a row per part; empty for a single part.
pub(super) fn of_run(run: &RunFiles) -> String {
    let parts = run.parts();
    if parts.len() == 1 {
        return String::new();
    }
    let rows = parts.iter().enumerate().map(|(index, part)| {
        let totals = &part["totals"];
        let number =
            |value: &Value| value.as_f64().map_or("–".to_owned(), |value| text(value, Unit::Number));
        // Earlier versions counted tokens with labels only.
        let (tokens, label_tokens) = match &totals["label_tokens"] {
            Value::Null => (None, &totals["tokens"]),
            label_tokens => (Some(&totals["tokens"]), label_tokens),
        };
        let sizes = part["mesh"]["shape"].as_array().into_iter().flatten().map(plain);
        let command = part["command"].as_array().into_iter().flatten().map(plain);
        vec![
            format!("{}: {}", index + 1, command.collect::<Vec<_>>().join(" ")),
            sizes.collect::<Vec<_>>().join(" × "),
            steps(part),
            tokens.map_or("–".to_owned(), number),
            number(label_tokens),
            totals["seconds"].as_f64().map_or("–".to_owned(), duration),
        ]
    });
    let note = "<p class=\"faint\">Steps that were repeated after a resume count in the tokens and communication of both \
                parts.</p>\n";
    let table = table(&["part", "dp × sp", "steps", "tokens", "label tokens", "training time"], rows);
    format!("{note}{table}")
}

/// Formats the steps of a part. A killed part has recorded only its first step.
fn steps(part: &Value) -> String {
    let (first, count) = (part["first_step"].as_u64(), part["totals"]["steps"].as_u64());
    match (first, count) {
        (Some(first), Some(count)) => format!("{first} to {}", first.saturating_add(count).saturating_sub(1)),
        (Some(first), None) => format!("from {first}, not finished"),
        (None, Some(count)) => count.to_string(),
        (None, None) => "not finished".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_part_shows_its_steps_or_that_it_did_not_finish() {
        let finished = json!({ "first_step": 6, "totals": { "steps": 7 } });
        assert_eq!(steps(&finished), "6 to 12");
        assert_eq!(steps(&json!({ "first_step": 6, "totals": null })), "from 6, not finished");
        assert_eq!(steps(&json!({ "totals": { "steps": 7 } })), "7", "of an earlier version");
    }
}
