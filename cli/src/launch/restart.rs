//! A restart of a job and its cause, as the launcher tells the ranks.

use super::rank_failure::RankFailure;
use serde::{Deserialize, Serialize};

/// Environment variable of the ranks with a [`Restart`], as JSON.
pub(super) const RESTART_VARIABLE: &str = "ULYSSES_RESTART";

/// A restart of a job, as the restarted ranks record it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Restart {
    /// From 1.
    pub(crate) number: u32,
    /// The cause, the number of the restart, and the nodes that are left with their mesh.
    pub(crate) reason: String,
    pub(crate) cause: Cause,
    /// Sizes of dp and sp before, if the job trains.
    pub(crate) mesh_before: Option<(usize, usize)>,
}

impl Restart {
    /// Reads the restart of which this process is a rank, if it is one.
    pub(crate) fn of_this_rank() -> Option<Self> {
        serde_json::from_str(&std::env::var(RESTART_VARIABLE).ok()?).ok()
    }
}

/// What ended a start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cause {
    pub(crate) text: String,
    /// The rank that failed first, if it is known.
    pub(crate) failed_rank: Option<usize>,
    /// Hosts that were lost.
    pub(crate) lost_hosts: Vec<String>,
}

impl From<&RankFailure> for Cause {
    fn from(failure: &RankFailure) -> Self {
        Self { text: failure.to_string(), failed_rank: failure.rank, lost_hosts: Vec::new() }
    }
}
