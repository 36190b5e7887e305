//! `ulysses completions` and `ulysses man`.

use super::arguments::command;
use crate::failure::{Failure, OrFail};
use crate::output::{log_line, print};
use anyhow::{Context, anyhow};
use clap_complete::Shell;
use std::path::Path;

const NAME: &str = "ulysses";

pub(super) fn completions(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), NAME, &mut script);
    print(String::from_utf8_lossy(&script))
}

/// Writes `ulysses.1`, `ulysses-train.1` and so on.
pub(super) fn pages(dir: &Path) -> Result<(), Failure> {
    let place = || format!("cannot write man pages to {}", dir.display());
    if dir.is_file() {
        return Err(Failure::Run(anyhow!("{}: expected a directory, found a file", place())));
    }
    std::fs::create_dir_all(dir).with_context(place).or_run()?;
    clap_mangen::generate_to(command(), dir).with_context(place).or_run()?;
    log_line(format_args!(
        "man pages written; read one with: man {}",
        dir.join(format!("{NAME}.1")).display()
    ));
    Ok(())
}
