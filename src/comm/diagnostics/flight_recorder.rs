//! The flight recorder: the last operations of a rank, for hang reports.

use super::OpLabel;
use crate::comm::{CallSignature, CollectiveOp, GroupLabel};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;

/// Number of recorded operations.
const CAPACITY: usize = 64;

/// A ring buffer of the operations that a rank issued last. It allocates its memory once.
#[derive(Debug)]
pub(in crate::comm) struct FlightRecorder {
    entries: VecDeque<Entry>,
    /// Number of operations recorded so far.
    issued: u64,
}

/// A recorded operation.
#[derive(Debug)]
pub(in crate::comm) struct Entry {
    pub(in crate::comm) id: u64,
    pub(in crate::comm) label: OpLabel,
    call: CallSignature,
    pub(in crate::comm) is_complete: bool,
}

/// A recorded operation as it is sent to other ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) struct EntryReport {
    pub(super) label: OpLabel,
    /// The call as text.
    pub(super) call: String,
    pub(super) is_in_progress: bool,
}

impl Default for FlightRecorder {
    fn default() -> Self {
        Self { entries: VecDeque::with_capacity(CAPACITY), issued: 0 }
    }
}

impl FlightRecorder {
    /// Records an operation that is issued. Returns its number.
    pub(in crate::comm) fn record(&mut self, label: OpLabel, call: CallSignature) -> u64 {
        if self.entries.len() == CAPACITY {
            self.entries.pop_front();
        }
        let id = self.issued;
        self.issued += 1;
        self.entries.push_back(Entry { id, label, call, is_complete: false });
        id
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
        self.entries.iter().find(|entry| !entry.label.op.is_message() && is_in_progress(entry))
    }

    /// Returns the recorded operations, oldest first.
    pub(in crate::comm) fn report(&self) -> Vec<EntryReport> {
        self.report_by(|entry| !entry.is_complete)
    }

    /// As [`report`](Self::report), but `is_in_progress` decides which operations are not complete.
    pub(in crate::comm) fn report_by(&self, is_in_progress: impl Fn(&Entry) -> bool) -> Vec<EntryReport> {
        let report = |entry: &Entry| EntryReport {
            label: entry.label.clone(),
            call: entry.call.to_string(),
            is_in_progress: is_in_progress(entry),
        };
        self.entries.iter().map(report).collect()
    }
}

impl EntryReport {
    /// Returns whether this is a collective of `group`.
    pub(super) fn is_collective_of(&self, group: &GroupLabel) -> bool {
        !self.label.op.is_message() && *self.label.group == *group
    }

    /// Returns the part of the call that must be equal on all ranks; for all-to-alls and splits, only the operation.
    pub(super) fn comparable(&self) -> &str {
        match self.label.op {
            CollectiveOp::AllToAll | CollectiveOp::Split => self.label.op.name(),
            _ => &self.call,
        }
    }
}

impl fmt::Display for EntryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_in_progress { "in progress" } else { "complete" };
        write!(f, "#{} of \"{}\": {}, {state}", self.label.sequence, self.label.group.name, self.call)
    }
}

/// Formats one line per operation.
pub(in crate::comm) fn lines(calls: &[EntryReport]) -> String {
    calls.iter().map(|call| format!("\n  {call}")).collect()
}
