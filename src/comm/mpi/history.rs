//! The last operations of a rank, for when ranks wait for one another in vain.

use std::collections::VecDeque;
use std::fmt;

/// How many are remembered.
const REMEMBERED: usize = 64;

/// The operations that were issued last.
#[derive(Debug, Default)]
pub(super) struct History {
    records: VecDeque<Record>,
}

/// An operation, as it was called.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) id: u64,
    pub(super) group: String,
    pub(super) sequence: u64,
    pub(super) call: String,
}

impl History {
    pub(super) fn add(&mut self, record: Record) {
        if self.records.len() == REMEMBERED {
            self.records.pop_front();
        }
        self.records.push_back(record);
    }

    /// One line for each, the oldest first; `is_under_way` tells which are not complete.
    pub(super) fn lines(&self, is_under_way: impl Fn(u64) -> bool) -> Lines<'_> {
        Lines(self.records.iter().map(|record| (record, is_under_way(record.id))).collect())
    }
}

/// The operations as text.
pub(super) struct Lines<'a>(Vec<(&'a Record, bool)>);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (Record { group, sequence, call, .. }, is_under_way) in &self.0 {
            let state = if *is_under_way { "under way" } else { "complete" };
            write!(f, "\n  #{sequence} of \"{group}\": {call}, {state}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_64_are_told_in_order_with_what_is_under_way() {
        let mut history = History::default();
        for id in 0..100 {
            history.add(Record { id, group: "sp".into(), sequence: id, call: "barrier".into() });
        }
        let text = history.lines(|id| id == 99).to_string();
        let lines: Vec<&str> = text.trim_start_matches('\n').lines().collect();
        assert_eq!(lines.len(), 64);
        assert_eq!(lines[0], "  #36 of \"sp\": barrier, complete");
        assert_eq!(lines[63], "  #99 of \"sp\": barrier, under way");
    }
}
