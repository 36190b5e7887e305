//! `ulysses bench checkpoint`.

use super::case::{Case, Figure};
use super::report::{BYTES, Report};
use super::training::{Training, TrainingArgs, TrainingRank};
use super::{BenchRank, Benchmark, Failure, JobRanks, OrFail};
use anyhow::{Context, Result};
use serde_json::json;
use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use ulysses::checkpoint::{LocalStorage, SaveOptions, Storage, step_name};
use ulysses::engine::RunRecord;

/// Tokens per sequence of the single step, which makes the state nonzero.
const SEQ_LEN: usize = 64;

#[derive(clap::Args)]
pub(super) struct Saves {
    #[command(flatten)]
    training: TrainingArgs,
    /// Directory whose disk to measure [default: the system's temporary directory].
    ///
    /// Files are written to `.ulysses-bench-PID` there and removed, unless the process is killed.
    #[arg(long)]
    output: Option<PathBuf>,
}

impl Benchmark for Saves {
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure> {
        let training = self.training.prepare(SEQ_LEN)?;
        let output = self.output.clone().unwrap_or_else(std::env::temp_dir);
        let scratch = scratch_dir(&output).context("--output").or_usage()?;
        let mut ranks = self.training.place(ranks, &training)?;
        let figures = ranks.run(repeats, |bench| measure(bench, &training, scratch.path()))?;
        let mut settings = self.training.settings(&training);
        settings["bytes"] = json!(figures[0].work as u64);
        settings["output"] = json!(output);
        Ok(Report {
            bench: "checkpoint",
            settings,
            method: "save: compare replicas, write, hash and fsync every file, publish; copy: copy and fsync the same \
                     files one after the other, from the page cache; alternating, median"
                .to_owned(),
            unit: BYTES,
            figures,
            ranks,
        })
    }
}

/// Creates a directory for files of this process, which is removed on drop.
pub(crate) fn scratch_dir(parent: &Path) -> Result<TempDir> {
    let name = format!(".ulysses-bench-{}", std::process::id());
    let directory = tempfile::Builder::new().prefix(&name).rand_bytes(0).tempdir_in(parent);
    directory.with_context(|| format!("cannot create {}", parent.join(name).display()))
}

/// Measures saves, and copies of the saved files.
fn measure(bench: &BenchRank<'_>, training: &Training, dir: &Path) -> Result<Vec<Figure>> {
    let mut rank = training.start(bench.rank, &bench.device)?;
    rank.step()?;
    let TrainingRank { mut engine, loader } = rank;
    let mut saver = engine.saver(bench.rank.group.clone(), dir, SaveOptions::default())?;
    let (saved, copied) = (dir.join(step_name(engine.attempted_steps())), dir.join("copy"));
    let record = RunRecord::new("bench", training.source.config.to_hf_json(), &loader)?;
    let bytes = Cell::new(0);
    let is_first = bench.rank.rank == 0;
    let save = || {
        engine.save_checkpoint(&mut saver, record.clone())?;
        bytes.set(saver.finish()?.map_or(0, |saved| saved.bytes));
        anyhow::Ok(())
    };
    // The work is known after a save.
    let save = Case::new("save", 1.0, save).against("copy");
    let save = save.after(|| if is_first { remove(&saved) } else { Ok(()) });
    let copy = Case::new("copy", 1.0, || if is_first { copy_dir(&saved, &copied) } else { Ok(()) });
    let copy = copy.after(|| if is_first { remove(&copied) } else { Ok(()) });
    let mut figures = bench.take_turns(vec![save, copy])?;
    // The baseline first.
    figures.reverse();
    for figure in &mut figures {
        figure.work = bytes.get() as f64;
    }
    Ok(figures)
}

/// Removes a directory and syncs its parent, so that the next writer starts on an idle disk.
fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    Ok(LocalStorage.sync_dir(dir.parent().unwrap_or(dir))?)
}

/// Copies the files of a directory into a new one, with fsync.
fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let copy = to.join(entry.file_name());
        fs::copy(entry.path(), &copy)?;
        File::open(&copy)?.sync_all()?;
    }
    LocalStorage.sync_dir(to)?;
    Ok(LocalStorage.sync_dir(to.parent().unwrap_or(to))?)
}
