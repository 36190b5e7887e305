//! The output directory of a run.

use super::record::{self, Earlier};
use super::run::Run;
use super::{profile, trace};
use crate::{Failure, OrFail, log_line};
use anyhow::{Context, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use ulysses::checkpoint::OutputLock;
use ulysses::config::Config;
use ulysses::trainer::{CreatedDirs, check_event_files};

/// Sees that everything can be written that the run writes, and takes the output directory for this job. A run that is
/// refused leaves nothing.
pub(super) fn take(
    config_path: &Path,
    config: &Config,
    trace: Option<&Path>,
) -> Result<(PathBuf, OutputLock), Failure> {
    trace.map_or(Ok(()), trace::check)?;
    profile::check(&config.monitoring.flops_profiler)?;
    let mut created = CreatedDirs::default();
    let output = create(config_path, config, &mut created).or_run()?;
    check_event_files(&config.monitoring, &output, &mut created).or_usage()?;
    // The lock comes last: its file stays.
    let lock = OutputLock::acquire(&output, &job(config_path)).or_run()?;
    created.keep();
    Ok((output, lock))
}

/// Creates the output directory. What is in it stays as it is: the ranks find out whether there is anything to do.
fn create(config_path: &Path, config: &Config, created: &mut CreatedDirs) -> anyhow::Result<PathBuf> {
    let output = match &config.ulysses.output {
        Some(output) => PathBuf::from(output),
        None => {
            let name = config_path.file_stem().unwrap_or_default().to_string_lossy();
            free(|n| PathBuf::from("runs").join(format!("{name}-{n}")), |path| !path.exists())
        }
    };
    ensure!(!output.is_file(), "--output {}: this is a file, a directory is needed", output.display());
    let made = created.create(&output);
    made.with_context(|| format!("cannot create the output directory {}", output.display()))?;
    Ok(output)
}

/// Makes the files in the output directory those of the run called `run_id`, which has done `first_step` steps before:
/// keeps what another run left there under other names, and writes the resolved config and `run.json`, which it
/// returns. A run that goes on goes on with the metrics.
pub(super) fn begin(run: &Run, run_id: &str, first_step: u64) -> anyhow::Result<Value> {
    let output = &run.output;
    let is_new_here = run.prepared.resume.as_ref().is_some_and(|resume| resume.is_from_elsewhere(output));
    let earlier = if first_step > 0 { Earlier::read(output, run_id, is_new_here)? } else { Earlier::Another };
    let kept: &[(&str, &str)] = match earlier {
        Earlier::Parts(_) => &[("config", "json")],
        Earlier::Damaged => &[("config", "json"), ("run", "json")],
        Earlier::Another => &[("config", "json"), ("run", "json"), ("metrics", "jsonl")],
    };
    keep(output, kept)?;
    let path = output.join("config.json");
    let json = serde_json::to_string_pretty(&run.prepared.config)?;
    std::fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
    let record = record::of_part(run, run_id, first_step, earlier);
    record::write(output, &record)?;
    Ok(record)
}

/// What another job is told that wants the same directory.
fn job(config_path: &Path) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "this host" } else { host.trim() };
    format!("`ulysses train {}`, process {} on {host}", config_path.display(), std::process::id())
}

/// Renames files, given by stem and extension, all with the same number.
fn keep(output: &Path, files: &[(&str, &str)]) -> anyhow::Result<()> {
    let names = |n: u32| -> Vec<PathBuf> {
        ["metrics.N.jsonl", "config.N.json", "run.N.json"]
            .map(|name| output.join(name.replace('N', &n.to_string())))
            .into()
    };
    let number = free(|n| n, |n| names(*n).iter().all(|path| !path.exists()));
    for (stem, extension) in files {
        let path = output.join(format!("{stem}.{extension}"));
        if path.exists() {
            let kept = output.join(format!("{stem}.{number}.{extension}"));
            std::fs::rename(&path, &kept).with_context(|| format!("cannot rename {}", path.display()))?;
            log_line(format_args!("the earlier {stem}.{extension} is kept as {}", kept.display()));
        }
    }
    Ok(())
}

/// The first numbered name that is free.
fn free<T>(name: impl Fn(u32) -> T, is_free: impl Fn(&T) -> bool) -> T {
    let mut number = 1;
    loop {
        let candidate = name(number);
        if is_free(&candidate) {
            return candidate;
        }
        number += 1;
    }
}
