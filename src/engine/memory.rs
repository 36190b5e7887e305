//! What a rank holds in each part of a step.

use super::Engine;
use super::moment::Moment;
use std::time::Instant;
use ulysses_kernels::memory::{Peak, Peaks};

/// A part of a step, and the most that this rank's thread held in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PartPeak {
    /// Which part.
    pub at: Moment,
    /// When it began.
    pub begun: Instant,
    /// The most bytes, and what for. All zero unless the program's allocator
    /// [counts](ulysses_kernels::memory::CountingAllocator).
    pub peak: Peak,
}

/// Notes the parts of steps, while that is asked for.
pub(super) struct PeakRecorder {
    peaks: Peaks,
    ended: Vec<PartPeak>,
    current: Option<(Moment, Instant)>,
    /// Whether the parts of a micro batch replace those of the one before.
    is_last_only: bool,
}

impl PeakRecorder {
    fn begin(&mut self, at: Moment) {
        self.end();
        if self.is_last_only && at == Moment::Embedding {
            self.ended.clear();
        }
        self.current = Some((at, Instant::now()));
    }

    fn end(&mut self) {
        // What comes before the first part counts to it.
        if let Some((at, begun)) = self.current.take() {
            self.ended.push(PartPeak { at, begun, peak: self.peaks.cut() });
        }
    }
}

impl Engine {
    /// Notes from now on what this thread holds in each part of a step, as [`Moment`] divides it. It
    /// costs a look at a clock and at some counters for each part, and some bytes of memory.
    pub fn watch_memory(&mut self) {
        self.watch(false);
    }

    /// As [`watch_memory`](Self::watch_memory), of the last micro batch and the update only: the parts do not grow with the
    /// accumulation.
    pub fn watch_last_micro_batch(&mut self) {
        self.watch(true);
    }

    fn watch(&mut self, is_last_only: bool) {
        let (peaks, ended) = (Peaks::start(), Vec::new());
        self.memory = Some(PeakRecorder { peaks, ended, current: None, is_last_only });
    }

    /// Ends [`watch_memory`](Self::watch_memory): the parts since then, in their order. What comes before the first one
    /// counts to it, and what follows the last one to that.
    pub fn take_part_peaks(&mut self) -> Vec<PartPeak> {
        let Some(mut memory) = self.memory.take() else { return Vec::new() };
        memory.end();
        memory.ended
    }

    /// A part of the step begins.
    pub(super) fn begin_part(&mut self, at: Moment) {
        self.part = Some(at);
        if let Some(memory) = &mut self.memory {
            memory.begin(at);
        }
    }

    /// The part of a step that began last; none before the first step.
    pub fn part(&self) -> Option<Moment> {
        self.part
    }
}
