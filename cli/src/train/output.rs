//! The output directory of a run.

use super::record::{self, EarlierRecord};
use super::run::Run;
use crate::output::log_line;
use anyhow::Context;
use serde_json::Value;
use std::path::{Path, PathBuf};
use ulysses::regular_file;

/// Prepares the files in the output directory for the run `run_id`, which resumes after `first_step` steps: renames the
/// files of another run, and writes the resolved config and `run.json`, which it returns. A resumed run appends to its
/// metrics.
pub(super) fn begin(run: &Run, run_id: &str, first_step: u64) -> anyhow::Result<Value> {
    let output = &run.output;
    let is_new_here = run.job.resume.as_ref().is_some_and(|resume| resume.is_from_elsewhere(output));
    let earlier = if first_step > 0 {
        EarlierRecord::read(output, run_id, is_new_here)?
    } else {
        EarlierRecord::OtherRun
    };
    let path = output.join("config.json");
    let json = serde_json::to_string_pretty(&run.job.config)?;
    let is_same = regular_file::read_to_string(&path).is_ok_and(|earlier| earlier == json);
    let archived: &[(&str, &str)] = match earlier {
        EarlierRecord::Parts(_) if is_same => &[],
        EarlierRecord::Parts(_) => &[("config", "json")],
        EarlierRecord::Damaged => &[("config", "json"), ("run", "json")],
        EarlierRecord::OtherRun => &[("config", "json"), ("run", "json"), ("metrics", "jsonl")],
    };
    archive(output, archived)?;
    regular_file::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
    let record = record::begin_part(run, run_id, first_step, earlier);
    record::write(output, &record)?;
    Ok(record)
}

/// Renames files, given by stem and extension, to the first number that is free for all.
fn archive(output: &Path, files: &[(&str, &str)]) -> anyhow::Result<()> {
    let names = |n: u32| -> Vec<PathBuf> {
        ["metrics.N.jsonl", "config.N.json", "run.N.json"]
            .map(|name| output.join(name.replace('N', &n.to_string())))
            .into()
    };
    let is_free = |number: &u32| names(*number).iter().all(|path| !path.exists());
    let Some(number) = (1..).find(is_free) else { return Ok(()) };
    for (stem, extension) in files {
        let path = output.join(format!("{stem}.{extension}"));
        if path.exists() {
            let archived = output.join(format!("{stem}.{number}.{extension}"));
            std::fs::rename(&path, &archived).with_context(|| format!("cannot rename {}", path.display()))?;
            log_line(format_args!("renamed the earlier {stem}.{extension} to {}", archived.display()));
        }
    }
    Ok(())
}
