//! The table of segments and chunks that the kernels read.

use super::super::segments::{Segment, all_segments};
use crate::Documents;

/// In place of an index that does not exist: `kNone` of the kernels.
const NONE: u32 = u32::MAX;

/// The segments of all sequences, step by step: at most one of each sequence at a time.
#[derive(Debug)]
pub(in super::super) struct Plan {
    pub(super) steps: Vec<PlanStep>,
    /// The key head of each value head, then the tables of all steps.
    pub(in super::super) words: Vec<u32>,
}

/// Where the tables of a step are.
#[derive(Debug)]
pub(super) struct PlanStep {
    /// The first word of the sequences' segments: `Segment` of the kernels for each sequence.
    pub(super) segments_at: usize,
    /// The first word of the chunks of all segments: `Chunk` of the kernels for each.
    pub(super) chunks_at: usize,
    pub(super) num_chunks: usize,
}

impl Plan {
    pub(in super::super) fn new(documents: &Documents, v_to_k: &[usize]) -> Self {
        let segments = all_segments(documents);
        let mut plan = Self { steps: Vec::new(), words: v_to_k.iter().map(|&head| head as u32).collect() };
        for index in 0..segments.iter().map(Vec::len).max().unwrap_or(0) {
            let of_sequences = segments.iter().map(|segments| segments.get(index)).collect::<Vec<_>>();
            plan.push(&of_sequences);
        }
        plan
    }

    /// Adds a step of these segments of the sequences.
    fn push(&mut self, of_sequences: &[Option<&Segment>]) {
        let segments_at = self.words.len();
        let mut chunks = Vec::new();
        for (sequence, segment) in of_sequences.iter().enumerate() {
            let begin = chunks.len();
            for chunk in segment.iter().flat_map(|segment| &segment.chunks) {
                let row = segment.map_or(0, |segment| segment.rows(chunk).start);
                let [sequence, token, len, row] =
                    [sequence, chunk.tokens.start, chunk.tokens.len(), row].map(|word| word as u32);
                chunks.push([sequence, token, len, row, slot(chunk.state), slot(chunk.dstate)]);
            }
            let saved = slot(segment.and_then(|segment| segment.saved));
            self.words.extend([begin as u32, chunks.len() as u32, saved]);
        }
        self.steps.push(PlanStep { segments_at, chunks_at: self.words.len(), num_chunks: chunks.len() });
        self.words.extend(chunks.into_iter().flatten());
    }
}

fn slot(index: Option<usize>) -> u32 {
    index.map_or(NONE, |index| index as u32)
}
