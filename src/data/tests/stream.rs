//! The stream of samples does not know the mesh: whatever the packing, the sources and where a run is resumed.

use super::*;
use crate::mesh::DeviceMesh;

const SEQ_LEN: usize = 12;
const TRAIN_BATCH: usize = 8;
const STEPS: usize = 9;

fn datasets() -> Vec<(&'static str, Dataset)> {
    let lens = |seed: usize| (0..24).map(|index| 1 + (index * 7 + seed) % 31).collect::<Vec<_>>();
    let pack =
        |seed, packing| PackedSequences::with_packing(documents(&lens(seed)), SEQ_LEN, packing).unwrap();
    let two = |packing| [pack(1, packing), pack(2, packing)];
    let weighted = two(Packing::Greedy).into_iter().zip([1.0, 2.5]);
    vec![
        ("greedy", Dataset::concatenated([pack(0, Packing::Greedy)]).unwrap()),
        ("cut", Dataset::concatenated([pack(0, Packing::Cut)]).unwrap()),
        ("concat", Dataset::concatenated([pack(0, Packing::Concat)]).unwrap()),
        ("two sources", Dataset::concatenated(two(Packing::Greedy)).unwrap()),
        ("weighted", Dataset::mixture(weighted).unwrap()),
    ]
}

/// Hash of every token, label, position and border of the steps `steps`, in global order, as the ranks of a mesh get
/// them; resumed at the first of them.
fn stream_hash(data: &Dataset, dp: usize, sp: usize, accumulation: usize, steps: &[usize]) -> Vec<String> {
    let mesh = DeviceMesh::dp_sp(dp, sp).unwrap();
    let loader = |rank| {
        let rank = DataRank::on_mesh(&mesh, rank).unwrap();
        let micro_batch = TRAIN_BATCH / (dp * accumulation);
        let options = LoaderOptions { seed: 5, micro_batch, accumulation, rank };
        // Ends in the middle of the last step.
        let end = (STEPS * TRAIN_BATCH - 3) as u64;
        let mut loader = DataLoader::new(data.clone(), options).unwrap().ending_at(end);
        loader.set_samples_consumed((steps[0] * TRAIN_BATCH) as u64);
        ReadAhead::new(loader)
    };
    let mut loaders: Vec<_> = (0..dp * sp).map(loader).collect();
    let mut hashes = Vec::new();
    for _ in steps {
        let mut hasher = blake3::Hasher::new();
        for _ in 0..accumulation {
            let parts: Vec<_> = loaders.iter_mut().map(|loader| loader.next_micro_batch().unwrap()).collect();
            for shards in parts.chunks(sp) {
                assert!(shards.iter().all(|shard| shard.batch_hash == shards[0].batch_hash));
                for sequence in 0..shards[0].batch_size {
                    hash_sequence(&mut hasher, shards, sequence);
                }
            }
        }
        hashes.push(hasher.finalize().to_hex().to_string());
    }
    hashes
}

fn hash_sequence(hasher: &mut blake3::Hasher, shards: &[MicroBatch], sequence: usize) {
    for shard in shards {
        for at in sequence * shard.seq_len_local()..(sequence + 1) * shard.seq_len_local() {
            hasher.update(&shard.input_ids[at].to_le_bytes());
            hasher.update(&shard.labels[at].to_le_bytes());
            hasher.update(&shard.position_ids[at].to_le_bytes());
        }
    }
    shards[0].cu_seqlens[sequence].iter().for_each(|bound| {
        hasher.update(&bound.to_le_bytes());
    });
}

#[test]
fn dp_1_2_and_4_see_the_same_stream_before_and_after_a_resume() {
    let all: Vec<usize> = (0..STEPS).collect();
    for (name, data) in datasets() {
        let expected = stream_hash(&data, 1, 1, 1, &all);
        assert!(data.num_sequences() < STEPS * TRAIN_BATCH, "{name}: the stream takes more than an epoch");
        for (dp, sp, accumulation) in [(1, 1, 8), (2, 1, 1), (2, 3, 2), (4, 1, 2), (4, 2, 1), (1, 4, 1)] {
            let label = format!("{name}: dp {dp} sp {sp} accumulation {accumulation}");
            assert_eq!(stream_hash(&data, dp, sp, accumulation, &all), expected, "{label}");
            let resumed = stream_hash(&data, dp, sp, accumulation, &all[4..]);
            assert_eq!(resumed, expected[4..], "{label}, resumed");
        }
    }
}

#[test]
fn ranks_with_different_sequences_have_different_hashes() {
    let (_, data) = datasets().swap_remove(0);
    let batch = |seed, sp_rank| {
        let rank = DataRank { sharding: 2.into(), sp_rank, ..DataRank::single() };
        let options = LoaderOptions { seed, micro_batch: 2, accumulation: 1, rank };
        DataLoader::new(data.clone(), options).unwrap().next_micro_batch().unwrap().batch_hash
    };
    assert_eq!(batch(1, 0), batch(1, 1));
    assert_ne!(batch(1, 0), batch(2, 1));
}
