//! The micro batches of flexible sequence parallelism: rows of whole documents for blocks of sp ranks.

use super::balance::{Assignment, Block, DocumentCost, RankGrid};
use super::best_fit::Segment;
use super::documents::RunningHash;
use super::{DataError, Dataset, FlexibleStep, GlobalBatch, LoaderOptions, MicroBatch, PackedSequence};

/// The documents of one step, and the ranks that compute them.
#[derive(Debug)]
pub(super) struct StepPlan {
    documents: Vec<SourceSegment>,
    assignment: Assignment,
    /// Hash of documents and assignment.
    hash: u64,
    tokens: u64,
}

/// A document's tokens in a packed sequence of a source.
#[derive(Debug, Clone)]
pub(super) struct SourceSegment {
    pub(super) source: usize,
    pub(super) segment: Segment,
}

impl StepPlan {
    /// Assigns the documents of a step to ranks. A rank gets at most as many tokens per micro step as without flexible
    /// sequence parallelism, so that it needs no more memory.
    pub(super) fn new(
        documents: Vec<SourceSegment>,
        cost: &DocumentCost,
        seq_len: usize,
        options: LoaderOptions,
    ) -> Self {
        let LoaderOptions { micro_batch, accumulation, rank, seed } = options;
        let (dp_size, sp_size) = (rank.dp_size, rank.sharding.sp_size());
        let tokens_per_rank = micro_batch.saturating_mul(seq_len.div_ceil(sp_size));
        let lens: Vec<usize> = documents.iter().map(|document| document.segment.tokens.len()).collect();
        let grid = RankGrid { dp_size, sp_size, tokens_per_rank };
        let assignment = Assignment::new(&lens, cost, grid);
        let mut hash = RunningHash::default();
        hash.add([seed, seq_len as u64, documents.len() as u64]);
        for SourceSegment { source, segment } in &documents {
            hash.add(
                [*source, segment.tokens.start, segment.tokens.end, segment.labels_end].map(|at| at as u64),
            );
        }
        for Block { dp_rank, sp_ranks, documents, .. } in assignment.micro_steps.iter().flatten() {
            hash.add([*dp_rank, sp_ranks.start, sp_ranks.end].map(|at| at as u64));
            hash.add(documents.iter().map(|&document| document as u64));
        }
        let tokens = (micro_batch * accumulation * dp_size * seq_len) as u64;
        Self { documents, assignment, hash: hash.finish(), tokens }
    }

    pub(super) fn imbalance(&self) -> f64 {
        self.assignment.imbalance()
    }

    /// Returns the rank's part of a micro step: its shard of one row with the documents of its block. A row has at least
    /// one token per rank; a row without documents is fully masked.
    pub(super) fn micro_batch(
        &self,
        data: &Dataset,
        options: LoaderOptions,
        micro_step: usize,
    ) -> Result<MicroBatch, DataError> {
        let (dp_rank, sp_rank) = (options.rank.dp_rank, options.rank.sp_rank);
        let micro_steps = self.assignment.micro_steps.len();
        let none = || DataError::RankOutOfRange { axis: "micro step", rank: micro_step, size: micro_steps };
        let block = self.assignment.block(micro_step, dp_rank, sp_rank).ok_or_else(none)?;
        let block_size = block.sp_ranks.len();
        let len = block.tokens.max(block_size);
        let mut row = PackedSequence::empty(len);
        for &document in &block.documents {
            let SourceSegment { source, segment } = &self.documents[document];
            row.push(data.source(*source)?.documents(), segment.clone())?;
        }
        row.pad(len);
        let row = GlobalBatch::from_sequences(vec![row], len);
        let batch = row.micro_batch(0..1, block_size, sp_rank - block.sp_ranks.start)?;
        let flexible = Some(FlexibleStep { block_size, micro_steps, tokens: self.tokens });
        Ok(MicroBatch { flexible, batch_hash: self.hash, ..batch })
    }
}
