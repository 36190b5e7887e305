//! Settings that all starts of a job share, and the rules for restarting it.

use super::job::Start;
use super::memory_dir::{MEMORY_DIR_VARIABLE, MemoryDir};
use super::output::{RankLogs, Source};
use super::rank_failure::RankFailure;
use super::restart::{Cause, RESTART_VARIABLE, Restart};
use super::training::{SmallerMesh, Training, Variation};
use crate::failure::Failure;
use crate::output::log_line;
use anyhow::anyhow;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use ulysses::comm::store::JobStore;
use ulysses::config::Config;

/// The nodes of a job without those that are missing, and their mesh if the job trains.
#[derive(Debug, Clone, Copy)]
pub(super) struct FewerNodes {
    num_nodes: usize,
    /// The name of nodes in messages.
    kind: &'static str,
    pub(super) mesh: Option<SmallerMesh>,
}

impl fmt::Display for FewerNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " on {} {}(s)", self.num_nodes, self.kind)?;
        self.mesh.map_or(Ok(()), |mesh| write!(f, " with mesh {mesh}"))
    }
}

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
            // Strings and numbers only, which cannot fail.
            if let Some(Ok(restart)) = variation.restart.as_ref().map(serde_json::to_string) {
                command.env(RESTART_VARIABLE, restart);
            }
        }
        Start { commands, store, grace: self.grace, logs: self.logs.clone() }
    }

    /// Plans a restart after the failure of a rank.
    ///
    /// # Errors
    /// The failure, if a restart would fail again or none is left.
    pub(super) fn restart_after(
        &self,
        failure: &RankFailure,
        restarts: &mut u32,
        variation: &mut Variation,
    ) -> Result<(), Failure> {
        if failure.is_usage() {
            return Err(Failure::Usage(anyhow!("{failure}")));
        }
        let restarted = self.restart(failure.into(), None, restarts, variation);
        restarted.map_err(|message| Failure::Run(anyhow!(message)))
    }

    /// Plans a restart that resumes from the newest step, on `fewer` nodes if some are lost, and logs its reason.
    ///
    /// # Errors
    /// The cause, if no restart is left.
    pub(super) fn restart(
        &self,
        cause: Cause,
        fewer: Option<FewerNodes>,
        restarts: &mut u32,
        variation: &mut Variation,
    ) -> Result<(), String> {
        let text = &cause.text;
        if *restarts == self.max_restarts {
            let after = if *restarts > 0 { format!(", after {restarts} restart(s)") } else { String::new() };
            return Err(format!("{text}{after}"));
        }
        *restarts += 1;
        let with = fewer.map_or_else(String::new, |fewer| fewer.to_string());
        let reason = format!("{text}; restart {restarts} of {}{with}", self.max_restarts);
        log_line(format_args!("launch: {reason}"));
        let mesh_before = self.training.as_ref().map(|(_, config)| match variation.smaller {
            Some(mesh) => (mesh.sizes.dp, mesh.sizes.sp),
            None => (config.mesh.dp_size, config.mesh.sp_size),
        });
        variation.restart = Some(Restart { number: *restarts, reason, cause, mesh_before });
        variation.has_saved |= self.training.as_ref().is_some_and(|(training, _)| training.has_saved());
        variation.smaller = fewer.and_then(|fewer| fewer.mesh).or(variation.smaller);
        Ok(())
    }

    /// Returns the nodes that are left, given the number of ranks that each may run.
    ///
    /// # Errors
    /// A message: fewer than `--min-nodes` are left, or no mesh keeps the batch size.
    pub(super) fn on_fewer(
        &self,
        kind: &'static str,
        ranks: impl ExactSizeIterator<Item = usize>,
    ) -> Result<FewerNodes, String> {
        let num_nodes = ranks.len();
        if num_nodes < self.min_nodes {
            return Err(format!("{num_nodes} {kind}(s) are left, --min-nodes is {}", self.min_nodes));
        }
        Ok(FewerNodes { num_nodes, kind, mesh: self.smaller_mesh(ranks.sum())? })
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
