//! The specification of a job, the same at every start, and the rules for restarting it.

use super::restart::{Cause, Restart};
use super::training::{SmallerMesh, Training, Variation};
use crate::output::log_line;
use std::fmt;
use std::path::PathBuf;

/// The machines of a job without those that are missing, and their mesh if the job trains.
#[derive(Debug, Clone, Copy)]
pub(super) struct FewerNodes {
    num_nodes: usize,
    /// The name of the machines in messages: `node` or `host`.
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
    /// The `train` command, if it is one.
    pub(super) training: Option<Training>,
    pub(super) max_restarts: u32,
    /// The smallest number of machines with which it may continue.
    pub(super) min_nodes: usize,
}

impl JobSpec {
    /// Returns the arguments of a start.
    pub(super) fn arguments(&self, variation: &Variation) -> Vec<String> {
        match &self.training {
            Some(training) => training.arguments(variation),
            None => self.arguments.clone(),
        }
    }

    /// Plans the restart after a start that resumes from the newest step, on `fewer` machines if some are lost, and logs
    /// its reason.
    ///
    /// # Errors
    /// The cause, if no restart is left.
    pub(super) fn restart(
        &self,
        cause: Cause,
        fewer: Option<FewerNodes>,
        last: &Variation,
    ) -> Result<Variation, String> {
        let (text, restarts) = (&cause.text, last.restarts());
        if restarts == self.max_restarts {
            let after = if restarts > 0 { format!(", after {restarts} restart(s)") } else { String::new() };
            return Err(format!("{text}{after}"));
        }
        let number = restarts + 1;
        let with = fewer.map_or_else(String::new, |fewer| fewer.to_string());
        let reason = format!("{text}; restart {number} of {}{with}", self.max_restarts);
        log_line(format_args!("launch: {reason}"));
        let mesh_before = self.training.as_ref().map(|training| match last.smaller {
            Some(mesh) => (mesh.sizes.dp, mesh.sizes.sp),
            None => (training.config.mesh.dp_size, training.config.mesh.sp_size),
        });
        Ok(Variation {
            restart: Some(Restart { number, reason, cause, mesh_before }),
            has_saved: last.has_saved || self.training.as_ref().is_some_and(Training::has_saved),
            smaller: fewer.and_then(|fewer| fewer.mesh).or(last.smaller),
        })
    }

    /// Checks that the fewest of all `num_nodes` machines suffice, given the number of ranks that each may run.
    ///
    /// # Errors
    /// A message: no mesh keeps the batch size.
    pub(super) fn check_min_nodes(
        &self,
        num_nodes: usize,
        ranks: impl Iterator<Item = usize>,
    ) -> Result<(), String> {
        if self.min_nodes < num_nodes {
            let fewest = ranks.take(self.min_nodes).sum();
            self.smaller_mesh(fewest).map_err(|why| format!("--min-nodes {}: {why}", self.min_nodes))?;
        }
        Ok(())
    }

    /// Returns the machines that are left, given the number of ranks that each may run.
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
    fn smaller_mesh(&self, num_ranks: usize) -> Result<Option<SmallerMesh>, String> {
        self.training.as_ref().map(|training| training.smaller_mesh(num_ranks)).transpose()
    }
}
