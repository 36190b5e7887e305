//! The files in the output directory of a run.

use super::metrics::Lines;
use crate::template::chart::Point;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use ulysses::config::Config;
use ulysses::regular_file;

/// One run.
pub(super) struct RunFiles {
    /// Its name in the report.
    pub(super) name: String,
    pub(super) dir: PathBuf,
    pub(super) lines: Lines,
    /// `run.json`; null for runs of earlier versions.
    pub(super) record: Value,
    /// `config.json`, resolved.
    pub(super) config: Value,
}

impl RunFiles {
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let found = if dir.is_file() { "a file" } else { "nothing" };
        ensure!(
            dir.is_dir(),
            "{}: expected an output directory of `ulysses train`, found {found}",
            dir.display()
        );
        let name =
            dir.canonicalize().ok().and_then(|dir| Some(dir.file_name()?.to_string_lossy().into_owned()));
        Ok(Self {
            name: name.unwrap_or_else(|| dir.display().to_string()),
            dir: dir.to_owned(),
            lines: Lines::read(&dir.join("metrics.jsonl"))?,
            record: read_object(&dir.join("run.json"))?,
            config: read_object(&dir.join("config.json"))?,
        })
    }

    /// Returns the records of the parts of a resumed run, oldest first. The last one is the whole record.
    pub(super) fn parts(&self) -> Vec<&Value> {
        let earlier = self.record["earlier"].as_array().into_iter().flatten();
        earlier.chain([&self.record]).collect()
    }

    /// Returns the ranks of the last finished part.
    pub(super) fn ranks(&self) -> Option<&Vec<Value>> {
        self.parts().into_iter().rev().find_map(|part| part["ranks"].as_array())
    }

    /// Returns the config, if this version can read it.
    pub(super) fn parsed_config(&self) -> Option<Config> {
        let text = serde_json::to_string(&self.config).ok()?;
        Config::from_json_str(&text, "config.json").ok()
    }

    /// Returns the values of a metric by step, without skipped steps.
    pub(super) fn curve(&self, key: &str) -> Vec<Point> {
        curve(self.lines.steps.iter().filter(|line| line["skipped"] != true), key)
    }

    pub(super) fn evaluation_curve(&self, key: &str) -> Vec<Point> {
        curve(self.lines.evaluations.iter(), key)
    }

    /// Returns the sum of a metric over all steps.
    pub(super) fn sum(&self, key: &str) -> f64 {
        self.lines.steps.iter().filter_map(|line| line[key].as_f64()).sum()
    }

    /// Returns a metric per second, over the steps that have it, if any.
    pub(super) fn rate(&self, key: &str) -> Option<f64> {
        let of_step = |line: &Value| Some((line[key].as_f64()?, line["step_seconds"].as_f64()?));
        let steps = self.lines.steps.iter().filter_map(of_step);
        let (sum, seconds) = steps.fold((0.0, 0.0), |sums, step| (sums.0 + step.0, sums.1 + step.1));
        Some(sum / seconds).filter(|rate| rate.is_finite())
    }

    pub(super) fn last(&self, key: &str) -> Option<f64> {
        self.curve(key).last().map(|point| point.y)
    }
}

fn curve<'a>(lines: impl Iterator<Item = &'a Value>, key: &str) -> Vec<Point> {
    lines.filter_map(|line| Some(Point { x: line["step"].as_f64()?, y: line[key].as_f64()? })).collect()
}

/// Reads a JSON object; null if the file does not exist.
fn read_object(path: &Path) -> Result<Value> {
    let name = || path.display().to_string();
    let text = match regular_file::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Value::Null),
        text => text.with_context(name)?,
    };
    let value: Value = serde_json::from_str(&text).with_context(name)?;
    ensure!(value.is_object(), "{}: expected a JSON object", path.display());
    Ok(value)
}
