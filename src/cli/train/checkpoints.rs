//! When a run saves its state, and where it goes on from.

use super::Run;
use super::feed::Feed;
use super::resume::{Resume, check_data};
use crate::cli::note;
use anyhow::{Context, anyhow, bail};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use ulysses::checkpoint::{Checkpoint, CheckpointError, SaveOptions, Saved, Saver, newest, open_verified};
use ulysses::comm::{MeshGroups, ProcessGroup, ProcessGroupExt, ReduceOp};
use ulysses::config::{CheckpointConfig, MemoryConfig, OnSaveError};
use ulysses::engine::{Engine, EngineError, RunRecord};

/// One rank's checkpoints.
pub(super) struct Checkpoints<'a> {
    run: &'a Run,
    /// Of all ranks, for checkpoints and what else is between the steps: its traffic is not that of a step.
    group: Arc<dyn ProcessGroup>,
    run_id: String,
    saving: Option<Saving<'a>>,
}

struct Saving<'a> {
    config: &'a CheckpointConfig,
    saver: Saver,
}

impl<'a> Checkpoints<'a> {
    pub(super) fn new(run: &'a Run, groups: &MeshGroups, engine: &Engine) -> anyhow::Result<Self> {
        let all = groups.whole()?;
        let group = all.split("checkpoint", Some(0), all.rank())?.context("all ranks are in one group")?;
        let start = |config: &'a CheckpointConfig| {
            // A save in the background writes from a copy beside the state, where what waits elsewhere has no room.
            let MemoryConfig { offload_optimizer, offload_parameters, .. } = &run.config.memory;
            let is_moved =
                [offload_optimizer, offload_parameters].map(|state| state.is_moved_from(run.device));
            let background = config.background && !is_moved.contains(&true);
            let options = SaveOptions { keep_last: config.keep_last, background };
            let saver = engine.saver(group.clone(), &run.output, options)?;
            Ok::<_, anyhow::Error>(Saving { config, saver })
        };
        let saving = run.config.checkpoint.as_ref().map(start).transpose()?;
        Ok(Self { run, group, run_id: run.new_run_id.clone(), saving })
    }

    /// All ranks, for what is not part of a step.
    pub(super) fn group(&self) -> &dyn ProcessGroup {
        &*self.group
    }

    /// What tells the run from others.
    pub(super) fn run_id(&self) -> &str {
        &self.run_id
    }

    /// Goes on where the command line asks to.
    pub(super) fn resume(&mut self, engine: &mut Engine, feed: &mut Feed<'_>) -> anyhow::Result<()> {
        let Some(checkpoint) = self.find()? else { return Ok(()) };
        let manifest = checkpoint.manifest();
        // The one that was looked at before the ranks started may have been passed over.
        let samples_consumed = match check_data(&checkpoint, self.run.config.seed, &self.run.phases) {
            Ok(()) => manifest.progress.data.samples_consumed,
            // A restart finds the data that it goes on with in its own checkpoints.
            Err(CheckpointError::Mismatch { what, saved, wanted, .. }) if self.run.reset_data => {
                self.tell(|| {
                    format!(
                        "--reset-data: {what} was {saved} and is {wanted}: from the beginning of the data"
                    )
                });
                0
            }
            Err(error) => return Err(cannot_resume(error)),
        };
        match engine.load_checkpoint(&checkpoint) {
            Err(EngineError::Checkpoint(error)) => return Err(cannot_resume(*error)),
            loaded => loaded?,
        }
        feed.resume(manifest.progress.step, samples_consumed)?;
        self.run_id = manifest.run_id.clone();
        self.tell(|| format!("resumed from {}", checkpoint.dir().display()));
        Ok(())
    }

    fn find(&self) -> anyhow::Result<Option<Checkpoint>> {
        match &self.run.resume {
            None => Ok(None),
            Some(Resume::From(dir)) => Ok(Some(open_verified(dir, &*self.group)?)),
            Some(Resume::Newest(dir)) => {
                let directory = dir.as_ref().unwrap_or(&self.run.output);
                let found = newest(directory, &*self.group)?;
                for fault in found.refused {
                    self.tell(|| format!("passed over a damaged checkpoint: {fault}"));
                }
                if found.checkpoint.is_none() {
                    let directory = directory.display();
                    self.tell(|| format!("{directory} has no checkpoint to resume: starting at step 1"));
                }
                Ok(found.checkpoint)
            }
        }
    }

    /// Saves what is due after a step, and says whether the run shall end: a rank that was sent
    /// a signal ends all of them. Collective.
    pub(super) fn after_step(
        &mut self,
        engine: &mut Engine,
        feed: &Feed<'_>,
        last_step: u64,
    ) -> anyhow::Result<bool> {
        let Some(mut saving) = self.saving.take() else { return Ok(false) };
        let step = engine.attempted_steps();
        let asked = i64::from(self.run.stop.load(Ordering::Relaxed));
        let stop = self.group.all_reduce_values(&[asked], ReduceOp::Max)?[0] == 1;
        let is_last = stop || step == last_step;
        let is_due = saving.config.interval.is_some_and(|interval| step.is_multiple_of(interval));
        self.settle(&mut saving, false, |saving| Ok(saving.saver.poll()?))?;
        if is_last || is_due {
            // That an earlier save failed must not keep this one from being tried.
            self.settle(&mut saving, false, |saving| Ok(saving.saver.finish()?))?;
            let record = RunRecord {
                run_id: self.run_id.clone(),
                model: self.run.llama.to_hf_json(),
                data: feed.cursor(),
            };
            self.settle(&mut saving, is_last, |saving| engine.save_checkpoint(&mut saving.saver, record))?;
            let in_background = saving.config.background && saving.saver.is_pending() && !is_last;
            if in_background {
                self.tell(|| format!("checkpoint: writing step {step} in the background"));
            } else {
                self.settle(&mut saving, is_last, |saving| Ok(saving.saver.finish()?))?;
            }
        }
        self.saving = Some(saving);
        Ok(stop)
    }

    /// Tells what a save came to. One that failed ends the run if the config says so, and
    /// always if it was to be the run's last.
    fn settle<'s>(
        &self,
        saving: &'s mut Saving<'a>,
        is_last: bool,
        work: impl FnOnce(&'s mut Saving<'a>) -> Result<Option<Saved>, EngineError>,
    ) -> anyhow::Result<()> {
        let goes_on = saving.config.on_error == OnSaveError::Continue && !is_last;
        match work(saving) {
            Ok(None) => {}
            Ok(Some(saved)) => self.tell_saved(&saved),
            Err(EngineError::Checkpoint(error)) => match *error {
                error @ CheckpointError::NotSaved { .. } if goes_on => {
                    self.tell(|| format!("{error}; training goes on"));
                }
                error => bail!(error),
            },
            Err(error) => bail!(error),
        }
        Ok(())
    }

    fn tell_saved(&self, saved: &Saved) {
        let megabytes = saved.bytes as f64 / 1e6;
        self.tell(|| {
            let path = saved.path.display();
            format!("checkpoint: {path}, {megabytes:.1} MB in {:.2} s", saved.seconds)
        });
        for remark in &saved.remarks {
            self.tell(|| format!("the checkpoint is safe, but {remark}"));
        }
    }

    /// One line for all ranks.
    fn tell(&self, line: impl FnOnce() -> String) {
        if self.group.rank() == 0 {
            note(line());
        }
    }
}

/// The cause comes first, and stays one that can be asked for.
fn cannot_resume(cause: CheckpointError) -> anyhow::Error {
    let message = format!("{cause}; the run cannot resume");
    anyhow!(cause).context(message)
}
