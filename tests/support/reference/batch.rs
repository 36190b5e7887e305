//! Batches of token sequences, and builders for cases that are hard to shard.

use anyhow::{Result, ensure};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// The label of ignored tokens.
pub const IGNORED: i64 = -100;

/// Sequences of tokens; `labels[row][t]` is the target after token `t`.
///
/// A document starts at the first token of a row and wherever a position is not
/// the previous one plus 1.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    pub input_ids: Vec<Vec<u32>>,
    pub position_ids: Vec<Vec<u32>>,
    /// Shifted labels; [`IGNORED`] has no loss.
    pub labels: Vec<Vec<i64>>,
}

impl Batch {
    /// Creates sequences of one truncated document each: the last token keeps its label.
    pub fn random(vocab_size: usize, num_rows: usize, seq_len: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut batch = Self::default();
        for _ in 0..num_rows {
            let tokens = random_tokens(&mut rng, vocab_size, seq_len + 1);
            batch.labels.push(tokens[1..].iter().map(|&token| i64::from(token)).collect());
            batch.input_ids.push(tokens[..seq_len].to_vec());
            batch.position_ids.push((0..seq_len as u32).collect());
        }
        batch
    }

    /// Creates one sequence per entry of `document_lengths`, packed with whole documents of these lengths: positions
    /// restart, and a document's last token has no label.
    pub fn packed(vocab_size: usize, document_lengths: &[&[usize]], seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut batch = Self::default();
        for lengths in document_lengths {
            let (mut input_ids, mut position_ids, mut labels) = (Vec::new(), Vec::new(), Vec::new());
            for &len in *lengths {
                let tokens = random_tokens(&mut rng, vocab_size, len);
                position_ids.extend(0..len as u32);
                labels.extend(tokens.iter().skip(1).map(|&token| i64::from(token)));
                labels.extend((len > 0).then_some(IGNORED));
                input_ids.extend(tokens);
            }
            batch.input_ids.push(input_ids);
            batch.position_ids.push(position_ids);
            batch.labels.push(labels);
        }
        batch
    }

    /// Ignores the labels of a token range in every row, such as one sp rank's whole shard.
    pub fn mask_tokens(mut self, tokens: Range<usize>) -> Self {
        for labels in &mut self.labels {
            labels[tokens.clone()].fill(IGNORED);
        }
        self
    }

    /// Ignores all labels of some rows, such as those of one dp rank.
    pub fn mask_rows(mut self, rows: Range<usize>) -> Self {
        for labels in &mut self.labels[rows] {
            labels.fill(IGNORED);
        }
        self
    }

    /// Returns some of the sequences as a batch: a micro batch or a dp rank's part.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        Self {
            input_ids: self.input_ids[rows.clone()].to_vec(),
            position_ids: self.position_ids[rows.clone()].to_vec(),
            labels: self.labels[rows].to_vec(),
        }
    }

    pub fn num_rows(&self) -> usize {
        self.input_ids.len()
    }

    /// Returns the number of labels that are not ignored.
    pub fn num_valid_tokens(&self) -> usize {
        self.labels.iter().flatten().filter(|&&label| label != IGNORED).count()
    }

    /// Checks that ids, positions and labels have the same shape.
    pub fn validate(&self) -> Result<()> {
        let ids = row_lengths(&self.input_ids);
        let positions = row_lengths(&self.position_ids);
        let labels = row_lengths(&self.labels);
        ensure!(
            ids == positions && ids == labels,
            "row lengths differ: input_ids {ids:?}, position_ids {positions:?}, labels {labels:?}"
        );
        Ok(())
    }
}

/// Returns the index of the document of each token of a sequence.
pub fn document_ids(position_ids: &[u32]) -> Vec<usize> {
    let mut document = 0;
    let mut ids = Vec::with_capacity(position_ids.len());
    for (token, &position) in position_ids.iter().enumerate() {
        if token > 0 && position != position_ids[token - 1] + 1 {
            document += 1;
        }
        ids.push(document);
    }
    ids
}

fn random_tokens(rng: &mut impl Rng, vocab_size: usize, len: usize) -> Vec<u32> {
    (0..len).map(|_| rng.random_range(0..vocab_size as u32)).collect()
}

fn row_lengths<T>(rows: &[Vec<T>]) -> Vec<usize> {
    rows.iter().map(Vec::len).collect()
}
