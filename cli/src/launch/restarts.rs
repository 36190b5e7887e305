//! What the starts of a job have in common, and when a failed job is started again.

use super::job::Start;
use super::memory_dir::{MEMORY_DIR_VARIABLE, MemoryDir};
use super::output::{RankLogs, Source};
use super::rank_failure::RankFailure;
use super::training::{SmallerMesh, Training, Variation};
use crate::{Failure, log_line};
use anyhow::anyhow;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use ulysses::comm::store::JobStore;
use ulysses::config::Config;

/// Environment variable of the ranks with the reason of a restart.
pub(crate) const RESTART_VARIABLE: &str = "ULYSSES_RESTART";

/// A job, however it is started.
pub(super) struct JobSpec {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
    /// The `train` command, and its config at the first start.
    pub(super) training: Option<(Training, Config)>,
    pub(super) max_restarts: u32,
    /// The smallest number of nodes with which it may continue.
    pub(super) min_nodes: usize,
    /// Time between SIGTERM and SIGKILL.
    pub(super) grace: Duration,
    pub(super) logs: Option<Arc<RankLogs>>,
    /// The directory of the ranks' copies in memory, if the config wants them.
    pub(super) memory: Option<MemoryDir>,
}

impl JobSpec {
    /// Returns the arguments of a start.
    pub(super) fn arguments(&self, variation: &Variation) -> Vec<String> {
        match &self.training {
            Some((training, _)) => training.arguments(variation),
            None => self.arguments.clone(),
        }
    }

    pub(super) fn start(
        &self,
        mut commands: Vec<(Source, Command)>,
        store: Option<JobStore>,
        variation: &Variation,
    ) -> Start {
        for (_, command) in &mut commands {
            if let Some(memory) = &self.memory {
                command.env(MEMORY_DIR_VARIABLE, memory.path());
            }
            if let Some(reason) = &variation.restart {
                command.env(RESTART_VARIABLE, reason);
            }
        }
        Start { commands, store, grace: self.grace, logs: self.logs.clone() }
    }

    /// Lets the next start resume from the newest step. `reason` is that of the restart.
    pub(super) fn resume(&self, variation: &mut Variation, reason: String) {
        variation.restart = Some(reason);
        variation.has_saved |= self.training.as_ref().is_some_and(|(training, _)| training.has_saved());
    }

    /// Decides whether the job is started once more after a failure. Logs and returns the reason and number of the restart.
    ///
    /// # Errors
    /// The failure, if a restart would fail again or none is left.
    pub(super) fn allow_restart(&self, failure: &RankFailure, restarts: &mut u32) -> Result<String, Failure> {
        if failure.is_usage() {
            return Err(Failure::Usage(anyhow!("{failure}")));
        }
        self.allow(failure, restarts, "").map_err(|message| Failure::Run(anyhow!(message)))
    }

    /// As [`allow_restart`](Self::allow_restart), for a failure that a restart may repair. `with` is added to the reason.
    pub(super) fn allow(
        &self,
        failure: &impl std::fmt::Display,
        restarts: &mut u32,
        with: &str,
    ) -> Result<String, String> {
        if *restarts == self.max_restarts {
            let after = if *restarts > 0 { format!(", after {restarts} restart(s)") } else { String::new() };
            return Err(format!("{failure}{after}"));
        }
        *restarts += 1;
        let reason = format!("{failure}; restart {restarts} of {}{with}", self.max_restarts);
        log_line(format_args!("launch: {reason}"));
        Ok(reason)
    }

    /// Returns the smaller mesh for at most `num_ranks` ranks, if the job trains; otherwise `Ok(None)`.
    ///
    /// # Errors
    /// A message: no mesh keeps the batch size.
    pub(super) fn smaller_mesh(&self, num_ranks: usize) -> Result<Option<SmallerMesh>, String> {
        let Some((training, config)) = &self.training else { return Ok(None) };
        training.smaller_mesh(config, num_ranks).map(Some).ok_or_else(|| {
            format!(
                "no mesh of at most {num_ranks} ranks keeps train_batch_size {} with micro batches of {}; give the mesh \
                 by --mesh, not in the config",
                config.train_batch_size, config.micro_batch_size
            )
        })
    }
}
