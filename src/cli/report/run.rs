//! What a run has left in its output directory.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// One run.
pub(super) struct RunFiles {
    /// What it is called in the report.
    pub(super) name: String,
    pub(super) dir: PathBuf,
    /// Lines of steps, and of evaluations.
    pub(super) steps: Vec<Value>,
    pub(super) evaluations: Vec<Value>,
    /// `run.json`; null where an earlier version has not written it.
    pub(super) record: Value,
    /// `config.json`, complete.
    pub(super) config: Value,
}

impl RunFiles {
    pub(super) fn read(dir: &Path) -> Result<Self> {
        ensure!(
            dir.is_dir(),
            "{}: no such directory; an output directory of `ulysses train` is needed",
            dir.display()
        );
        let metrics = dir.join("metrics.jsonl");
        let text = std::fs::read_to_string(&metrics).with_context(|| {
            format!("{}: cannot be read, so this is no output directory of a run", metrics.display())
        })?;
        let lines = parse(&text).with_context(|| metrics.display().to_string())?;
        let (steps, evaluations): (Vec<_>, Vec<_>) =
            lines.into_iter().partition(|line| !line["loss"].is_null());
        ensure!(!steps.is_empty(), "{}: has no step yet", metrics.display());
        let name =
            dir.canonicalize().ok().and_then(|dir| Some(dir.file_name()?.to_string_lossy().into_owned()));
        Ok(Self {
            name: name.unwrap_or_else(|| dir.display().to_string()),
            dir: dir.to_owned(),
            steps,
            evaluations,
            record: read_json(&dir.join("run.json"))?,
            config: read_json(&dir.join("config.json"))?,
        })
    }

    /// The values of a metric, by step; those of skipped steps are none.
    pub(super) fn curve(&self, key: &str) -> Vec<(f64, f64)> {
        let point = |line: &Value| Some((line["step"].as_f64()?, line[key].as_f64()?));
        self.steps.iter().filter(|line| line["skipped"] != true).filter_map(point).collect()
    }

    pub(super) fn evaluation_curve(&self, key: &str) -> Vec<(f64, f64)> {
        let point = |line: &Value| Some((line["step"].as_f64()?, line[key].as_f64()?));
        self.evaluations.iter().filter_map(point).collect()
    }

    /// The sum of a metric over all steps.
    pub(super) fn sum(&self, key: &str) -> f64 {
        self.steps.iter().filter_map(|line| line[key].as_f64()).sum()
    }

    pub(super) fn last(&self, key: &str) -> Option<f64> {
        self.curve(key).last().map(|(_, value)| *value)
    }
}

/// Lines of JSON. The last one may be cut off: the run may be writing it.
fn parse(text: &str) -> Result<Vec<Value>> {
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        match serde_json::from_str(line) {
            Ok(value) => lines.push(value),
            Err(_) if index + 1 == text.lines().count() && !text.ends_with('\n') => {}
            Err(error) => return Err(error).with_context(|| format!("line {}", index + 1)),
        }
    }
    Ok(lines)
}

fn read_json(path: &Path) -> Result<Value> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        text => serde_json::from_str(&text.with_context(|| path.display().to_string())?)
            .with_context(|| path.display().to_string()),
    }
}
