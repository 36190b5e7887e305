//! Documents in rows without cutting those that fit.

use super::{DataError, Documents};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

/// Which documents share a row, by best-fit decreasing (Ding et al. 2024, "Fewer Truncations Improve Language
/// Modeling", arXiv 2404.10830).
///
/// A document of `seq_len` tokens or more fills rows of its own first; what is left of it is treated as the
/// others are. From the longest to the shortest, each goes into the row with the least room that it fits into.
/// That takes n·log(n) time, and 16 bytes for each document that does not fill its rows.
#[derive(Debug, Clone)]
pub(super) struct BestFit {
    seq_len: usize,
    /// Documents that fill whole rows.
    long: Vec<LongDocument>,
    num_full_rows: usize,
    /// The pieces of shared row r are `row_starts[r]..row_starts[r + 1]`, in the order of the corpus.
    row_starts: Vec<usize>,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone)]
struct LongDocument {
    tokens: Range<usize>,
    first_row: usize,
}

/// A whole document, or the end of a long one.
#[derive(Debug, Clone, Copy)]
struct Piece {
    start: usize,
    len: u32,
}

/// Tokens that stand together in a row and attend to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) tokens: Range<usize>,
    /// One past the last token that may be a label here.
    pub(super) labels_end: usize,
}

impl BestFit {
    /// `seq_len` fits 32 bits and is not 0.
    pub(super) fn new(documents: &Documents, seq_len: usize) -> Result<Self, DataError> {
        let (mut long, mut pieces, mut num_full_rows) = (Vec::new(), Vec::new(), 0);
        for index in 0..documents.num_documents() {
            let tokens = documents.document(index)?;
            let (full_rows, rest) = (tokens.len() / seq_len, tokens.len() % seq_len);
            if rest > 0 {
                pieces.push(Piece { start: tokens.end - rest, len: rest as u32 });
            }
            if full_rows > 0 {
                long.push(LongDocument { tokens, first_row: num_full_rows });
                num_full_rows += full_rows;
            }
        }
        let (row_starts, pieces) = share_rows(pieces, seq_len as u32);
        Ok(Self { seq_len, long, num_full_rows, row_starts, pieces })
    }

    pub(super) fn num_rows(&self) -> usize {
        self.num_full_rows + self.row_starts.len() - 1
    }

    /// What is in a row; it must exist.
    pub(super) fn segments(&self, row: usize) -> Vec<Segment> {
        let Some(shared) = row.checked_sub(self.num_full_rows) else {
            let after = self.long.partition_point(|document| document.first_row <= row);
            let document = &self.long[after - 1];
            let start = document.tokens.start + (row - document.first_row) * self.seq_len;
            let labels_end = document.tokens.end;
            return vec![Segment { tokens: start..start + self.seq_len, labels_end }];
        };
        let segment = |piece: &Piece| {
            let end = piece.start + piece.len as usize;
            Segment { tokens: piece.start..end, labels_end: end }
        };
        self.pieces[self.row_starts[shared]..self.row_starts[shared + 1]].iter().map(segment).collect()
    }
}

/// The pieces by row, and where each row's begin, with the end of the last.
fn share_rows(mut pieces: Vec<Piece>, seq_len: u32) -> (Vec<usize>, Vec<Piece>) {
    pieces.sort_unstable_by_key(|piece| (Reverse(piece.len), piece.start));
    let mut rows_by_room: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    // For each row, how many pieces it has.
    let mut lens: Vec<usize> = Vec::new();
    let mut row_of = Vec::with_capacity(pieces.len());
    for piece in &pieces {
        let fitting = rows_by_room.range_mut(piece.len..).next();
        let fitting = fitting.and_then(|(&room, rows)| Some((room, rows.pop()?, rows.is_empty())));
        let (room, row) = match fitting {
            Some((room, row, was_the_last)) => {
                if was_the_last {
                    rows_by_room.remove(&room);
                }
                (room, row)
            }
            None => {
                lens.push(0);
                (seq_len, lens.len() - 1)
            }
        };
        lens[row] += 1;
        row_of.push(row);
        if room > piece.len {
            rows_by_room.entry(room - piece.len).or_default().push(row);
        }
    }
    let mut starts = vec![0];
    starts.extend(lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    }));
    let mut next = starts.clone();
    let mut by_row = pieces.clone();
    for (piece, row) in pieces.into_iter().zip(row_of) {
        by_row[next[row]] = piece;
        next[row] += 1;
    }
    for row in starts.windows(2) {
        by_row[row[0]..row[1]].sort_unstable_by_key(|piece| piece.start);
    }
    (starts, by_row)
}
