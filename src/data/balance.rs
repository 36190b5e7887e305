//! [`Assignment`]: the documents of a step, divided among the ranks so that all compute equally much.
//!
//! Documents never see each other, so their sum of losses does not depend on which ranks compute them. Short documents
//! run on one rank without an exchange, long ones on as many as their tokens and their FLOPs need, in the same micro
//! step ("FlexSP", arXiv 2412.01523; Megatron-LM calls it dynamic context parallelism). FlexSP solves a mixed-integer
//! program with measured times; this is a greedy assignment by FLOPs, which every rank repeats without communication.

use std::cmp::Reverse;
use std::ops::Range;

/// The FLOPs of a document, by its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentCost {
    /// FLOPs per token.
    pub per_token: u64,
    /// FLOPs of attention per pair of a query and a key that it sees.
    pub per_pair: u64,
    /// Number of tokens that a token attends to, including itself; `None` for all of its document.
    pub window: Option<usize>,
    /// The size of the chunks into which a document is cut, if a token attends to its own chunk only.
    pub chunk: Option<usize>,
}

impl DocumentCost {
    /// Returns the FLOPs of a document of `len` tokens under a causal mask.
    pub fn flops(&self, len: usize) -> u128 {
        let pairs = |len: usize| {
            let (len, window) = (len as u128, self.window.unwrap_or(len).min(len) as u128);
            window * (window + 1) / 2 + (len - window) * window
        };
        let chunk = self.chunk.unwrap_or(len).max(1);
        let pairs = (len / chunk) as u128 * pairs(chunk) + pairs(len % chunk);
        u128::from(self.per_token) * len as u128 + u128::from(self.per_pair) * pairs
    }
}

/// The ranks of a micro step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankGrid {
    /// Ranks along dp.
    pub dp_size: usize,
    /// Ranks along sp.
    pub sp_size: usize,
    /// Maximum number of tokens of a rank in a micro step.
    pub tokens_per_rank: usize,
}

/// Consecutive sp ranks that share the tokens of whole documents in one micro step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The dp rank of the block.
    pub dp_rank: usize,
    /// Its sp ranks. Their number divides sp, and divides the first of them.
    pub sp_ranks: Range<usize>,
    /// Indices of its documents, ascending. May be empty.
    pub documents: Vec<usize>,
    /// Tokens of its documents.
    pub tokens: usize,
    /// FLOPs of its documents.
    pub flops: u128,
}

/// The blocks of every micro step of a step.
///
/// Every document is in one block. The blocks of a micro step contain every rank once, ordered by dp rank and sp rank.
/// The assignment is a function of the lengths alone, so all ranks compute the same one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// The blocks of each micro step; at least one micro step.
    pub micro_steps: Vec<Vec<Block>>,
}

impl Assignment {
    /// Assigns documents of these lengths, from the longest to the shortest.
    ///
    /// A document needs a block whose ranks have room for its tokens and in which its FLOPs per rank are at most the mean of
    /// the step; the smallest such block, or all of sp. It may join a larger block. Among the blocks with room, it takes the
    /// one that least prolongs its micro step (the rank with the most FLOPs), then the one with the fewest FLOPs per
    /// rank. A micro step is added when no block has room.
    ///
    /// A document must have at most `sp_size · tokens_per_rank` tokens.
    pub fn new(lens: &[usize], cost: &DocumentCost, grid: RankGrid) -> Self {
        let flops: Vec<u128> = lens.iter().map(|&len| cost.flops(len)).collect();
        let ranks = (grid.dp_size * grid.sp_size) as u128;
        let tokens: u128 = lens.iter().map(|&len| len as u128).sum();
        let micro_steps = tokens.div_ceil(ranks * grid.tokens_per_rank as u128).max(1);
        let mean = flops.iter().sum::<u128>().div_ceil(ranks * micro_steps);
        let block_sizes: Vec<usize> = divisors(grid.sp_size).collect();
        let mut order: Vec<usize> = (0..lens.len()).collect();
        order.sort_unstable_by_key(|&document| (Reverse(lens[document]), document));
        let mut steps = vec![OpenMicroStep::new(grid)];
        for document in order {
            let (len, flops) = (lens[document], flops[document]);
            let fits = |size: &usize| len <= size * grid.tokens_per_rank && flops <= mean * *size as u128;
            let size = block_sizes.iter().copied().find(fits).unwrap_or(grid.sp_size);
            let candidates = steps
                .iter()
                .enumerate()
                .filter_map(|(index, step)| step.best_place(len, flops, size).map(|place| (place, index)));
            let index = match candidates.min() {
                Some((_, index)) => index,
                None => {
                    steps.push(OpenMicroStep::new(grid));
                    steps.len() - 1
                }
            };
            steps[index].add(document, len, flops, size);
        }
        Self { micro_steps: steps.into_iter().map(OpenMicroStep::close).collect() }
    }

    /// Returns the block of a rank in a micro step, if there is such a rank.
    pub fn block(&self, micro_step: usize, dp_rank: usize, sp_rank: usize) -> Option<&Block> {
        let blocks = self.micro_steps.get(micro_step)?;
        blocks.iter().find(|block| block.dp_rank == dp_rank && block.sp_ranks.contains(&sp_rank))
    }

    /// Returns the ratio of the longest to the mean rank, in FLOPs, if ranks wait for each other in every micro step: 1 if
    /// all compute equally much. The idle share of the ranks is `1 − 1 / imbalance`.
    pub fn imbalance(&self) -> f64 {
        let (mut longest, mut mean) = (0.0, 0.0);
        for blocks in &self.micro_steps {
            let per_rank = blocks.iter().map(|block| block.flops as f64 / block.sp_ranks.len() as f64);
            longest += per_rank.fold(0.0, f64::max);
            let ranks: usize = blocks.iter().map(|block| block.sp_ranks.len()).sum();
            mean += blocks.iter().map(|block| block.flops as f64).sum::<f64>() / ranks as f64;
        }
        if mean > 0.0 { longest / mean } else { 1.0 }
    }
}

/// Returns the divisors of `n`, ascending.
pub fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |divisor| n.is_multiple_of(*divisor))
}

/// A micro step to which documents are added.
struct OpenMicroStep {
    grid: RankGrid,
    blocks: Vec<Block>,
    /// Whether a rank, `dp_rank · sp_size + sp_rank`, is in no block.
    is_free: Vec<bool>,
    /// FLOPs of the rank with the most.
    longest: u128,
}

/// The quality of a place, better first: the FLOPs that it adds to the longest rank, then the FLOPs of its ranks, then its
/// position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    prolongs: u128,
    per_rank: u128,
    at: PlaceAt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PlaceAt {
    /// The block with this index.
    Block(usize),
    /// A new block from this free rank on.
    Free(usize),
}

impl OpenMicroStep {
    fn new(grid: RankGrid) -> Self {
        Self { grid, blocks: Vec::new(), is_free: vec![true; grid.dp_size * grid.sp_size], longest: 0 }
    }

    /// Returns the best place for a document that needs a block of at least `size` ranks.
    fn best_place(&self, len: usize, flops: u128, size: usize) -> Option<Place> {
        let place = |flops: u128, ranks: usize, at| {
            let per_rank = flops.div_ceil(ranks as u128);
            Place { prolongs: per_rank.saturating_sub(self.longest), per_rank, at }
        };
        let in_blocks = self.blocks.iter().enumerate().filter_map(|(index, block)| {
            let ranks = block.sp_ranks.len();
            let fits = ranks >= size && block.tokens + len <= ranks * self.grid.tokens_per_rank;
            fits.then(|| place(block.flops + flops, ranks, PlaceAt::Block(index)))
        });
        // `size` divides sp, so these are aligned within each dp rank.
        let mut free = (0..self.is_free.len()).step_by(size);
        let free = free.find(|&first| self.is_free[first..first + size].iter().all(|&is_free| is_free));
        in_blocks.chain(free.map(|first| place(flops, size, PlaceAt::Free(first)))).min()
    }

    /// Adds a document at its best place; does nothing if there is none.
    fn add(&mut self, document: usize, len: usize, flops: u128, size: usize) {
        let Some(place) = self.best_place(len, flops, size) else { return };
        let index = match place.at {
            PlaceAt::Block(index) => index,
            PlaceAt::Free(first) => {
                self.is_free[first..first + size].fill(false);
                self.blocks.push(self.empty_block(first, size));
                self.blocks.len() - 1
            }
        };
        let block = &mut self.blocks[index];
        block.documents.push(document);
        block.tokens += len;
        block.flops += flops;
        self.longest = self.longest.max(place.per_rank);
    }

    fn empty_block(&self, first: usize, size: usize) -> Block {
        let sp_rank = first % self.grid.sp_size;
        let (dp_rank, sp_ranks) = (first / self.grid.sp_size, sp_rank..sp_rank + size);
        Block { dp_rank, sp_ranks, documents: Vec::new(), tokens: 0, flops: 0 }
    }

    /// Puts each free rank into a block of its own.
    fn close(mut self) -> Vec<Block> {
        let free = (0..self.is_free.len()).filter(|&rank| self.is_free[rank]);
        let empty: Vec<Block> = free.map(|rank| self.empty_block(rank, 1)).collect();
        self.blocks.extend(empty);
        self.blocks.iter_mut().for_each(|block| block.documents.sort_unstable());
        self.blocks.sort_unstable_by_key(|block| (block.dp_rank, block.sp_ranks.start));
        self.blocks
    }
}
