//! Reads and validates `metrics.jsonl`.

use crate::output::log_line;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};
use std::path::Path;

/// Keys of a step that must be non-negative numbers.
const OF_STEP: [&str; 22] = [
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "label_tokens",
    "label_tokens_per_second",
    "step_seconds",
    "data_seconds",
    "forward_seconds",
    "backward_seconds",
    "update_seconds",
    "compute_seconds",
    "all_to_all_seconds",
    "exposed_exchange_seconds",
    "ring_seconds",
    "exposed_ring_seconds",
    "pp_comm_seconds",
    "tp_comm_seconds",
    "dp_comm_seconds",
    "sp_comm_seconds",
    "gemm_share",
    "memory_bytes",
];

/// Maximum value, so that sums and scales of charts stay finite.
const LARGEST: f64 = 1e100;

/// Maximum step, so that consecutive steps differ in f64.
const LAST_STEP: u64 = 1_000_000_000_000_000;

/// The lines of steps, of evaluations and of restarts.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pub(super) steps: Vec<Value>,
    pub(super) evaluations: Vec<Value>,
    pub(super) restarts: Vec<Value>,
}

impl Lines {
    /// Reads the file. An incomplete last line is skipped with a note: the run is writing it, or was killed.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let bytes = ulysses::regular_file::read(path).with_context(|| {
            format!("cannot read {}: is this the output directory of a run?", path.display())
        })?;
        let mut lines = Self::default();
        for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
            let place = format!("{}:{}", path.display(), index + 1);
            match serde_json::from_slice(line) {
                Ok(value) => lines.add(value).with_context(|| place)?,
                Err(_) if !line.ends_with(b"\n") => {
                    log_line(format_args!("note: {place}: skipped an incomplete line"));
                }
                Err(error) => {
                    // serde_json appends a position, whose line is always the first.
                    let message = error.to_string();
                    let message = message.split(" at line ").next().unwrap_or_default();
                    bail!("{place}:{}: not valid JSON: {message}", error.column());
                }
            }
        }
        ensure!(!lines.steps.is_empty(), "{}: contains no step yet", path.display());
        Ok(lines)
    }

    fn add(&mut self, line: Value) -> Result<()> {
        let Value::Object(mut fields) = line else { bail!("expected an object, found {}", short(&line)) };
        let is_evaluation = fields.contains_key("eval_loss");
        let is_restart = fields.contains_key("restart");
        // Evaluations and restarts may come before the first step.
        let step = step(&fields, if is_evaluation || is_restart { 0 } else { 1 })?;
        if is_restart {
            self.restarts.push(fields.into());
            return Ok(());
        }
        if is_evaluation {
            check_number(&fields, "eval_loss", -LARGEST)?;
            self.evaluations.push(fields.into());
            return Ok(());
        }
        ensure!(fields.contains_key("loss"), "missing `loss` or `eval_loss`");
        check_number(&fields, "loss", -LARGEST)?;
        OF_STEP.iter().try_for_each(|key| check_number(&fields, key, 0.0))?;
        let before = self.steps.last().and_then(|line| line["step"].as_u64()).unwrap_or(0);
        ensure!(step > before, "`step`: expected a step after {before}, found {step}");
        name_label_tokens(&mut fields);
        self.steps.push(fields.into());
        Ok(())
    }
}

/// Renames keys of earlier versions, where `tokens` counted only tokens with a label.
fn name_label_tokens(fields: &mut Map<String, Value>) {
    if fields.contains_key("label_tokens") {
        return;
    }
    for key in ["tokens", "tokens_per_second"] {
        if let Some(value) = fields.shift_remove(key) {
            fields.insert(format!("label_{key}"), value);
        }
    }
}

fn step(fields: &Map<String, Value>, least: u64) -> Result<u64> {
    let Some(value) = fields.get("step") else { bail!("missing `step`") };
    let step = value.as_u64().filter(|step| (least..=LAST_STEP).contains(step));
    step.with_context(|| format!("`step`: expected an integer from {least} to 10^15, found {}", short(value)))
}

/// Checks a number. Missing and null (not finite) values are allowed.
fn check_number(fields: &Map<String, Value>, key: &str, least: f64) -> Result<()> {
    let value = fields.get(key).unwrap_or(&Value::Null);
    let is_right = value.as_f64().is_some_and(|number| (least..=LARGEST).contains(&number));
    let from = if least < 0.0 { format!("{least:e}") } else { "0".to_owned() };
    ensure!(
        is_right || value.is_null(),
        "`{key}`: expected a number from {from} to {LARGEST:e}, found {}",
        short(value)
    );
    Ok(())
}

/// Formats a value for a message.
fn short(value: &Value) -> String {
    const MAX_CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Lines, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, text).unwrap();
        let relative =
            |error: anyhow::Error| format!("{error:#}").replace(&dir.path().display().to_string(), "out");
        Lines::read(&path).map_err(relative)
    }

    #[test]
    fn invalid_values_are_rejected_with_their_line() {
        let cases: [(&str, &str); 12] = [
            ("[1]", "expected an object, found [1]"),
            (r#"{"loss": 1}"#, "missing `step`"),
            (r#"{"step": -1, "loss": 1}"#, "`step`: expected an integer from 1 to 10^15, found -1"),
            (r#"{"step": 1.5, "loss": 1}"#, "found 1.5"),
            (r#"{"step": 18446744073709551615, "loss": 1}"#, "found 18446744073709551615"),
            (r#"{"step": 1, "loss": 1}"#, "`step`: expected a step after 1, found 1"),
            (r#"{"step": 2}"#, "missing `loss` or `eval_loss`"),
            (r#"{"step": 2, "loss": 1e308}"#, "`loss`: expected a number from -1e100 to 1e100, found 1e+308"),
            (r#"{"step": 2, "loss": "low"}"#, "found \"low\""),
            (
                r#"{"step": 2, "loss": 1, "step_seconds": -1e-3}"#,
                "`step_seconds`: expected a number from 0 to",
            ),
            (r#"{"step": 2, "eval_loss": -1e308}"#, "`eval_loss`: expected"),
            ("{\"step\": 2, \"loss\": 1,, }", "not valid JSON: key must be a string"),
        ];
        for (line, expected) in cases {
            let message = read(format!("{{\"step\":1,\"loss\":2.0}}\n{line}\n").as_bytes()).unwrap_err();
            assert!(message.starts_with("out/metrics.jsonl:2:") && message.contains(expected), "{message}");
            assert_eq!(message.matches("line").count(), 0, "one place: {message}");
        }
        assert!(read(b"{\"step\":1,\"loss\":2.0,\"a\":\"\xff\"}\n").unwrap_err().contains(":1:"));
        assert_eq!(read(b"").unwrap_err(), "out/metrics.jsonl: contains no step yet");
    }

    #[test]
    fn tokens_of_an_earlier_version_are_those_with_labels() {
        let lines = read(
            b"{\"step\":1,\"loss\":2,\"tokens\":90,\"tokens_per_second\":45}\n\
              {\"step\":2,\"loss\":2,\"tokens\":100,\"label_tokens\":90}\n",
        );
        let steps = lines.unwrap().steps;
        assert_eq!((&steps[0]["tokens"], &steps[0]["label_tokens"]), (&Value::Null, &90.into()));
        assert_eq!(steps[0]["label_tokens_per_second"], 45);
        assert_eq!((&steps[1]["tokens"], &steps[1]["label_tokens"]), (&100.into(), &90.into()));
    }

    #[test]
    fn restarts_may_repeat_steps() {
        let lines = read(
            b"{\"step\":0,\"restart\":1}\n{\"step\":1,\"loss\":2}\n{\"step\":9,\"restart\":2}\n{\"step\":2,\"loss\":2}\n",
        );
        let lines = lines.unwrap();
        assert_eq!((lines.steps.len(), lines.restarts.len()), (2, 2));
    }

    #[test]
    fn non_finite_losses_and_incomplete_lines_are_left_out() {
        let lines =
            read(b"{\"step\":1,\"loss\":null}\n{\"step\":1,\"eval_loss\":null}\n{\"step\":2,\"lo").unwrap();
        assert_eq!((lines.steps.len(), lines.evaluations.len()), (1, 1));
    }
}
