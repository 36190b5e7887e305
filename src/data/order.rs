//! The order of sequences in an epoch.

use super::DataError;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Returns the order of the sequences in an epoch: a permutation of `0..num_sequences` that depends only on the arguments.
///
/// Fisher–Yates from the last sequence down: sequence `last` is swapped with sequence `⌊x·(last+1) / 2⁶⁴⌋`, where the x
/// are the 64-bit outputs of ChaCha8 with the seed (little-endian, then zeros) as key and the epoch as stream. It is
/// implemented here because `rand`'s shuffle may change between releases, and a run must resume in its original order.
pub fn epoch_order(seed: u64, epoch: u64, num_sequences: u32) -> Vec<u32> {
    let mut random = generator(seed, epoch);
    let mut order: Vec<u32> = (0..num_sequences).collect();
    for last in (1..num_sequences).rev() {
        let scaled = u128::from(random.next_u64()) * (u128::from(last) + 1);
        order.swap(last as usize, (scaled >> 64) as usize);
    }
    order
}

/// Returns a number of documents or sequences as one that an order can have.
///
/// # Errors
/// A number that exceeds 32 bits.
pub(super) fn ordered(what: &'static str, count: usize) -> Result<u32, DataError> {
    u32::try_from(count).map_err(|_| DataError::TooManyToOrder { what, count })
}

/// Returns the random generator of the data order.
pub(super) fn generator(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    random.set_stream(stream);
    random
}
