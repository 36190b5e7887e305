//! `ulysses bench checkpoint`.

use super::report::{Figure, Report, Unit};
use super::training::{Training, TrainingArgs};
use super::turns::{Case, take_turns};
use super::{Failure, Joined, MeasureArgs, OrFail};
use anyhow::{Context, Result, anyhow};
use candle_core::Device;
use serde_json::json;
use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use ulysses::checkpoint::{LocalStorage, SaveOptions, Storage, step_name};
use ulysses::comm::RankContext;
use ulysses::engine::RunRecord;

/// Tokens per sequence of the single step, which makes the state nonzero.
const SEQ_LEN: usize = 64;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    training: TrainingArgs,
    /// Directory whose disk to measure [default: the system's temporary directory].
    ///
    /// Files are written to `.ulysses-bench-PID` there and removed, unless the process is killed.
    #[arg(long)]
    output: Option<PathBuf>,
    #[command(flatten)]
    measuring: MeasureArgs,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let training = args.training.prepare(SEQ_LEN)?;
    let output = args.output.unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new(&output).context("--output").or_usage()?;
    let mut on = args.training.place(Joined::threads(), &training)?;
    let repeats = args.measuring.repeats;
    let measure = |rank: &RankContext, device| measure(rank, &device, &training, &scratch.0, repeats);
    let ([save, copy], bytes) = on.run(training.mesh.world_size(), &training.launch, measure)?;
    let copy = Figure::new("copy", copy, bytes as f64);
    let save = Figure::new("save", save, bytes as f64).against(&copy);
    let mut settings = args.training.settings(&training);
    settings["bytes"] = json!(bytes);
    settings["output"] = json!(output);
    let method = "save: compare replicas, write, hash and fsync every file, publish; copy: copy and fsync the same files \
                  one after the other, from the page cache; alternating, median";
    let report = Report::new("checkpoint", settings, method, Unit::Bytes);
    let report = report.on(training.mesh.world_size(), &training.launch, on.placement());
    args.measuring.print(&Report { figures: vec![copy, save], ..report })
}

/// A temporary directory, removed on drop.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(parent: &Path) -> Result<Self> {
        let path = parent.join(format!(".ulysses-bench-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A leftover directory is harmless, and its name tells its origin.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the seconds of saves and of copies, and the bytes of each.
fn measure(
    rank: &RankContext,
    device: &Device,
    training: &Training,
    dir: &Path,
    repeats: u32,
) -> Result<([Vec<f64>; 2], u64)> {
    let (mut engine, mut loader) = training.start(rank, device)?;
    engine.train_batch(|| loader.next_micro_batch())?;
    let mut saver = engine.saver(rank.group.clone(), dir, SaveOptions::default())?;
    let (saved, copied) = (dir.join(step_name(engine.attempted_steps())), dir.join("copy"));
    let record = RunRecord::new("bench", training.source.config.to_hf_json(), &loader)?;
    let bytes = Cell::new(0);
    let is_first = rank.rank == 0;
    let save = Case::new(|| {
        engine.save_checkpoint(&mut saver, record.clone())?;
        bytes.set(saver.finish()?.map_or(0, |saved| saved.bytes));
        Ok(())
    });
    let save = save.after(|| if is_first { remove(&saved) } else { Ok(()) });
    let copy = Case::new(|| if is_first { copy_dir(&saved, &copied) } else { Ok(()) });
    let copy = copy.after(|| if is_first { remove(&copied) } else { Ok(()) });
    let seconds = take_turns(&*rank.group, device, repeats, vec![save, copy])?;
    let seconds = seconds.try_into().map_err(|_| anyhow!("two cases have two times"))?;
    Ok((seconds, bytes.get()))
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
