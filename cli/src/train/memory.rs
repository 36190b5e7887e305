//! What a rank held in each part of a step: for `run.json`, and for `--trace`.

use super::Run;
use serde::{Deserialize, Serialize};
use ulysses::engine::Moment;
use ulysses::engine::{Engine, HeldInPart};
use ulysses::memory::ByCategory;
use ulysses::monitor::Tracer;

/// Steps of each length of the rows that are watched: what a step allocates it keeps for the next, so the second is the first
/// that is like all others.
const WATCHED_STEPS: u64 = 2;

/// One rank's, which watches a few steps only.
pub(super) struct MemoryWatch<'a> {
    /// Memory of a GPU is not what the allocator counts.
    is_on_host: bool,
    tracer: Option<&'a Tracer>,
    rank: u64,
    /// Steps that this process has done.
    done: u64,
    /// The length of the rows, and the steps that have been done with such.
    of_length: (usize, u64),
    /// Of the longest rows.
    kept: Option<StepMemory>,
}

/// What a rank held over a step: the most in each part of its last micro batch, and in the update.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct StepMemory {
    pub(super) step: u64,
    pub(super) seq_len: usize,
    pub(super) parts: Vec<PartMemory>,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct PartMemory {
    /// In the words of the plan.
    pub(super) at: String,
    pub(super) bytes: u64,
    pub(super) by_category: ByCategory,
}

impl<'a> MemoryWatch<'a> {
    pub(super) fn new(run: &'a Run, rank: usize, is_on_host: bool) -> Self {
        let tracer = run.tracer.as_ref();
        Self { is_on_host, tracer, rank: rank as u64, done: 0, of_length: (0, 0), kept: None }
    }

    /// Before a step with rows of `seq_len` tokens.
    pub(super) fn begin(&mut self, engine: &mut Engine, seq_len: usize) {
        if self.of_length.0 != seq_len {
            self.of_length = (seq_len, 0);
        }
        let is_traced = self.tracer.is_some_and(|tracer| tracer.traces(self.done));
        if self.is_on_host && is_traced {
            engine.watch_memory();
        } else if self.is_on_host && self.of_length.1 < WATCHED_STEPS {
            engine.watch_last_micro_batch();
        }
    }

    /// After it.
    pub(super) fn end(&mut self, engine: &mut Engine, step: u64) {
        let parts = engine.take_memory();
        if let Some(tracer) = self.tracer.filter(|tracer| tracer.traces(self.done) && !parts.is_empty()) {
            let held = parts.iter().map(|part| (part.begun, part.peak.bytes, part.peak.by_category));
            tracer.note_memory(self.rank, held);
        }
        let seq_len = self.of_length.0;
        let is_longest = self.kept.as_ref().is_none_or(|kept| seq_len >= kept.seq_len);
        if is_longest && !parts.is_empty() {
            self.kept = Some(StepMemory { step, seq_len, parts: last_micro_batch(&parts) });
        }
        self.done += 1;
        self.of_length.1 += 1;
    }

    pub(super) fn kept(self) -> Option<StepMemory> {
        self.kept
    }
}

fn last_micro_batch(parts: &[HeldInPart]) -> Vec<PartMemory> {
    let first = parts.iter().rposition(|part| part.at == Moment::Embedding).unwrap_or(0);
    let part = |part: &HeldInPart| PartMemory {
        at: part.at.to_string(),
        bytes: part.peak.bytes,
        by_category: part.peak.by_category,
    };
    parts[first..].iter().map(part).collect()
}
