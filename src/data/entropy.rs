//! How much a corpus gives away without any context.

use std::collections::HashMap;

/// Entropy, in nats per token, of how often each token occurs.
///
/// A model that knows only the frequencies reaches this loss; one below it has learnt from context. No tokens
/// have entropy 0.
pub fn unigram_entropy_nats(tokens: &[u32]) -> f64 {
    let mut counts: HashMap<u32, u64> = HashMap::new();
    for &token in tokens {
        *counts.entry(token).or_default() += 1;
    }
    // Sorted, because a sum in the map's random order would differ in the last bit from run to run.
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.sort_unstable();
    let total = tokens.len() as f64;
    counts.into_iter().map(|count| count as f64 / total).map(|share| -share * share.ln()).sum()
}
