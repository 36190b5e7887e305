//! The memory of a rank: its peak, and that of each part of a step, for `run.json` and traces.

use super::observer::{Observer, ObserverError, StepEnd};
use crate::engine::StepPart;
use crate::engine::{Engine, PartPeak};
use crate::kernels::device::{GpuMemory, gpu_memory};
use crate::kernels::memory::{ByCategory, peak_bytes};
use crate::monitor::{Metrics, Tracer};
use candle_core::Device;
use serde::{Deserialize, Serialize};

/// Number of watched steps per sequence length. Steps recycle storage of previous ones, so the second step is the first
/// typical one.
const WATCHED_STEPS: u64 = 2;

/// Measures the memory of one rank in a few steps, and in traced steps.
#[derive(Debug)]
pub struct MemoryWatch {
    /// The device of the tensors. The allocator counts host memory, the driver GPU memory.
    device: Device,
    tracer: Option<Tracer>,
    rank: u64,
    /// Steps of this process so far.
    done: u64,
    /// The current sequence length, and the steps with it so far.
    of_length: (usize, u64),
    /// The memory of a step with the longest sequences.
    longest: Option<StepMemory>,
}

/// The memory of a rank over a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankMemory {
    /// Peak bytes on the rank's device; 0 if they are not counted.
    pub peak_bytes: u64,
    /// The memory of a step with the longest sequences, if it was watched: on CPUs only.
    pub step: Option<StepMemory>,
}

/// The peak memory of a rank in each part of a step: of its last micro batch, and of the update.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepMemory {
    /// The step, from 1.
    pub step: u64,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// The parts, in order.
    pub parts: Vec<PartMemory>,
}

/// The peak memory of a rank in a part of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartMemory {
    /// The part, as named in plans.
    pub at: String,
    /// Total bytes.
    pub bytes: u64,
    /// Bytes by category.
    pub by_category: ByCategory,
}

impl MemoryWatch {
    /// Creates an observer for a global rank, whose tensors are on `device`.
    pub fn new(tracer: Option<Tracer>, rank: usize, device: Device) -> Self {
        Self { device, tracer, rank: rank as u64, done: 0, of_length: (0, 0), longest: None }
    }

    /// Returns the memory until now.
    pub fn finish(self) -> RankMemory {
        let peak_bytes = match gpu_memory(&self.device) {
            Some(memory) => memory.peak,
            None => u64::try_from(peak_bytes()).unwrap_or(0),
        };
        RankMemory { peak_bytes, step: self.longest }
    }
}

impl Observer for MemoryWatch {
    fn on_step_begin(&mut self, engine: &mut Engine, seq_len: usize) -> Result<(), ObserverError> {
        if self.of_length.0 != seq_len {
            self.of_length = (seq_len, 0);
        }
        let is_traced = self.tracer.as_ref().is_some_and(|tracer| tracer.traces(self.done));
        if self.device.is_cpu() && is_traced {
            engine.watch_memory();
        } else if self.device.is_cpu() && self.of_length.1 < WATCHED_STEPS {
            engine.watch_last_micro_batch();
        }
        Ok(())
    }

    fn on_step_end(&mut self, engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        if let Some(memory) = gpu_memory(&self.device) {
            count_gpu(&mut step.metrics, memory, engine.state_by_category());
        }
        let parts = engine.take_part_peaks();
        if !parts.is_empty() {
            // The peak is reset at each watched part.
            step.metrics.peak_memory_bytes = u64::try_from(peak_bytes()).unwrap_or(0);
        }
        let tracer = self.tracer.as_ref();
        if let Some(tracer) = tracer.filter(|tracer| tracer.traces(self.done) && !parts.is_empty()) {
            let held = parts.iter().map(|part| (part.start, part.peak.bytes, part.peak.by_category));
            tracer.record_memory(self.rank, held);
        }
        let seq_len = step.seq_len;
        let is_longest = self.longest.as_ref().is_none_or(|longest| seq_len >= longest.seq_len);
        if is_longest && !parts.is_empty() {
            let parts = last_micro_batch(&parts);
            self.longest = Some(StepMemory { step: step.metrics.step, seq_len, parts });
        }
        self.done += 1;
        self.of_length.1 += 1;
        Ok(())
    }
}

/// Reports GPU memory in place of host memory.
fn count_gpu(metrics: &mut Metrics, memory: GpuMemory, state: ByCategory) {
    let GpuMemory { in_use, peak, .. } = memory;
    (metrics.memory_bytes, metrics.memory_by_category) = (in_use, state.with_rest_of(in_use));
    (metrics.peak_memory_bytes, metrics.peak_memory_by_category) = (peak, state.with_rest_of(peak));
}

fn last_micro_batch(parts: &[PartPeak]) -> Vec<PartMemory> {
    let first = parts.iter().rposition(|part| part.at == StepPart::Embedding).unwrap_or(0);
    let part = |part: &PartPeak| PartMemory {
        at: part.at.to_string(),
        bytes: part.peak.bytes,
        by_category: part.peak.by_category,
    };
    parts[first..].iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_memory_that_is_not_state_is_other() {
        let memory = GpuMemory { in_use: 100, peak: 150, ..GpuMemory::default() };
        let state = ByCategory { parameters: 20, gradients: 10, optimizer: 40, ..ByCategory::default() };
        let mut metrics = Metrics { memory_bytes: 7, peak_memory_bytes: 9, ..Metrics::default() };
        count_gpu(&mut metrics, memory, state);
        assert_eq!((metrics.memory_bytes, metrics.peak_memory_bytes), (100, 150));
        assert_eq!(metrics.memory_by_category, ByCategory { other: 30, ..state });
        assert_eq!(metrics.peak_memory_by_category, ByCategory { other: 80, ..state });
    }
}
