//! Interleaves sources by their weights.

use super::order::generator;
use rand_chacha::rand_core::RngCore;

/// The random stream of a seed that mixtures use; the streams from 0 on are those of the epochs.
const STREAM: u64 = u64::MAX;

/// Which source each sample of an endless mixture is from.
///
/// A chain of two-way splits: the first source gets its share of all samples, evenly spaced from an offset that
/// the seed gives, the second one its share of the rest, and so on. So the source of a sample is found without
/// those before it, and after any number of samples every source has had its share, to within the number of sources.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    /// For every source but the last.
    splits: Vec<Split>,
}

/// The share of one source, of what the sources before it leave. Both numbers are in units of 2⁻⁶⁴.
#[derive(Debug, Clone, Copy)]
struct Split {
    share: u64,
    offset: u64,
}

impl Split {
    /// How many of the first `samples` are the source's.
    fn count(self, samples: u64) -> u64 {
        let scaled = u128::from(samples) * u128::from(self.share) + u128::from(self.offset);
        (scaled >> 64) as u64
    }
}

impl Mixture {
    /// `weights` are positive and finite, and there is at least one.
    pub(super) fn new(weights: &[f64], seed: u64) -> Self {
        let mut random = generator(seed, STREAM);
        let split = |(index, weight): (usize, &f64)| {
            let rest: f64 = weights[index..].iter().sum();
            // The conversion saturates where all is the first one's.
            Split { share: (weight / rest * 2_f64.powi(64)) as u64, offset: random.next_u64() }
        };
        Self { splits: weights[..weights.len() - 1].iter().enumerate().map(split).collect() }
    }

    /// The source of a sample, and how many of its samples came before.
    pub(super) fn place(&self, sample: u64) -> (usize, u64) {
        let mut rest = sample;
        for (source, split) in self.splits.iter().enumerate() {
            let before = split.count(rest);
            if split.count(rest + 1) > before {
                return (source, before);
            }
            rest -= before;
        }
        (self.splits.len(), rest)
    }
}
