//! The tokens of a micro batch that have a label.

use crate::nn::LayerError;
use candle_core::{Device, Tensor};
use std::ops::Range;
use ulysses_kernels::embedding::{self, RowIndices};
use ulysses_kernels::lm_head_loss::{IGNORED, Labels, validate_labels};
use ulysses_kernels::{OpError, elementwise, strided_copy};

/// The tokens of a shard whose label is not −100, the only ones that head and loss compute.
///
/// They form at most two chunks, one after the other. A chunk of which some tokens are masked has at most
/// half of the shard's tokens, so that its hidden states and their gradient fit in one buffer of the
/// shard's size. So masks need no more activation memory than a shard in which every token has a label, of
/// which there is one chunk that copies nothing.
#[derive(Debug)]
pub struct LabeledTokens {
    num_tokens: usize,
    pub(super) chunks: Vec<Chunk>,
    /// Tables of a masked batch, which a plan includes.
    reserved: Option<Compaction>,
}

/// Labeled tokens, and the part of the shard that contains them.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The part of the shard: the chunk's tokens and masked ones.
    pub(super) region: Range<usize>,
    /// The labels of the chunk's tokens.
    pub(super) labels: Labels,
    /// `None` if no token of the region is masked.
    pub(super) compaction: Option<Compaction>,
}

/// Row indices that copy the labeled tokens of a region to adjacent rows, and back.
#[derive(Debug)]
pub(super) struct Compaction {
    /// For each labeled token, its row in the region.
    rows: RowIndices,
    /// For each row of the region, its labeled token, or their number if it is masked.
    tokens: RowIndices,
}

impl LabeledTokens {
    /// Finds the tokens with a label; `labels` has one for each token of the shard, −100 for masked ones.
    ///
    /// # Errors
    /// A label outside the vocabulary.
    pub fn new(labels: &[i64], vocab_size: usize) -> Result<Self, LayerError> {
        validate_labels(labels, vocab_size)?;
        let (num_tokens, num_labeled) = (labels.len(), labels.iter().filter(|l| **l != IGNORED).count());
        let chunk_tokens = if num_labeled == num_tokens { num_tokens } else { num_tokens / 2 }.max(1);
        Ok(Self::in_chunks(labels, chunk_tokens, num_labeled.div_ceil(chunk_tokens)))
    }

    /// Divides the tokens with a label into `num_chunks` chunks of at most `chunk_tokens`, of which the last may be empty. Together
    /// their regions are the shard, unless there is no chunk.
    pub(super) fn in_chunks(labels: &[i64], chunk_tokens: usize, num_chunks: usize) -> Self {
        let num_tokens = labels.len();
        let labeled: Vec<usize> = (0..num_tokens).filter(|&token| labels[token] != IGNORED).collect();
        // The masked tokens before the first chunk belong to it, others to the chunk that they follow.
        let region_start = |chunk: usize| match chunk {
            0 => 0,
            _ => labeled.get(chunk * chunk_tokens).copied().unwrap_or(num_tokens),
        };
        let chunks =
            (0..num_chunks).map(|chunk| Chunk::new(labels, region_start(chunk)..region_start(chunk + 1)));
        Self { num_tokens, chunks: chunks.collect(), reserved: None }
    }

    /// The tokens of a dry batch: all have a label, which takes the most compute and activation memory. It
    /// also has the tables of a masked batch, so that no batch needs more memory.
    pub fn dry(num_tokens: usize) -> Self {
        Self::dry_in_chunks(num_tokens, num_tokens, 1)
    }

    /// As [`dry`](Self::dry), in chunks as those of [`in_chunks`](Self::in_chunks).
    pub(super) fn dry_in_chunks(num_tokens: usize, chunk_tokens: usize, num_chunks: usize) -> Self {
        let start = |chunk: usize| (chunk * chunk_tokens).min(num_tokens);
        let regions = (0..num_chunks).map(|chunk| start(chunk)..start(chunk + 1));
        let chunk =
            |region: Range<usize>| Chunk { labels: Labels::dry(region.len()), region, compaction: None };
        let [rows, tokens] = [(); 2].map(|()| RowIndices::dry(num_tokens));
        Self { num_tokens, chunks: regions.map(chunk).collect(), reserved: Some(Compaction { rows, tokens }) }
    }

    /// Number of tokens of the shard, with or without a label.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Returns the shard's rows of `x`.
    ///
    /// # Shapes
    /// `x`: `[batch, seq_local, hidden]` → `[num_tokens, hidden]`.
    pub(super) fn rows_of(&self, x: &Tensor) -> Result<Tensor, LayerError> {
        let (batch, seq_len, hidden) = x.dims3()?;
        let (got, expected) = (self.num_tokens, batch * seq_len);
        if got != expected {
            return Err(OpError::TokenCount { op: "CausalLm", argument: "labels", expected, got }.into());
        }
        Ok(x.reshape((expected, hidden))?)
    }

    /// Returns whether some chunk has to be copied.
    pub(super) fn is_compacted(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.compaction.is_some())
    }

    /// Copies the row indices to a GPU, so that the backward pass need not wait for it.
    pub(super) fn upload(&self, device: &Device) -> Result<(), OpError> {
        let tables = self.chunks.iter().filter_map(|chunk| chunk.compaction.as_ref()).chain(&self.reserved);
        let mut tables = tables.flat_map(|Compaction { rows, tokens }| [rows, tokens]);
        tables.try_for_each(|table| table.upload(device))
    }
}

impl Chunk {
    /// The labeled tokens of `region`, with the labels of the shard.
    fn new(labels: &[i64], region: Range<usize>) -> Self {
        let labels = &labels[region.clone()];
        let rows: Vec<u32> =
            (0..labels.len() as u32).filter(|&row| labels[row as usize] != IGNORED).collect();
        if rows.len() == labels.len() {
            return Self { region, labels: Labels::new(labels), compaction: None };
        }
        let mut tokens = vec![rows.len() as u32; labels.len()];
        rows.iter().zip(0..).for_each(|(&row, token)| tokens[row as usize] = token);
        let labels: Vec<i64> = rows.iter().map(|&row| labels[row as usize]).collect();
        let compaction = Compaction { rows: RowIndices::new(rows), tokens: RowIndices::new(tokens) };
        Self { region, labels: Labels::new(labels), compaction: Some(compaction) }
    }

    /// The rows of the chunk's region.
    ///
    /// # Shapes
    /// `rows`: `[num_tokens, hidden]` → `[region, hidden]`.
    pub(super) fn region_of(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        rows.narrow(0, self.region.start, self.region.len())
    }
}

impl Compaction {
    /// Copies the rows of the labeled tokens from a region to the first rows of `buffer`, and returns these.
    pub(super) fn compact(&self, region: &Tensor, buffer: &Tensor) -> Result<Tensor, LayerError> {
        let compact = buffer.narrow(0, 0, self.rows.len())?;
        embedding::gather(&self.rows, region, &compact)?;
        Ok(compact)
    }

    /// Moves the first rows of a region to the rows of the labeled tokens, and writes 0 to the masked ones.
    /// `buffer` has room for one row more than there are labeled tokens.
    pub(super) fn expand(&self, region: &Tensor, buffer: &Tensor) -> Result<(), LayerError> {
        let labeled = self.rows.len();
        strided_copy::copy(&region.narrow(0, 0, labeled)?, &buffer.narrow(0, 0, labeled)?)?;
        self.expand_from(buffer, region)
    }

    /// Copies the first rows of `compact` to the rows of the labeled tokens of a region, and writes 0 to the masked ones. `compact`
    /// has room for one row more than there are labeled tokens.
    pub(super) fn expand_from(&self, compact: &Tensor, region: &Tensor) -> Result<(), LayerError> {
        let labeled = self.rows.len();
        elementwise::fill(&compact.narrow(0, labeled, 1)?, 0.0)?;
        embedding::gather(&self.tokens, &compact.narrow(0, 0, labeled + 1)?, region)?;
        Ok(())
    }
}
