//! The ranges of tokens of all ranks, and their rows in extended tensors.

use super::ShardChain;
use crate::mesh::TokenRanges;
use std::ops::Range;
use ulysses_kernels::{Documents, OpError};

/// A range of tokens of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) tokens: Range<usize>,
    /// Its place among those of all ranks, in the order of the sequence.
    pub(super) place: usize,
    /// Its first token, among those of its rank.
    pub(super) first_token: usize,
    /// The row of that token in extended tensors.
    pub(super) first_row: usize,
}

impl Segment {
    /// The rows of its tokens in extended tensors.
    pub(super) fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.tokens.len()
    }
}

/// The ranges of all ranks.
pub(super) struct Segments {
    rank: usize,
    by_rank: Vec<Vec<Segment>>,
    /// Number of ranges of all ranks.
    pub(super) len: usize,
    /// Rows before and after each range.
    pub(super) around: [usize; 2],
}

impl Segments {
    pub(super) fn new(chain: &dyn ShardChain, seq_len: usize, around: [usize; 2]) -> Self {
        let shards = chain.shards(seq_len);
        let mut starts: Vec<usize> =
            shards.iter().flat_map(TokenRanges::ranges).map(|tokens| tokens.start).collect();
        starts.sort_unstable();
        let segments = |shard: &TokenRanges| {
            let (mut first_token, mut row) = (0, 0);
            let segment = |tokens: &Range<usize>| {
                let place = starts.partition_point(|start| *start < tokens.start);
                let first_row = row + around[0];
                let segment = Segment { tokens: tokens.clone(), place, first_token, first_row };
                first_token += tokens.len();
                row = segment.rows().end + around[1];
                segment
            };
            shard.ranges().iter().map(segment).collect()
        };
        Self { rank: chain.rank(), by_rank: shards.iter().map(segments).collect(), len: starts.len(), around }
    }

    /// Number of ranks.
    pub(super) fn num_ranks(&self) -> usize {
        self.by_rank.len()
    }

    /// The ranges of a rank.
    pub(super) fn on(&self, rank: usize) -> &[Segment] {
        &self.by_rank[rank]
    }

    /// The ranges of this rank.
    pub(super) fn own(&self) -> &[Segment] {
        self.on(self.rank)
    }

    /// Number of this rank's tokens.
    pub(super) fn num_tokens(&self) -> usize {
        self.own().iter().map(|segment| segment.tokens.len()).sum()
    }

    /// Number of rows of this rank's extended tensors.
    pub(super) fn num_rows(&self) -> usize {
        self.num_tokens() + self.own().len() * (self.around[0] + self.around[1])
    }

    /// The documents of this rank's extended tensors. `continues`: the rows before and after a range that belong to its first and its
    /// last document, by the boundaries of a sequence; the others around it are documents of their own.
    pub(super) fn documents(
        &self,
        cu_seqlens: &[Vec<u32>],
        continues: impl Fn(&[u32], &Range<usize>) -> [usize; 2],
    ) -> Result<Documents, OpError> {
        let rows_of_segment = |boundaries: &[u32], Segment { tokens, first_row, .. }: &Segment| {
            let [before, after] = continues(boundaries, tokens);
            let inner = boundaries.iter().map(|boundary| *boundary as usize);
            let inner = inner.filter(|boundary| tokens.start < *boundary && *boundary < tokens.end);
            let inner = inner.map(|boundary| first_row + boundary - tokens.start);
            let ends = [first_row - self.around[0], first_row - before];
            ends.into_iter().chain(inner).chain([first_row + tokens.len() + after]).collect::<Vec<_>>()
        };
        let rows = |boundaries: &Vec<u32>| {
            let rows = self.own().iter().flat_map(|segment| rows_of_segment(boundaries, segment));
            rows.chain([self.num_rows()]).map(|row| row as u32).collect::<Vec<u32>>()
        };
        Documents::new(cu_seqlens.iter().map(rows).collect::<Vec<_>>())
    }

    /// Whether no rank has tokens before the range.
    pub(super) fn is_first(&self, segment: &Segment) -> bool {
        segment.place == 0
    }

    /// Whether no rank has tokens after the range.
    pub(super) fn is_last(&self, segment: &Segment) -> bool {
        segment.place + 1 == self.len
    }
}
