//! Memory peaks of the parts of a step.

use super::Engine;
use super::moment::Moment;
use std::time::Instant;
use ulysses_kernels::memory::{Peak, Peaks};

/// The memory peak of one part of a step, on this rank's thread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PartPeak {
    /// The part.
    pub at: Moment,
    /// Its start.
    pub start: Instant,
    /// Peak bytes, in total and by category. All zero unless the program's allocator
    /// [counts](ulysses_kernels::memory::CountingAllocator).
    pub peak: Peak,
}

/// Records the memory peaks of the parts of steps.
pub(super) struct PeakRecorder {
    peaks: Peaks,
    ended: Vec<PartPeak>,
    current: Option<(Moment, Instant)>,
    /// Whether each micro batch replaces the parts of the previous one.
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
        // Anything before the first part counts toward it.
        if let Some((at, start)) = self.current.take() {
            self.ended.push(PartPeak { at, start, peak: self.peaks.cut() });
        }
    }
}

impl Engine {
    /// Starts to record the memory peak of each part of a step ([`Moment`]). This costs a clock read and
    /// some counter reads per part, and a few bytes of memory.
    pub fn watch_memory(&mut self) {
        self.watch(false);
    }

    /// As [`watch_memory`](Self::watch_memory), but records only the last micro batch and the update, so
    /// that the record does not grow with the accumulation.
    pub fn watch_last_micro_batch(&mut self) {
        self.watch(true);
    }

    fn watch(&mut self, is_last_only: bool) {
        let (peaks, ended) = (Peaks::start(), Vec::new());
        self.memory = Some(PeakRecorder { peaks, ended, current: None, is_last_only });
    }

    /// Stops [`watch_memory`](Self::watch_memory) and returns the recorded parts in order. Anything
    /// before the first part counts toward it, anything after the last part toward that one.
    pub fn take_part_peaks(&mut self) -> Vec<PartPeak> {
        let Some(mut memory) = self.memory.take() else { return Vec::new() };
        memory.end();
        memory.ended
    }

    /// Marks the beginning of a part of the step.
    pub(super) fn begin_part(&mut self, at: Moment) {
        self.part = Some(at);
        if let Some(memory) = &mut self.memory {
            memory.begin(at);
        }
    }

    /// The part of a step that began last; `None` before the first step.
    pub fn part(&self) -> Option<Moment> {
        self.part
    }
}
