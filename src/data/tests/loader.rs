use super::*;
use crate::data::sample_order::EpochOrder;
use crate::mesh::{DeviceMesh, MeshError};
use std::sync::Arc;

const SEQ_LEN: usize = 6;
const SEED: u64 = 7;

/// 11 sequences, the last one padded, with documents that cross sequences.
fn eleven_sequences() -> Arc<PackedSequences> {
    let sequences = packed(&[9, 1, 14, 3, 20, 8, 9], SEQ_LEN);
    assert_eq!(sequences.num_sequences(), 11);
    Arc::new(sequences)
}

fn loader(
    sequences: &Arc<PackedSequences>,
    mesh: &DeviceMesh,
    rank: usize,
    accumulation: usize,
) -> DataLoader {
    let rank = DataRank::on_mesh(mesh, rank).unwrap();
    let micro_batch = 4 / (accumulation * rank.dp_size);
    let options = LoaderOptions { seed: SEED, micro_batch, accumulation, rank };
    DataLoader::new(sequences.clone(), options).unwrap()
}

/// The sequences of `num_steps` steps of 4 samples, in global order, put together from what all ranks receive.
fn assembled(
    sequences: &Arc<PackedSequences>,
    dp: usize,
    sp: usize,
    accumulation: usize,
    num_steps: usize,
) -> Vec<PackedSequence> {
    let mesh = DeviceMesh::dp_sp(dp, sp).unwrap();
    let mut loaders: Vec<_> = (0..dp * sp).map(|rank| loader(sequences, &mesh, rank, accumulation)).collect();
    let mut assembled = Vec::new();
    for _ in 0..num_steps * accumulation {
        let parts: Vec<_> = loaders.iter_mut().map(|loader| loader.next_micro_batch().unwrap()).collect();
        for shards in parts.chunks(sp) {
            assembled.extend((0..shards[0].batch_size).map(|sequence| whole_sequence(shards, sequence)));
        }
    }
    for loader in &loaders {
        assert_eq!((loader.train_batch_size(), loader.samples_consumed()), (4, 4 * num_steps as u64));
    }
    assembled
}

fn whole_sequence(shards: &[MicroBatch], sequence: usize) -> PackedSequence {
    fn join<T: Copy>(shards: &[MicroBatch], sequence: usize, field: impl Fn(&MicroBatch) -> &[T]) -> Vec<T> {
        let cut = |shard| field(shard).chunks(shard.seq_len_local()).nth(sequence).unwrap();
        shards.iter().flat_map(|shard| cut(shard).iter().copied()).collect()
    }
    assert!(shards.iter().all(|shard| shard.cu_seqlens == shards[0].cu_seqlens));
    PackedSequence {
        input_ids: join(shards, sequence, |shard| &shard.input_ids),
        shift_labels: join(shards, sequence, |shard| &shard.labels),
        position_ids: join(shards, sequence, |shard| &shard.position_ids),
        cu_seqlens: shards[0].cu_seqlens[sequence].clone(),
    }
}

fn order_of_eleven(epoch: u64) -> Vec<usize> {
    epoch_order(SEED, epoch, 11).into_iter().map(|sequence| sequence as usize).collect()
}

#[test]
fn every_mesh_sees_the_same_sequences_in_the_same_order() {
    let sequences = eleven_sequences();
    // 8 steps of 4 samples cross two epoch boundaries in the middle of a step.
    let order: Vec<usize> = (0..3).flat_map(order_of_eleven).take(32).collect();
    let expected: Vec<_> = order.into_iter().map(|sequence| sequences.sequence(sequence).unwrap()).collect();
    for (dp, sp, accumulation) in
        [(1, 1, 1), (1, 1, 4), (2, 1, 1), (2, 1, 2), (4, 1, 1), (1, 4, 2), (2, 2, 2), (2, 5, 1), (4, 6, 1)]
    {
        assert_eq!(
            assembled(&sequences, dp, sp, accumulation, 8),
            expected,
            "dp {dp} sp {sp} acc {accumulation}"
        );
    }
}

#[test]
fn an_epoch_sees_every_token_of_every_document_once() {
    let sequences = eleven_sequences();
    let seen = assembled(&sequences, 2, 3, 2, 11);
    for epoch in seen.chunks(11) {
        let mut tokens: Vec<u32> = epoch.iter().flat_map(|sequence| sequence.input_ids.clone()).collect();
        tokens.retain(|&token| token != 0);
        tokens.sort_unstable();
        // Tokens ascend through the corpus.
        assert_eq!(tokens, corpus::tokens_of(sequences.corpus()).concat());
    }
}

#[test]
fn ranks_take_contiguous_sequences_of_each_micro_step() {
    let sequences = eleven_sequences();
    let order = order_of_eleven(0);
    let options = |dp_rank| LoaderOptions {
        seed: SEED,
        micro_batch: 2,
        accumulation: 2,
        rank: DataRank { dp_size: 2, dp_rank, ..DataRank::single() },
    };
    for dp_rank in 0..2 {
        let mut loader = DataLoader::new(sequences.clone(), options(dp_rank)).unwrap();
        for accumulation_step in 0..2 {
            let first = (accumulation_step * 2 + dp_rank) * 2;
            let expected: Vec<u32> = order[first..first + 2]
                .iter()
                .flat_map(|&sequence| sequences.sequence(sequence).unwrap().input_ids)
                .collect();
            assert_eq!(loader.next_micro_batch().unwrap().input_ids, expected);
        }
        assert_eq!(loader.samples_consumed(), 8);
    }
}

#[test]
fn a_loader_resumes_on_another_mesh_where_it_stopped() {
    let sequences = eleven_sequences();
    let uninterrupted = assembled(&sequences, 1, 1, 1, 6);
    let mut seen = assembled(&sequences, 2, 2, 1, 3);
    let mut resumed = loader(&sequences, &DeviceMesh::dp_sp(1, 1).unwrap(), 0, 2);
    resumed.next_micro_batch().unwrap();
    resumed.set_samples_consumed(12);
    assert_eq!(resumed.epoch(), 1);
    for _ in 0..6 {
        let part = resumed.next_micro_batch().unwrap();
        seen.extend(
            (0..part.batch_size).map(|sequence| whole_sequence(std::slice::from_ref(&part), sequence)),
        );
    }
    assert_eq!(seen, uninterrupted);
}

#[test]
fn sequences_that_fill_the_last_batch_are_not_counted_as_consumed() {
    let sequences = eleven_sequences();
    let mut loader = loader(&sequences, &DeviceMesh::dp_sp(1, 1).unwrap(), 0, 1).ending_at(11);
    assert_eq!(loader.steps_left(), Some(3));
    for _ in 0..3 {
        loader.next_micro_batch().unwrap();
    }
    assert_eq!((loader.samples_consumed(), loader.steps_left()), (11, Some(0)));
    // As a run that is resumed for a second epoch does.
    let mut resumed = loader.ending_at(22);
    assert_eq!(resumed.steps_left(), Some(3));
    let part = resumed.next_micro_batch().unwrap();
    let second_epoch = order_of_eleven(1);
    for (sequence, &expected) in second_epoch[..4].iter().enumerate() {
        assert_eq!(
            whole_sequence(std::slice::from_ref(&part), sequence),
            sequences.sequence(expected).unwrap()
        );
    }
}

#[test]
fn a_micro_batch_may_be_larger_than_the_corpus() {
    let sequences = Arc::new(packed(&[5], 4));
    let options = LoaderOptions { seed: 0, micro_batch: 5, accumulation: 1, rank: DataRank::single() };
    let mut loader = DataLoader::new(sequences, options).unwrap();
    let batch = loader.next_micro_batch().unwrap();
    let firsts: Vec<u32> = batch.input_ids.chunks(4).map(|sequence| sequence[0]).collect();
    for epoch in firsts.chunks_exact(2) {
        assert_eq!(epoch.iter().sum::<u32>(), 1000 + 1004, "both sequences: {firsts:?}");
    }
    assert_eq!((loader.epoch(), loader.samples_consumed()), (2, 5));
}

#[test]
fn more_sequences_than_an_epoch_can_order_are_an_error() {
    let error = EpochOrder::new(0, 1 << 32).unwrap_err().to_string();
    assert!(error.contains("4294967296 sequences") && error.contains("`seq_len`"), "{error}");
}

#[test]
fn the_order_is_pinned_and_depends_on_seed_and_epoch() {
    // Computed by another implementation of ChaCha8. A changed order would break every run that resumes.
    assert_eq!(epoch_order(0, 0, 8), [3, 2, 7, 5, 0, 1, 4, 6]);
    assert_eq!(epoch_order(1, 2, 8), [4, 6, 5, 7, 1, 2, 0, 3]);
    let orders = [epoch_order(0, 0, 100), epoch_order(0, 1, 100), epoch_order(1, 0, 100)];
    for (index, order) in orders.iter().enumerate() {
        assert!(!orders[..index].contains(order));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }
    assert!(epoch_order(0, 0, 0).is_empty());
}

#[test]
fn every_sequence_reaches_every_position_about_equally_often() {
    let mut counts = [[0_u32; 4]; 4];
    for epoch in 0..4000 {
        for (place, sequence) in epoch_order(3, epoch, 4).into_iter().enumerate() {
            counts[place][sequence as usize] += 1;
        }
    }
    // 1000 expected, standard deviation 27.
    assert!(counts.iter().flatten().all(|count| count.abs_diff(1000) < 150), "{counts:?}");
}

#[test]
fn placement_comes_from_the_mesh() {
    let mesh = DeviceMesh::new(&[("dp", 2), ("tp", 2), ("sp", 3)], None).unwrap();
    let expected = DataRank { dp_size: 2, dp_rank: 1, sharding: 3.into(), sp_rank: 2 };
    assert_eq!(DataRank::on_mesh(&mesh, 8).unwrap(), expected);
    assert_eq!(DataRank::on_mesh(&mesh, 11).unwrap(), expected, "tp peers see the same data");
    let only_tp = DeviceMesh::new(&[("tp", 2)], None).unwrap();
    assert_eq!(DataRank::on_mesh(&only_tp, 1).unwrap(), DataRank::single());
    for mesh in [&mesh, &only_tp] {
        let error = DataRank::on_mesh(mesh, 12).unwrap_err();
        assert!(matches!(error, DataError::Mesh(MeshError::NotAMember { rank: 12, .. })), "{error:?}");
    }
}

#[test]
fn invalid_loaders_are_errors() {
    let good = LoaderOptions { seed: 0, micro_batch: 1, accumulation: 1, rank: DataRank::single() };
    let fail = |options| DataLoader::new(eleven_sequences(), options).unwrap_err();
    assert!(matches!(
        fail(LoaderOptions { micro_batch: 0, ..good }),
        DataError::Zero { name: "micro_batch" }
    ));
    assert!(matches!(
        fail(LoaderOptions { accumulation: 0, ..good }),
        DataError::Zero { name: "accumulation" }
    ));
    let huge = fail(LoaderOptions { micro_batch: usize::MAX, accumulation: 2, ..good });
    assert!(matches!(huge, DataError::BatchTooLarge { .. }), "{huge:?}");
    let placed = |dp_size, dp_rank, sp_size: usize, sp_rank| {
        let rank = DataRank { dp_size, dp_rank, sharding: sp_size.into(), sp_rank };
        fail(LoaderOptions { rank, ..good })
    };
    assert!(matches!(placed(2, 2, 1, 0), DataError::RankOutOfRange { axis: "dp", rank: 2, size: 2 }));
    assert!(matches!(placed(1, 0, 2, 3), DataError::RankOutOfRange { axis: "sp", rank: 3, size: 2 }));
    assert!(matches!(placed(0, 0, 1, 0), DataError::RankOutOfRange { axis: "dp", .. }));
    assert!(matches!(placed(1, 0, 7, 0), DataError::SeqLenBelowSp { seq_len: SEQ_LEN, sp_size: 7 }));
    let mut loader = DataLoader::new(eleven_sequences(), good).unwrap();
    loader.set_samples_consumed(u64::MAX);
    assert!(matches!(loader.next_micro_batch(), Err(DataError::CursorOverflow { .. })));
    loader.set_samples_consumed(u64::MAX - 1);
    loader.next_micro_batch().unwrap();
}
