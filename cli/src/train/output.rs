//! The output directory of a run.

use super::record::{self, EarlierRecord};
use super::run::Run;
use super::{profile, trace};
use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use anyhow::{Context, ensure};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use ulysses::checkpoint::OutputLock;
use ulysses::config::Config;
use ulysses::regular_file;
use ulysses::trainer::{CreatedDirs, check_event_files};

/// Checks that all output files can be written, and creates and locks the output directory. A rejected run leaves
/// nothing behind.
pub(super) fn acquire(
    config_path: &Path,
    config: &Config,
    trace: Option<&Path>,
) -> Result<(PathBuf, OutputLock), Failure> {
    trace.map_or(Ok(()), trace::check)?;
    profile::check(&config.monitoring.flops_profiler)?;
    let mut created = CreatedDirs::default();
    let output = create(config_path, config, &mut created).or_run()?;
    check_event_files(&config.monitoring, &output, &mut created).or_usage()?;
    // Last, because the lock file stays.
    let lock = OutputLock::acquire(&output, &job(config_path)).or_run()?;
    created.keep();
    Ok((output, lock))
}

/// Creates the output directory without touching files in it: the ranks decide whether anything is left to do.
fn create(config_path: &Path, config: &Config, created: &mut CreatedDirs) -> anyhow::Result<PathBuf> {
    let Some(output) = config.ulysses.output.as_ref().map(PathBuf::from) else {
        let name = config_path.file_stem().unwrap_or_default().to_string_lossy();
        return create_numbered(&name, created).context("cannot create an output directory in runs");
    };
    ensure!(
        !output.exists() || output.is_dir(),
        "--output {}: expected a directory, found a file",
        output.display()
    );
    let made = created.create(&output);
    made.with_context(|| format!("cannot create the output directory {}", output.display()))?;
    Ok(output)
}

/// Creates `runs/NAME-N` with the first number that is free. Runs that start at the same time get different ones.
fn create_numbered(name: &str, created: &mut CreatedDirs) -> io::Result<PathBuf> {
    let runs = Path::new("runs");
    created.create(runs)?;
    let mut number = 1;
    loop {
        let output = runs.join(format!("{name}-{number}"));
        match created.create_new(&output) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            made => return made.map(|()| output),
        }
    }
}

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

/// Describes this job for the error of another one that wants the same directory.
fn job(config_path: &Path) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "this host" } else { host.trim() };
    format!("`ulysses train {}`, process {} on {host}", config_path.display(), std::process::id())
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
