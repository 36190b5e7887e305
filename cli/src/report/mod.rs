//! `ulysses report`: a self-contained HTML page of runs.

mod charts;
mod communication;
mod metrics;
mod page;
mod plan;
mod run;
mod settings;

use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use anyhow::Context;
use run::RunFiles;
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct ReportArgs {
    /// Output directories of runs. Curves of several runs share charts.
    #[arg(required = true, value_name = "DIR")]
    runs: Vec<PathBuf>,
    /// Output file [default: report.html in the first directory].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(super) fn run(args: &ReportArgs) -> Result<(), Failure> {
    let mut runs =
        args.runs.iter().map(|dir| RunFiles::read(dir)).collect::<anyhow::Result<Vec<_>>>().or_usage()?;
    make_names_unique(&mut runs);
    let output = args.output.clone().unwrap_or_else(|| args.runs[0].join("report.html"));
    ulysses::regular_file::write(&output, page::page(&runs).or_run()?)
        .with_context(|| format!("--output: cannot write {}", output.display()))
        .or_run()?;
    log_line(format_args!("report      {} (open in a browser)", output.display()));
    Ok(())
}

/// Renames runs with equal directory names to their paths.
fn make_names_unique(runs: &mut [RunFiles]) {
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    for run in runs {
        if names.iter().filter(|name| **name == run.name).count() > 1 {
            run.name = run.dir.display().to_string();
        }
    }
}
