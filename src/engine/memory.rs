//! What a rank holds in each part of a step.

use super::Engine;
use super::schedule::Moment;
use crate::memory::{Peak, Peaks};
use std::time::Instant;

/// A part of a step, and the most that this rank's thread held in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldInPart {
    /// Which part.
    pub at: Moment,
    /// When it began.
    pub begun: Instant,
    /// The most bytes, and what for. All zero unless the program's allocator
    /// [counts](crate::memory::CountingAllocator).
    pub peak: Peak,
}

/// Notes the parts of steps, while that is asked for.
pub(super) struct PartMemory {
    peaks: Peaks,
    ended: Vec<HeldInPart>,
    going_on: Option<(Moment, Instant)>,
}

impl PartMemory {
    fn begin(&mut self, at: Moment) {
        self.end();
        self.going_on = Some((at, Instant::now()));
    }

    fn end(&mut self) {
        // What comes before the first part counts to it.
        if let Some((at, begun)) = self.going_on.take() {
            self.ended.push(HeldInPart { at, begun, peak: self.peaks.cut() });
        }
    }
}

impl Engine {
    /// Notes from now on what this thread holds in each part of a step, as the [schedule](super::schedule()) divides it. It
    /// costs a look at a clock and at some counters for each part, and some bytes of memory.
    pub fn watch_memory(&mut self) {
        self.memory = Some(PartMemory { peaks: Peaks::start(), ended: Vec::new(), going_on: None });
    }

    /// Ends [`watch_memory`](Self::watch_memory): the parts since then, in their order. What comes before the first one
    /// counts to it, and what follows the last one to that.
    pub fn take_memory(&mut self) -> Vec<HeldInPart> {
        let Some(mut memory) = self.memory.take() else { return Vec::new() };
        memory.end();
        memory.ended
    }

    /// A part of the step begins.
    pub(super) fn begin_part(&mut self, at: Moment) {
        if let Some(memory) = &mut self.memory {
            memory.begin(at);
        }
    }
}
