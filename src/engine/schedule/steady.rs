//! Micro batches that repeat, so that the events of a step need not grow with its accumulation.
//!
//! The events of a micro batch depend on the state that the previous one left: recycled storage, memory that threads keep, and
//! units in flight. Where a micro batch leaves what it found, all that follow do the same, but for the last one of the step,
//! which reduces the gradients.

use super::Schedule;
use super::event::Event;
use super::ledger::LedgerMark;

/// State that the micro batches of a step leave for those that follow.
#[derive(Debug)]
pub(super) struct SteadyState {
    ledger: LedgerMark,
    others: Others,
}

/// The same outside of the ledger.
#[derive(Debug, PartialEq)]
struct Others {
    /// Bytes that attention keeps between calls.
    attention: [usize; 2],
    /// Tensors of units that outlive a micro batch.
    units: Vec<[bool; 5]>,
    /// Checkpoints that are being written, and that arrive.
    checkpoints: [usize; 2],
}

impl Schedule {
    /// Before a micro batch: for how many it stands.
    pub(super) fn count_micro_batch(&mut self) {
        if !self.is_counted {
            return;
        }
        let others = Others {
            attention: self.attention.kept(),
            units: self.units.kept(),
            checkpoints: self.checkpoint_store.kept(),
        };
        // A step lies between the last micro batch and the first one.
        let before = self.before.take().filter(|_| self.micro_step > 0);
        let repeats =
            before.is_some_and(|before| others == before.others && self.ledger.repeats(&before.ledger));
        self.before = Some(SteadyState { ledger: self.ledger.mark(), others });
        // The last one of the step stands for itself.
        let alike = if repeats { self.accumulation - 1 - self.micro_step } else { 1 };
        let times = alike.max(1);
        self.micro_step += times - 1;
        self.ledger.push(Event::MicroBatches { times: times as u64 });
    }
}
