//! The unigram entropy of a corpus.

use super::{Corpus, DataError};
use std::collections::HashMap;

/// Tokens that are read at once.
const PIECE: usize = 1 << 16;

/// Returns the entropy of the token frequencies, in nats per token.
///
/// A model that knows only the frequencies reaches this loss; a lower loss shows that a model uses context.
///
/// # Errors
/// When the tokens cannot be read.
pub fn unigram_entropy_nats(corpus: &Corpus) -> Result<f64, DataError> {
    let mut counts: HashMap<u32, u64> = HashMap::new();
    let (mut piece, total) = (Vec::new(), corpus.num_tokens());
    for start in (0..total).step_by(PIECE) {
        piece.clear();
        corpus.read_tokens(start..total.min(start + PIECE), &mut piece)?;
        for &token in &piece {
            *counts.entry(token).or_default() += 1;
        }
    }
    // Sorted, because sums in the map's random order would differ in the last bit between runs.
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.sort_unstable();
    Ok(counts.into_iter().map(|count| count as f64 / total as f64).map(|share| -share * share.ln()).sum())
}
