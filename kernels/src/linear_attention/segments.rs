//! Divides the documents of a sequence into chunks, and these into segments that are processed one after the other.

use super::Sizes;
use crate::Documents;
use rayon::prelude::*;
use std::ops::Range;

/// Tokens of a chunk, the part of a document that is computed with matmuls.
pub(super) const CHUNK: usize = 64;

/// Tokens between two states that the forward pass saves of a document.
pub(super) const STATE_INTERVAL: usize = 1024;

/// The maximum number of states per segment: one per whole chunk.
pub(super) const SLOTS: usize = STATE_INTERVAL / CHUNK;

/// Up to [`CHUNK`] tokens of one document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunk {
    /// The tokens, within the sequence.
    pub(super) tokens: Range<usize>,
    /// The slot of the state before the chunk; `None` at the start of a document, where the state is zero.
    pub(super) state: Option<usize>,
    /// The slot of the gradient of the state behind the chunk; `None` at the end of a document, where nothing reads it.
    pub(super) dstate: Option<usize>,
}

/// Chunks of up to [`STATE_INTERVAL`] tokens in total. A document begins at any token of a segment, and continues in the
/// next one after a multiple of that many tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    /// The tokens, within the sequence.
    pub(super) tokens: Range<usize>,
    pub(super) chunks: Vec<Chunk>,
    /// The index of the saved state before the segment, if a document continues in it.
    pub(super) saved: Option<usize>,
    /// Number of slots in use, of states and of their gradients.
    states: usize,
    dstates: usize,
}

impl Segment {
    fn new(start: usize, saved: Option<usize>) -> Self {
        Self { tokens: start..start, chunks: Vec::new(), saved, states: 0, dstates: 0 }
    }

    /// The tokens of a chunk, within the segment.
    pub(super) fn rows(&self, chunk: &Chunk) -> Range<usize> {
        chunk.tokens.start - self.tokens.start..chunk.tokens.end - self.tokens.start
    }

    fn push(&mut self, document: &Range<usize>, tokens: Range<usize>) {
        for start in tokens.clone().step_by(CHUNK) {
            let chunk = start..tokens.end.min(start + CHUNK);
            let state = next_slot(&mut self.states, chunk.start > document.start);
            let dstate = next_slot(&mut self.dstates, chunk.end < document.end);
            self.chunks.push(Chunk { tokens: chunk, state, dstate });
        }
        self.tokens.end = tokens.end;
    }
}

fn next_slot(used: &mut usize, is_needed: bool) -> Option<usize> {
    let slot = *used;
    *used += usize::from(is_needed);
    is_needed.then_some(slot)
}

impl Sizes {
    /// The most tokens of a segment.
    pub(super) fn segment_tokens(&self) -> usize {
        self.seq_len.min(STATE_INTERVAL)
    }

    /// The most slots of a segment.
    pub(super) fn slots(&self) -> usize {
        SLOTS.min(self.seq_len.div_ceil(CHUNK))
    }
}

/// The segments of all sequences.
pub(super) fn all_segments(documents: &Documents) -> Vec<Vec<Segment>> {
    (0..documents.batch()).into_par_iter().map(|sequence| segments(documents, sequence)).collect()
}

/// The segments of a sequence.
fn segments(documents: &Documents, sequence: usize) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut saved = 0;
    for document in documents.of_sequence(sequence) {
        for start in document.clone().step_by(STATE_INTERVAL) {
            let tokens = start..document.end.min(start + STATE_INTERVAL);
            let continues = start > document.start;
            match segments.last_mut() {
                Some(last) if !continues && last.tokens.len() + tokens.len() <= STATE_INTERVAL => {
                    last.push(&document, tokens);
                }
                _ => {
                    let index = continues.then_some(saved);
                    saved += usize::from(continues);
                    let mut segment = Segment::new(start, index);
                    segment.push(&document, tokens);
                    segments.push(segment);
                }
            }
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_the_tokens_within_their_limits() {
        let every: Vec<u32> = (0..=3000).collect();
        let alternating: Vec<u32> = (0..46).flat_map(|i| [65 * i, 65 * i + 1]).chain([3000]).collect();
        let lists = [
            vec![0, 3000],
            vec![0, 1024, 2048, 3000],
            vec![0, 1025, 1026, 3000],
            vec![0, 10, 1100, 3000],
            every,
            alternating,
        ];
        for list in lists {
            let documents = Documents::new(vec![list.clone()]).unwrap();
            let (mut token, mut saved) = (0, 0);
            for segment in segments(&documents, 0) {
                assert!(segment.tokens.start == token && segment.tokens.len() <= STATE_INTERVAL);
                let starts = |token: usize| list.contains(&(token as u32));
                assert_eq!(segment.saved, (!starts(token)).then_some(saved), "{segment:?}");
                saved += usize::from(segment.saved.is_some());
                for chunk in &segment.chunks {
                    assert!(chunk.tokens.start == token && (1..=CHUNK).contains(&chunk.tokens.len()));
                    assert_eq!(
                        [chunk.state.is_none(), chunk.dstate.is_none()],
                        [starts(token), starts(chunk.tokens.end)]
                    );
                    assert!([chunk.state, chunk.dstate].into_iter().flatten().all(|slot| slot < SLOTS));
                    token = chunk.tokens.end;
                }
                assert_eq!(segment.tokens.end, token);
            }
            assert_eq!(token, 3000);
            assert!(saved <= 2999 / STATE_INTERVAL, "{saved} states are saved");
        }
    }
}
