//! When a run saves its state, and where it goes on from.

use super::Run;
use super::evaluations::EvaluationTracker;
use super::feed::Feed;
use super::resume::{Resume, check_data};
use crate::note;
use anyhow::{Context, anyhow, bail};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use ulysses::checkpoint::{
    Checkpoint, CheckpointError, Evaluated, Manifest, SaveOptions, Saved, Saver, newest, open_verified,
    step_name,
};
use ulysses::comm::{MeshGroups, ProcessGroup, ProcessGroupExt, ReduceOp};
use ulysses::config::{CheckpointConfig, OnSaveError, ZeroConfig};
use ulysses::engine::{Engine, EngineError, RunRecord};

/// One rank's checkpoints.
pub(super) struct Checkpoints<'a> {
    run: &'a Run,
    /// Of all ranks, for checkpoints and what else is between the steps: its traffic is not that of a step.
    group: Arc<dyn ProcessGroup>,
    run_id: String,
    /// The last one that this run has saved.
    newest: Option<PathBuf>,
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
            let ZeroConfig { offload_optimizer, offload_param, .. } = &run.config.zero;
            let is_moved = [offload_optimizer, offload_param].map(|state| state.is_moved_from(run.device));
            let background = config.background && !is_moved.contains(&true);
            let keep_last = Some(config.keep_last).filter(|keep| *keep > 0);
            let options = SaveOptions { keep_last, background };
            let saver = engine.saver(group.clone(), &run.output, options)?;
            Ok::<_, anyhow::Error>(Saving { config, saver })
        };
        let saving = run.config.checkpoint.as_ref().map(start).transpose()?;
        Ok(Self { run, group, run_id: run.new_run_id.clone(), newest: None, saving })
    }

    /// All ranks, for what is not part of a step.
    pub(super) fn group(&self) -> &dyn ProcessGroup {
        &*self.group
    }

    /// The newest checkpoint that this run has saved, for messages.
    pub(super) fn newest(&self) -> Option<String> {
        self.newest.as_ref().map(|path| path.display().to_string())
    }

    /// What tells the run from others.
    pub(super) fn run_id(&self) -> &str {
        &self.run_id
    }

    /// Goes on where the command line asks to.
    pub(super) fn resume(
        &mut self,
        engine: &mut Engine,
        feed: &mut Feed<'_>,
        evaluations: &mut EvaluationTracker,
    ) -> anyhow::Result<()> {
        let Some(checkpoint) = self.find()? else { return Ok(()) };
        let manifest = checkpoint.manifest();
        // The one that was looked at before the ranks started may have been passed over.
        let mut is_reset = false;
        let samples_consumed = match check_data(&checkpoint, self.run.config.seed, &self.run.phases) {
            Ok(()) => manifest.progress.data.samples_consumed,
            // A restart finds the data that it goes on with in its own checkpoints.
            Err(CheckpointError::Mismatch { what, saved, wanted, .. }) if self.run.reset_data => {
                self.tell(|| {
                    format!(
                        "--reset-data: {what} was {saved} and is {wanted}: from the beginning of the data"
                    )
                });
                is_reset = true;
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
        evaluations.restore(manifest.progress.evaluations, self.has_best(manifest)?);
        if is_reset {
            evaluations.restart_patience();
        }
        self.tell(|| format!("resumed from {}", checkpoint.dir().display()));
        let step = manifest.progress.step;
        if steps_name(checkpoint.dir()).is_some_and(|name| name != step_name(step)) {
            self.tell(|| format!("its directory was renamed: by its manifest it is of step {step}"));
        }
        Ok(())
    }

    /// Whether the best checkpoint up to the one that the run goes on from is in the output directory. Collective.
    fn has_best(&self, resumed: &Manifest) -> anyhow::Result<bool> {
        let is_here = |best: Evaluated| {
            let found = Manifest::read(&self.run.output.join(step_name(best.step)));
            found.is_ok_and(|found| found.run_id == resumed.run_id && found.progress.step == best.step)
        };
        let best = resumed.progress.evaluations.best_checkpoint.filter(|_| self.group.rank() == 0);
        let is_here = best.is_some_and(is_here);
        Ok(self.group.all_reduce_values(&[i64::from(is_here)], ReduceOp::Max)?[0] == 1)
    }

    /// Says when checkpoints are saved, and which of them stay.
    pub(super) fn announce(&self) {
        let Some(Saving { config, .. }) = &self.saving else { return };
        let every =
            config.interval.map_or_else(String::new, |interval| format!("every {interval} steps and "));
        let stay = match config.keep_last {
            0 => "all of them stay".to_owned(),
            keep => format!("the last {keep} stay"),
        };
        let best = match config.keep_best {
            true => ", and the one with the lowest evaluation loss (`checkpoint.keep_best`)",
            false => "",
        };
        self.tell(|| {
            format!(
                "checkpoints: {every}after the last step; {stay} (`checkpoint.keep_last`, 0 keeps all){best}"
            )
        });
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
        evaluations: &mut EvaluationTracker,
        last_step: u64,
    ) -> anyhow::Result<bool> {
        let step = engine.attempted_steps();
        let asked = i64::from(self.run.stop.load(Ordering::Relaxed));
        let stop = self.group.all_reduce_values(&[asked], ReduceOp::Max)?[0] == 1;
        let Some(mut saving) = self.saving.take() else { return Ok(stop) };
        let is_last = stop || step == last_step || evaluations.stops_early();
        let is_due = saving.config.interval.is_some_and(|interval| step.is_multiple_of(interval))
            || evaluations.is_best_checkpoint(step);
        self.settle(&mut saving, evaluations, false, |saving| Ok(saving.saver.poll()?))?;
        if is_last || is_due {
            // That an earlier save failed must not keep this one from being tried.
            self.settle(&mut saving, evaluations, false, |saving| Ok(saving.saver.finish()?))?;
            let record = RunRecord {
                run_id: self.run_id.clone(),
                model: self.run.llama.to_hf_json(),
                source: self.run.hf_source.clone(),
                data: feed.cursor(),
                evaluations: evaluations.state,
            };
            self.settle(&mut saving, evaluations, is_last, |saving| {
                engine.save_checkpoint(&mut saving.saver, record)
            })?;
            let in_background = saving.config.background && saving.saver.is_pending() && !is_last;
            if in_background {
                self.tell(|| format!("checkpoint: writing step {step} in the background"));
            } else {
                self.settle(&mut saving, evaluations, is_last, |saving| Ok(saving.saver.finish()?))?;
            }
        }
        self.saving = Some(saving);
        Ok(stop)
    }

    /// Whether a checkpoint is being written in the background.
    pub(super) fn is_saving(&self) -> bool {
        self.saving.as_ref().is_some_and(|saving| saving.saver.is_pending())
    }

    /// Tells what a save came to. One that failed ends the run if the config says so, and
    /// always if it was to be the run's last.
    fn settle<'s>(
        &mut self,
        saving: &'s mut Saving<'a>,
        evaluations: &mut EvaluationTracker,
        is_last: bool,
        work: impl FnOnce(&'s mut Saving<'a>) -> Result<Option<Saved>, EngineError>,
    ) -> anyhow::Result<()> {
        let goes_on = saving.config.on_error == OnSaveError::Continue && !is_last;
        match work(saving) {
            Ok(None) => {}
            Ok(Some(saved)) => {
                self.tell_saved(&saved);
                evaluations.saved(saved.step);
                self.newest = Some(saved.path);
            }
            Err(EngineError::Checkpoint(error)) => match *error {
                error @ CheckpointError::NotSaved { step, .. } if goes_on => {
                    evaluations.not_saved(step);
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

/// The name of a checkpoint's directory, if it is one that a run gives.
fn steps_name(dir: &Path) -> Option<&str> {
    dir.file_name()?.to_str().filter(|name| name.starts_with("step_"))
}

/// The cause comes first, and stays one that can be asked for.
fn cannot_resume(cause: CheckpointError) -> anyhow::Error {
    let message = format!("{cause}; the run cannot resume");
    anyhow!(cause).context(message)
}
