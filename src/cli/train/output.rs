//! The output directory of a run.

use crate::cli::note;
use anyhow::{Context, ensure};
use std::path::{Path, PathBuf};
use ulysses::checkpoint::OutputLock;
use ulysses::config::Config;

/// Makes the output directory and takes its lock, keeps what an earlier run left there under
/// other names, and writes the resolved config. A run that resumes goes on with the metrics.
pub(super) fn prepare_output(
    config_path: &Path,
    config: &Config,
    is_resuming: bool,
) -> anyhow::Result<(PathBuf, OutputLock)> {
    let output = match &config.output {
        Some(output) => PathBuf::from(output),
        None => {
            let name = config_path.file_stem().unwrap_or_default().to_string_lossy();
            free(|n| PathBuf::from("runs").join(format!("{name}-{n}")), |path| !path.exists())
        }
    };
    ensure!(!output.is_file(), "--output {}: this is a file, a directory is needed", output.display());
    std::fs::create_dir_all(&output)
        .with_context(|| format!("cannot create the output directory {}", output.display()))?;
    let lock = OutputLock::acquire(&output, &job(config_path))?;
    let names: &[(&str, &str)] = &[("config", "json"), ("run", "json"), ("metrics", "jsonl")];
    keep_earlier_run(&output, if is_resuming { &names[..2] } else { names })?;
    let path = output.join("config.json");
    let json = serde_json::to_string_pretty(config)?;
    std::fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
    Ok((output, lock))
}

/// What another job is told that wants the same directory.
fn job(config_path: &Path) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "this host" } else { host.trim() };
    format!("`ulysses train {}`, process {} on {host}", config_path.display(), std::process::id())
}

/// Renames files of an earlier run, given by stem and extension, all with the same number.
fn keep_earlier_run(output: &Path, files: &[(&str, &str)]) -> anyhow::Result<()> {
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
            note(format_args!("{stem}.{extension} of an earlier run is now {}", kept.display()));
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
