//! Interleaves sources by weight.

use super::order::generator;
use rand_chacha::rand_core::RngCore;

/// The random stream of mixtures; streams from 0 on are those of epochs.
const STREAM: u64 = u64::MAX;

/// A sample of a mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MixedSample {
    pub(super) source: usize,
    /// Number of the source's previous samples.
    pub(super) number: u64,
}

/// Assigns a source to each sample of an endless mixture.
///
/// A chain of two-way splits: the first source gets its share of all samples, evenly spaced from a random offset, the
/// second one its share of the rest, and so on. The source of a sample is therefore computed without the previous
/// samples, and after any number of samples every source has had its share, to within the number of sources.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    /// For every source but the last.
    splits: Vec<Split>,
}

/// The share of one source in the samples that the previous sources leave. Both numbers are in units of 2⁻⁶⁴.
#[derive(Debug, Clone, Copy)]
struct Split {
    share: u64,
    offset: u64,
}

impl Split {
    /// Returns how many of the first `samples` samples are from the source.
    fn count(self, samples: u64) -> u64 {
        let scaled = u128::from(samples) * u128::from(self.share) + u128::from(self.offset);
        (scaled >> 64) as u64
    }
}

impl Mixture {
    /// Creates a mixture. `weights` must be positive, finite and not empty.
    pub(super) fn new(weights: &[f64], seed: u64) -> Self {
        let mut random = generator(seed, STREAM);
        let split = |(index, weight): (usize, &f64)| {
            let rest: f64 = weights[index..].iter().sum();
            // The conversion saturates if the share is 1.
            Split { share: (weight / rest * 2_f64.powi(64)) as u64, offset: random.next_u64() }
        };
        Self { splits: weights[..weights.len() - 1].iter().enumerate().map(split).collect() }
    }

    /// Returns which sample of which source a sample is.
    pub(super) fn locate(&self, sample: u64) -> MixedSample {
        let mut rest = sample;
        for (source, split) in self.splits.iter().enumerate() {
            let before = split.count(rest);
            if split.count(rest + 1) > before {
                return MixedSample { source, number: before };
            }
            rest -= before;
        }
        MixedSample { source: self.splits.len(), number: rest }
    }
}
