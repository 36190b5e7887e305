//! The order in which sequences are seen.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The order of the sequences in an epoch: a permutation of `0..num_sequences` that depends on nothing but the arguments.
///
/// Fisher–Yates from the last sequence down: sequence `last` changes places with sequence `⌊x·(last+1) / 2⁶⁴⌋`, where the x are
/// the 64-bit outputs of ChaCha8 with the seed (little-endian, then zeros) as its key and the epoch as its
/// stream. It is written out here because `rand`'s shuffle may change between releases, and a run must resume
/// in the order it began with.
pub fn epoch_order(seed: u64, epoch: u64, num_sequences: usize) -> Vec<usize> {
    let mut random = generator(seed, epoch);
    let mut order: Vec<usize> = (0..num_sequences).collect();
    for last in (1..num_sequences).rev() {
        let scaled = u128::from(random.next_u64()) * (last as u128 + 1);
        order.swap(last, (scaled >> 64) as usize);
    }
    order
}

/// What everything random about the order of the data comes from.
pub(super) fn generator(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    random.set_stream(stream);
    random
}
