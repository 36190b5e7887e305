//! The order in which rows are seen.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The order of the rows in an epoch: a permutation of `0..num_rows` that depends on nothing but the arguments.
///
/// Fisher–Yates from the last row down: row `last` changes places with row `⌊x·(last+1) / 2⁶⁴⌋`, where the x are
/// the 64-bit outputs of ChaCha8 with the seed (little-endian, then zeros) as its key and the epoch as its
/// stream. It is written out here because `rand`'s shuffle may change between releases, and a run must resume
/// in the order it began with.
pub fn epoch_order(seed: u64, epoch: u64, num_rows: usize) -> Vec<usize> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    random.set_stream(epoch);
    let mut order: Vec<usize> = (0..num_rows).collect();
    for last in (1..num_rows).rev() {
        let scaled = u128::from(random.next_u64()) * (last as u128 + 1);
        order.swap(last, (scaled >> 64) as usize);
    }
    order
}

/// The endless sequence of samples: the rows of epoch 0, then those of epoch 1, and so on.
#[derive(Debug, Clone)]
pub(super) struct SampleOrder {
    seed: u64,
    num_rows: usize,
    /// The epoch looked at last: a rank's samples ascend, so each epoch is ordered once.
    epoch: u64,
    rows: Vec<usize>,
}

impl SampleOrder {
    /// `num_rows` must not be 0.
    pub(super) fn new(seed: u64, num_rows: usize) -> Self {
        Self { seed, num_rows, epoch: 0, rows: epoch_order(seed, 0, num_rows) }
    }

    /// The row that a sample is.
    pub(super) fn row(&mut self, sample: u64) -> usize {
        let epoch = self.epoch_of(sample);
        if epoch != self.epoch {
            self.epoch = epoch;
            self.rows = epoch_order(self.seed, epoch, self.num_rows);
        }
        self.rows[(sample % self.num_rows as u64) as usize]
    }

    pub(super) fn epoch_of(&self, sample: u64) -> u64 {
        sample / self.num_rows as u64
    }
}
