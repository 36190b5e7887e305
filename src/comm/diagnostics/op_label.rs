//! The names of operations in errors and reports.

use crate::comm::{CollectiveOp, CommError, GroupLabel};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// An operation of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) struct OpLabel {
    pub(in crate::comm) group: Arc<GroupLabel>,
    pub(in crate::comm) op: CollectiveOp,
    /// Sequence number within the group or, for a message, within the pair of ranks.
    pub(in crate::comm) sequence: u64,
}

impl OpLabel {
    /// Returns the error for a failure of a library in this operation, on a global rank.
    #[cfg_attr(
        not(any(feature = "mpi", feature = "nccl")),
        allow(dead_code, reason = "threads use no library")
    )]
    pub(in crate::comm) fn failed_in(&self, library: &'static str, rank: usize, reason: String) -> CommError {
        let Self { group, op, sequence } = self;
        CommError::Library { library, group: group.name.clone(), op: *op, sequence: *sequence, rank, reason }
    }
}
