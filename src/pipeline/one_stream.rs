//! The order of a rank's messages where one stream has them all, and each waits there for both of its ranks.

use super::{Action, Schedule, ScheduleError};
use std::collections::HashMap;

/// Messages that a rank sends after a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DueMessages {
    /// Receivers: the oldest message to each of them is sent now.
    pub receivers: Vec<usize>,
    /// Whether the next pass receives: then the messages run with that one, as a group.
    pub join_next: bool,
}

/// Returns the messages that a rank sends after each pass of a schedule.
///
/// A message is due when its receiver begins the pass that needs it, in a step whose passes all take the same time. So both of its ranks
/// have it at the same place in the order of time, and no rank waits for a message that is due later than one of its own.
///
/// # Errors
/// As [`Schedule::check`].
pub fn due_messages(schedule: &Schedule, rank: usize) -> Result<Vec<DueMessages>, ScheduleError> {
    let timeline = schedule.simulate(|_, _| 1.0)?;
    let ranks = timeline.ranks.iter().enumerate();
    let starts: HashMap<_, _> = ranks
        .flat_map(|(rank, passes)| passes.iter().map(move |timed| ((rank, timed.action), timed.start)))
        .collect();
    // When each message is due, and its receiver; oldest first.
    let mut waiting: Vec<(f64, usize)> = Vec::new();
    let passes = &timeline.ranks[rank];
    let after = |(index, action): (usize, Action)| {
        if let Some(receiver) = schedule.receiver(rank, action) {
            let start = Schedule::time_of(&starts, receiver);
            waiting.push((start.unwrap_or_else(|| unreachable!("the schedule is checked")), receiver.0));
        }
        let next = passes.get(index + 1);
        let until = next.map_or(f64::INFINITY, |next| next.start);
        let receivers = waiting.extract_if(.., |(start, _)| *start <= until).map(|(_, rank)| rank).collect();
        let join_next = next.is_some_and(|next| schedule.sender(rank, next.action).is_some());
        DueMessages { receivers, join_next }
    };
    Ok(passes.iter().map(|timed| timed.action).enumerate().map(after).collect())
}
