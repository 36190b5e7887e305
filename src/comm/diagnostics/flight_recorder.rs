//! The flight recorder: the last operations of a rank, for hang reports.

use crate::comm::{CallSignature, CollectiveOp};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Number of recorded operations.
const CAPACITY: usize = 64;

/// A group: its name, which is not unique, and its global ranks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::comm) struct GroupLabel {
    pub(in crate::comm) name: String,
    pub(in crate::comm) members: Vec<usize>,
}

/// A ring buffer of the operations that a rank issued last. It allocates its memory once.
#[derive(Debug)]
pub(in crate::comm) struct FlightRecorder {
    entries: VecDeque<Entry>,
}

/// A recorded operation.
#[derive(Debug)]
pub(in crate::comm) struct Entry {
    pub(in crate::comm) id: u64,
    pub(in crate::comm) group: Arc<GroupLabel>,
    /// Sequence number within the group or, for a message, within the pair of ranks.
    pub(in crate::comm) sequence: u64,
    pub(in crate::comm) call: CallSignature,
    pub(in crate::comm) is_complete: bool,
}

/// A recorded operation as it is sent to other ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) struct EntryReport {
    pub(super) group: GroupLabel,
    pub(super) sequence: u64,
    pub(super) op: CollectiveOp,
    /// The call as text.
    pub(super) call: String,
    pub(super) is_in_progress: bool,
}

impl Default for FlightRecorder {
    fn default() -> Self {
        Self { entries: VecDeque::with_capacity(CAPACITY) }
    }
}

impl FlightRecorder {
    pub(in crate::comm) fn record(&mut self, entry: Entry) {
        if self.entries.len() == CAPACITY {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    /// Marks an operation as complete, if it is still recorded.
    pub(in crate::comm) fn complete(&mut self, id: u64) {
        if let Some(entry) = self.entries.iter_mut().rev().find(|entry| entry.id == id) {
            entry.is_complete = true;
        }
    }

    /// Marks all operations but the newest as complete.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "the others know what is in progress"))]
    pub(in crate::comm) fn complete_before_newest(&mut self) {
        self.entries.iter_mut().rev().skip(1).for_each(|entry| entry.is_complete = true);
    }

    /// Returns the oldest collective that is not complete, as decided by `is_in_progress`.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "the others know what is in progress"))]
    pub(in crate::comm) fn oldest_under_way(
        &self,
        is_in_progress: impl Fn(&Entry) -> bool,
    ) -> Option<&Entry> {
        self.entries.iter().find(|entry| !entry.call.op().is_message() && is_in_progress(entry))
    }

    /// Returns the recorded operations, oldest first.
    pub(in crate::comm) fn report(&self) -> Vec<EntryReport> {
        self.report_by(|entry| !entry.is_complete)
    }

    /// As [`report`](Self::report), but `is_in_progress` decides which operations are not complete.
    pub(in crate::comm) fn report_by(&self, is_in_progress: impl Fn(&Entry) -> bool) -> Vec<EntryReport> {
        let report = |entry: &Entry| EntryReport {
            group: (*entry.group).clone(),
            sequence: entry.sequence,
            op: entry.call.op(),
            call: entry.call.to_string(),
            is_in_progress: is_in_progress(entry),
        };
        self.entries.iter().map(report).collect()
    }
}

impl EntryReport {
    /// Returns whether this is a collective of `group`.
    pub(super) fn is_collective_of(&self, group: &GroupLabel) -> bool {
        !self.op.is_message() && self.group == *group
    }

    /// Returns the part of the call that must be equal on all ranks; for all-to-alls and splits, only the operation.
    pub(super) fn comparable(&self) -> &str {
        match self.op {
            CollectiveOp::AllToAll | CollectiveOp::Split => self.op.name(),
            _ => &self.call,
        }
    }
}

impl fmt::Display for EntryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_in_progress { "in progress" } else { "complete" };
        write!(f, "#{} of \"{}\": {}, {state}", self.sequence, self.group.name, self.call)
    }
}

/// Formats one line per operation.
pub(in crate::comm) fn lines(calls: &[EntryReport]) -> String {
    calls.iter().map(|call| format!("\n  {call}")).collect()
}
