//! The parts and heads that the blocks of fused attention compute, and where their rows lie.

use super::super::{launch, words};
use crate::device::sources;
use crate::tensor::to_vec;
use crate::testing::on_a_gpu;

#[test]
fn every_part_of_every_head_has_one_block_and_heads_alternate_if_they_have_few() {
    on_a_gpu(|| {
        // Groups of 6, 3, 1, 1 and 264 heads; the last group is smaller in the first two.
        for (parts, kv_heads, together) in [(50, 8, 6), (128, 8, 3), (264, 3, 1), (300, 2, 1), (1, 5, 5)] {
            let blocks = (parts * kv_heads) as usize;
            let places = words(vec![u32::MAX; 2 * blocks]);
            let kernel = (&sources::tests::MMA, "test_block_place");
            launch(kernel, [1, 1, 0], &places, &[], &[parts, kv_heads]).unwrap();
            let places: Vec<u32> = to_vec(&places).unwrap();
            let mut found: Vec<(u32, u32)> = places.chunks(2).map(|place| (place[1], place[0])).collect();
            let first: Vec<_> = (0..together).map(|head| (head, 0)).collect();
            assert_eq!(found[..together as usize], first, "{parts} parts of {kv_heads} heads");
            found.sort_unstable();
            let all: Vec<_> =
                (0..kv_heads).flat_map(|head| (0..parts).map(move |part| (head, part))).collect();
            assert_eq!(found, all, "{parts} parts of {kv_heads} heads");
        }
    });
}

#[test]
fn rows_beyond_two_to_the_32_elements_have_64_bit_offsets() {
    on_a_gpu(|| {
        // Of 8 heads of 128 elements and 4 KV heads, each with 2 of the heads: heads 0 and 5 are those of the first.
        let (tokens, heads) = (1 << 30, words(vec![0, 5]));
        let (row, key) = ((1 << 27) + 1, (1 << 26) + 3);
        let offsets = words(vec![0; 10]);
        launch((&sources::tests::MMA, "test_offsets"), [1, 1, 0], &offsets, &[&heads], &[tokens, row, key])
            .unwrap();
        let words: Vec<u32> = to_vec(&offsets).unwrap();
        let found: Vec<u64> =
            words.chunks(2).map(|word| u64::from(word[0]) | u64::from(word[1]) << 32).collect();
        let token = u64::from(row) / 2;
        let (packed, key) = ((token * 8 + 5) * 128, u64::from(key) * 4 * 128);
        assert_eq!(found, [packed, packed, 5 * u64::from(tokens) + token, key, key]);
    });
}
