//! A schedule as text.

use super::{Schedule, ScheduleError, TimedAction};
use std::fmt::Write;

/// The widest drawing, in columns.
const MAX_COLUMNS: usize = 120;

impl Schedule {
    /// Draws a line per rank, with the pass of each unit of time: `F2` is the forward pass of micro batch 2, `B2` its backward pass,
    /// which takes twice as long, or `I2` and `W2` for its halves, `'` marks the second chunk of layers, and so on. `None` if it is too wide.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn draw(&self) -> Result<Option<String>, ScheduleError> {
        let timeline = self.check()?;
        let label = |timed: &TimedAction| {
            let action = timed.action;
            format!("{}{}{}", action.pass, action.micro_batch, "'".repeat(action.chunk))
        };
        let width = timeline.ranks.iter().flatten().map(|timed| label(timed).len() + 1).max().unwrap_or(1);
        let units = timeline.seconds.round() as usize;
        if "rank 00  ".len() + width * units > MAX_COLUMNS {
            return Ok(None);
        }
        let mut text = String::new();
        for (rank, actions) in timeline.ranks.iter().enumerate() {
            let mut cells = vec![".".to_owned(); units];
            for timed in actions {
                cells[timed.start.round() as usize..timed.end.round() as usize].fill(label(timed));
            }
            let line: String = cells.iter().map(|cell| format!("{cell:<width$}")).collect();
            let _ = writeln!(text, "rank {rank:<2}  {}", line.trim_end());
        }
        Ok(Some(text))
    }
}
