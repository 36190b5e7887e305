//! Memory peaks of the parts of a step.

use super::step_part::StepPart;
use std::time::Instant;
use ulysses_kernels::memory::{Peak, Peaks};

/// The memory peak of one part of a step, on this rank's thread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PartPeak {
    /// The part.
    pub at: StepPart,
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
    current: Option<(StepPart, Instant)>,
    /// Whether each micro batch replaces the parts of the previous one.
    is_last_only: bool,
}

impl PeakRecorder {
    pub(super) fn start(is_last_only: bool) -> Self {
        Self { peaks: Peaks::start(), ended: Vec::new(), current: None, is_last_only }
    }

    pub(super) fn begin(&mut self, at: StepPart) {
        self.end();
        if self.is_last_only && at == StepPart::Embedding {
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

    /// Ends the current part.
    pub(super) fn finish(mut self) -> Vec<PartPeak> {
        self.end();
        self.ended
    }
}
