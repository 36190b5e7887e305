//! Reads and checks everything before ranks start, and plans their memory.

use super::args::TrainArgs;
use super::overrides::overrides;
use super::planned_memory::PlannedMemory;
use super::{mesh_order, signals};
use crate::failure::{Failure, OrFail};
use crate::launch::MEMORY_DIR_VARIABLE;
use crate::sources::open_tokenizer_file;
use anyhow::Context;
use std::path::PathBuf;
use ulysses::trainer::job::{JobOptions, JobRanks, PreparedJob};

/// A checked run. Nothing has been written for it yet.
pub(super) struct Prepared {
    pub(super) job: PreparedJob,
    /// The memory plan, if the model can be planned.
    pub(super) planned: Option<PlannedMemory>,
}

impl Prepared {
    pub(super) fn new(args: TrainArgs, ranks: &mut JobRanks) -> Result<Self, Failure> {
        let path = args.config().to_owned();
        let options = options(&args);
        let mut job = PreparedJob::new(ranks, &path, options, |raw, cluster| overrides(args, raw, cluster))?;
        let message = match job.config.checkpoint {
            Some(_) => "signal received: saving and stopping after this step; a second signal stops at once",
            None => {
                "signal received: stopping after this step without saving (the config has no `checkpoint` section); a \
                 second signal stops at once"
            }
        };
        let message = ranks.is_first().then_some(message);
        job.stop = signals::watch(message).context("cannot handle signals").or_run()?;
        let planned = PlannedMemory::of(&job, ranks.local_ranks(job.mesh.world_size())).or_usage()?;
        mesh_order::log(&job, ranks.rank_hosts());
        Ok(Self { job, planned })
    }

    /// Returns how many ranks share this machine, this process and a GPU.
    pub(super) fn ranks_together(&self, ranks: &JobRanks) -> [usize; 3] {
        let world_size = self.job.mesh.world_size();
        let in_process = ranks.ranks_in_process(world_size);
        [ranks.local_ranks(world_size), in_process, self.job.placement.ranks_per_gpu(in_process)]
    }

    /// Decides `ulysses.save_attention_output` if the config leaves it open: on if the planned memory fits on all
    /// machines. Collective.
    pub(super) fn decide(&mut self, ranks: &mut JobRanks) -> Result<(), Failure> {
        if !self.job.config.saves_attention_output_if_it_fits() {
            return Ok(());
        }
        let together = self.ranks_together(ranks);
        let fits = ranks.all(self.planned.as_ref().is_none_or(|planned| planned.fits(together)))?;
        self.job.config.ulysses.save_attention_output = Some(fits);
        if fits {
            return Ok(());
        }
        let recomputed = PlannedMemory::of(&self.job, together[0]).or_usage()?;
        if let Some(planned) = std::mem::replace(&mut self.planned, recomputed) {
            planned.log_recomputed_attention();
        }
        Ok(())
    }
}

/// Returns the flags that are not config keys.
fn options(args: &TrainArgs) -> JobOptions {
    JobOptions {
        settings: args.flags.settings(),
        device: args.device.kind(),
        backend: args.backend.map(Into::into),
        process: args.process.flags(),
        resume: args.resume.clone(),
        reset_data: args.reset_data,
        memory_dir: std::env::var_os(MEMORY_DIR_VARIABLE).map(PathBuf::from),
        open_tokenizer: open_tokenizer_file,
    }
}
