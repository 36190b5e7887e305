//! Best-fit packing: documents that fit into a sequence are not cut.

use super::{DataError, Documents};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

/// The assignment of documents to sequences by best-fit decreasing (Ding et al. 2024, "Fewer Truncations Improve
/// Language Modeling", arXiv 2404.10830).
///
/// A document of `seq_len` tokens or more fills whole sequences first; the rest is packed like the other documents.
/// From the longest to the shortest, each goes into the sequence with the least free space that it fits into. This
/// takes n·log(n) time, and 16 bytes per document that does not fill whole sequences.
#[derive(Debug, Clone)]
pub(super) struct BestFit {
    seq_len: usize,
    /// Documents that fill whole sequences.
    long: Vec<LongDocument>,
    num_full_sequences: usize,
    /// The pieces of shared sequence r are `sequence_starts[r]..sequence_starts[r + 1]`, in corpus order.
    sequence_starts: Vec<usize>,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone)]
struct LongDocument {
    tokens: Range<usize>,
    first_sequence: usize,
}

/// A whole document, or the rest of a long one.
#[derive(Debug, Clone, Copy)]
struct Piece {
    start: usize,
    len: u32,
}

/// Tokens of one document in a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) tokens: Range<usize>,
    /// The end of the tokens that may be labels, exclusive.
    pub(super) labels_end: usize,
}

impl BestFit {
    /// Packs the documents; `seq_len` must fit 32 bits and not be 0.
    pub(super) fn new(documents: &Documents, seq_len: usize) -> Result<Self, DataError> {
        let (mut long, mut pieces, mut num_full_sequences) = (Vec::new(), Vec::new(), 0);
        for index in 0..documents.num_documents() {
            let tokens = documents.document(index)?;
            let (full_sequences, rest) = (tokens.len() / seq_len, tokens.len() % seq_len);
            if rest > 0 {
                pieces.push(Piece { start: tokens.end - rest, len: rest as u32 });
            }
            if full_sequences > 0 {
                long.push(LongDocument { tokens, first_sequence: num_full_sequences });
                num_full_sequences += full_sequences;
            }
        }
        let (sequence_starts, pieces) = share_sequences(pieces, seq_len as u32);
        Ok(Self { seq_len, long, num_full_sequences, sequence_starts, pieces })
    }

    pub(super) fn num_sequences(&self) -> usize {
        self.num_full_sequences + self.sequence_starts.len() - 1
    }

    /// Returns the segments of a sequence, which must exist.
    pub(super) fn segments(&self, sequence: usize) -> Vec<Segment> {
        let Some(shared) = sequence.checked_sub(self.num_full_sequences) else {
            let after = self.long.partition_point(|document| document.first_sequence <= sequence);
            let document = &self.long[after - 1];
            let start = document.tokens.start + (sequence - document.first_sequence) * self.seq_len;
            let labels_end = document.tokens.end;
            return vec![Segment { tokens: start..start + self.seq_len, labels_end }];
        };
        let segment = |piece: &Piece| {
            let end = piece.start + piece.len as usize;
            Segment { tokens: piece.start..end, labels_end: end }
        };
        self.pieces[self.sequence_starts[shared]..self.sequence_starts[shared + 1]]
            .iter()
            .map(segment)
            .collect()
    }
}

/// Returns the pieces ordered by sequence, and the index of each sequence's first piece, followed by the total number.
fn share_sequences(mut pieces: Vec<Piece>, seq_len: u32) -> (Vec<usize>, Vec<Piece>) {
    pieces.sort_unstable_by_key(|piece| (Reverse(piece.len), piece.start));
    let mut sequences_by_room: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    // Number of pieces of each sequence.
    let mut lens: Vec<usize> = Vec::new();
    let mut sequence_of = Vec::with_capacity(pieces.len());
    for piece in &pieces {
        let fitting = sequences_by_room.range_mut(piece.len..).next();
        let fitting =
            fitting.and_then(|(&room, sequences)| Some((room, sequences.pop()?, sequences.is_empty())));
        let (room, sequence) = match fitting {
            Some((room, sequence, was_the_last)) => {
                if was_the_last {
                    sequences_by_room.remove(&room);
                }
                (room, sequence)
            }
            None => {
                lens.push(0);
                (seq_len, lens.len() - 1)
            }
        };
        lens[sequence] += 1;
        sequence_of.push(sequence);
        if room > piece.len {
            sequences_by_room.entry(room - piece.len).or_default().push(sequence);
        }
    }
    let mut starts = vec![0];
    starts.extend(lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    }));
    let mut next = starts.clone();
    let mut by_sequence = pieces.clone();
    for (piece, sequence) in pieces.into_iter().zip(sequence_of) {
        by_sequence[next[sequence]] = piece;
        next[sequence] += 1;
    }
    for sequence in starts.windows(2) {
        by_sequence[sequence[0]..sequence[1]].sort_unstable_by_key(|piece| piece.start);
    }
    (starts, by_sequence)
}
