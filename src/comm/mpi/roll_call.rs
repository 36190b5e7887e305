//! What the ranks have told of their calls since the time of one was up.

use crate::comm::cause::{self, Wait};
use crate::comm::history::{Told, first_to_tell, lines, where_they_part};
use std::time::Instant;

/// By rank, this one among them.
#[derive(Debug, Default)]
pub(super) struct RollCall {
    histories: Vec<(usize, Vec<Told>)>,
    /// What those of them that wait have told that they wait for.
    waits: Vec<(usize, Wait)>,
    /// When this rank has told.
    pub(super) told: Option<Instant>,
}

impl RollCall {
    pub(super) fn note(&mut self, rank: usize, calls: Vec<Told>, wait: Option<Wait>) {
        self.histories.push((rank, calls));
        self.waits.extend(wait.map(|wait| (rank, wait)));
    }

    pub(super) fn has_told(&self, rank: usize) -> bool {
        self.histories.iter().any(|(of, _)| *of == rank)
    }

    /// What `wait` comes down to, by what has been told.
    pub(super) fn cause(&self, wait: Wait) -> Wait {
        cause::cause(wait, &self.waits)
    }

    /// What a rank has told that it called last.
    pub(super) fn calls_of(&self, rank: usize) -> String {
        self.histories.iter().filter(|(of, _)| *of == rank).map(|(_, calls)| lines(calls)).collect()
    }

    /// What the first rank that is not missing says of a timeout: where the ranks part, and what they wait for.
    pub(super) fn parting(&mut self, rank: usize, missing: &[usize]) -> Option<String> {
        if first_to_tell(missing) != rank {
            return None;
        }
        self.waits.sort_by_key(|(rank, _)| *rank);
        let waits = cause::lines(&self.waits);
        Some(where_they_part(std::mem::take(&mut self.histories), missing) + &waits)
    }
}
