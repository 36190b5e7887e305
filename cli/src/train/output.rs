//! The output directory of a run.

use super::record::{EarlierRecord, Record};
use crate::output::log_line;
use anyhow::Context;
use std::path::Path;
use ulysses::regular_file;
use ulysses::trainer::Trainer;
use ulysses::trainer::job::PreparedJob;

/// Prepares the files in the output directory: renames those of another run, and writes the resolved config and
/// `run.json`. A resumed run appends to its metrics.
pub(super) fn begin(job: &PreparedJob, trainer: &Trainer<'_>, record: &Record) -> anyhow::Result<()> {
    let output = record.output();
    let is_new_here = job.options.resume.as_ref().is_some_and(|resume| resume.is_from_elsewhere(output));
    let earlier = if trainer.steps().start > 0 {
        EarlierRecord::read(output, trainer.run_id(), is_new_here)?
    } else {
        EarlierRecord::OtherRun
    };
    let path = output.join("config.json");
    let json = serde_json::to_string_pretty(&job.config)?;
    let is_same = regular_file::read_to_string(&path).is_ok_and(|earlier| earlier == json);
    archive(
        output,
        match earlier {
            EarlierRecord::Parts(_) if is_same => &[],
            EarlierRecord::Parts(_) => &["config.json"],
            EarlierRecord::Damaged => &["config.json", "run.json"],
            EarlierRecord::OtherRun => &["config.json", "run.json", "metrics.jsonl"],
        },
    )?;
    regular_file::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
    record.begin_part(trainer, earlier)
}

/// Renames files to the first number that is free for all.
fn archive(output: &Path, files: &[&str]) -> anyhow::Result<()> {
    let numbered = |name: &str, number: u32| output.join(name.replacen('.', &format!(".{number}."), 1));
    let is_free = |number: &u32| {
        ["metrics.jsonl", "config.json", "run.json"].iter().all(|name| !numbered(name, *number).exists())
    };
    let Some(number) = (1..).find(is_free) else { return Ok(()) };
    for name in files {
        let (path, archived) = (output.join(name), numbered(name, number));
        if path.exists() {
            std::fs::rename(&path, &archived).with_context(|| format!("cannot rename {}", path.display()))?;
            log_line(format_args!("renamed the earlier {name} to {}", archived.display()));
        }
    }
    Ok(())
}
