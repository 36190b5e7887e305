//! The messages between the launchers of a job.

use super::super::job_spec::JobSpec;
use super::super::rank_failure::RankFailure;
use super::super::training::{Training, Variation};
use crate::failure::Failure;
use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use ulysses::comm::host_name;

/// Exit code of a job that failed.
pub(super) const FAILED: u8 = 1;
/// Exit code of a job whose arguments or config are refused.
const REFUSED: u8 = 2;

/// The host, capacity and settings of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeInfo {
    pub(super) host: String,
    pub(super) num_processes: usize,
    version: String,
    /// Hashes of what must be the same on all nodes.
    arguments: String,
    config: String,
}

/// The plan of one start of the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StartPlan {
    /// Number of ranks of each node that has any, in the order of the ranks.
    pub(super) ranks: BTreeMap<usize, usize>,
    /// The port of the ranks' store on node 0.
    pub(super) store_port: u16,
    pub(super) master_port: u16,
    /// Text that makes the secret of the ranks differ between starts.
    pub(super) nonce: String,
    pub(super) variation: Variation,
}

/// The first failure of a node, or a later one that allows no restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeFailure {
    pub(super) node: usize,
    pub(super) rank: Option<usize>,
    pub(super) text: String,
    /// The exit code of the job, if a restart would fail again.
    pub(super) final_exit_code: Option<u8>,
}

/// The result of the job: an exit code, and a message unless it is 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JobResult {
    pub(super) exit_code: u8,
    pub(super) message: String,
}

impl NodeInfo {
    pub(super) fn new(job: &JobSpec, num_processes: usize) -> Self {
        let settings = (&job.program, &job.arguments, job.max_restarts, job.min_nodes);
        let config = job.training.as_ref().map(Training::config_bytes);
        let hash = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
        Self {
            host: host_name().unwrap_or_else(|| "unknown host".to_owned()),
            num_processes,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            arguments: hash(format!("{settings:?}").as_bytes()),
            config: hash(&config.unwrap_or_default()),
        }
    }

    /// Returns how a node contradicts node 0, if it does.
    pub(super) fn contradiction(&self, node: usize, first: &Self) -> Option<String> {
        let what = if self.version != first.version {
            format!("versions of ulysses: {} and {}", self.version, first.version)
        } else if self.arguments != first.arguments {
            "arguments".to_owned()
        } else if self.config != first.config {
            "config files".to_owned()
        } else {
            return None;
        };
        Some(format!("node {node} ({}) and node 0 ({}) have different {what}", self.host, first.host))
    }
}

impl StartPlan {
    pub(super) fn new(ranks: BTreeMap<usize, usize>, variation: Variation) -> Self {
        let nonce = format!("{:?}", std::time::SystemTime::now());
        Self { ranks, store_port: 0, master_port: 0, nonce, variation }
    }
}

impl NodeFailure {
    pub(super) fn new(node: usize, failure: &RankFailure) -> Self {
        let final_exit_code = failure.is_usage().then_some(REFUSED);
        Self { node, rank: failure.rank, text: failure.to_string(), final_exit_code }
    }
}

impl JobResult {
    /// The result of a job without failure: a signal stopped it, or it is done, with exit code 0.
    pub(super) fn stopped(exit_code: u8) -> Self {
        Self { exit_code, message: String::new() }
    }

    pub(super) fn failed(message: String) -> Self {
        Self { exit_code: FAILED, message }
    }

    pub(super) fn refused(message: String) -> Self {
        Self { exit_code: REFUSED, message }
    }

    pub(super) fn into_result(self) -> Result<(), Failure> {
        match self.exit_code {
            0 => Ok(()),
            FAILED => Err(Failure::Run(anyhow!(self.message))),
            REFUSED => Err(Failure::Usage(anyhow!(self.message))),
            exit_code => Err(Failure::Ended { exit_code }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_differ_are_named_with_the_difference() {
        let text = |text: &str| text.to_owned();
        let first = NodeInfo {
            host: text("n0"),
            num_processes: 2,
            version: text("1.2.0"),
            arguments: text("a"),
            config: text("c"),
        };
        let other = |host: &str| NodeInfo { host: text(host), num_processes: 4, ..first.clone() };
        assert_eq!(
            other("n1").contradiction(1, &first),
            None,
            "nodes may have different numbers of processes"
        );
        let newer = NodeInfo { version: text("1.3.0"), ..other("n1") };
        let expected = "node 1 (n1) and node 0 (n0) have different versions of ulysses: 1.3.0 and 1.2.0";
        assert_eq!(newer.contradiction(1, &first).unwrap(), expected);
        let config = NodeInfo { config: text("d"), ..other("n2") };
        assert_eq!(
            config.contradiction(2, &first).unwrap(),
            "node 2 (n2) and node 0 (n0) have different config files"
        );
        let arguments = NodeInfo { arguments: text("b"), ..other("n2") };
        assert!(arguments.contradiction(2, &first).unwrap().contains("have different arguments"));
    }
}
