//! The output directory of a run.

use crate::cli::note;
use anyhow::{Context, ensure};
use std::path::{Path, PathBuf};
use ulysses::config::Config;

/// Makes the output directory, keeps what an earlier run left there under other names, and
/// writes the resolved config.
pub(super) fn prepare_output(config_path: &Path, config: &Config) -> anyhow::Result<PathBuf> {
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
    keep_earlier_run(&output)?;
    let path = output.join("config.json");
    let json = serde_json::to_string_pretty(config)?;
    std::fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(output)
}

/// Renames metrics and config of an earlier run, both with the same number.
fn keep_earlier_run(output: &Path) -> anyhow::Result<()> {
    let names =
        |n: u32| [format!("metrics.{n}.jsonl"), format!("config.{n}.json")].map(|name| output.join(name));
    let kept = free(names, |names| names.iter().all(|path| !path.exists()));
    for (name, kept) in ["metrics.jsonl", "config.json"].into_iter().zip(kept) {
        let path = output.join(name);
        if path.exists() {
            std::fs::rename(&path, &kept).with_context(|| format!("cannot rename {}", path.display()))?;
            note(format_args!("{name} of an earlier run is now {}", kept.display()));
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
