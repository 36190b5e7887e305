use super::*;
use crate::mesh::shard_range;

const NONE: i64 = IGNORED_LABEL;

/// Two sequences of six tokens `10·(sequence+1) + position`; the second sequence holds two documents.
fn two_sequences() -> GlobalBatch {
    let input_ids = (0..2).flat_map(|sequence| (0..6).map(move |at| 10 * (sequence + 1) + at)).collect();
    let position_ids = vec![0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3];
    GlobalBatch::new(2, 6, input_ids, Some(position_ids), None).unwrap()
}

#[test]
fn shards_differ_by_one_token_and_tile_the_sequence() {
    let lens: Vec<_> = (0..3).map(|rank| shard_range(64, 3, rank).len()).collect();
    assert_eq!(lens, [22, 21, 21]);
    for (seq_len, sp_size) in [(64, 3), (64, 4), (5, 5), (7, 2), (1, 1), (3, 8)] {
        let tiles: Vec<usize> = (0..sp_size).flat_map(|rank| shard_range(seq_len, sp_size, rank)).collect();
        assert_eq!(tiles, (0..seq_len).collect::<Vec<_>>());
        assert!(shard_range(seq_len, sp_size, sp_size).is_empty());
    }
    assert!(shard_range(8, 0, 0).is_empty());
}

#[test]
fn documents_and_labels_follow_from_positions() {
    let batch = two_sequences();
    assert_eq!(batch.cu_seqlens(), [vec![0, 6], vec![0, 2, 6]]);
    assert_eq!(batch.shift_labels(), [11, 12, 13, 14, 15, NONE, 21, NONE, 23, 24, 25, NONE]);
    // A document starts where a position is not its predecessor plus 1, also when it does not start at 0.
    let jumps = GlobalBatch::new(1, 6, vec![1; 6], Some(vec![5, 6, 8, 8, 9, 0]), None).unwrap();
    assert_eq!(jumps.cu_seqlens(), [[0, 2, 3, 5, 6]]);
    let wrap = GlobalBatch::new(1, 2, vec![1; 2], Some(vec![u32::MAX, 0]), None).unwrap();
    assert_eq!(wrap.cu_seqlens(), [[0, 1, 2]]);
}

#[test]
fn every_document_is_unpacked_into_a_padded_sequence() {
    let alone = two_sequences().unpacked().unwrap();
    assert_eq!((alone.batch_size(), alone.seq_len()), (3, 6));
    assert_eq!(alone.input_ids(), [10, 11, 12, 13, 14, 15, 20, 21, 0, 0, 0, 0, 22, 23, 24, 25, 0, 0]);
    assert_eq!(alone.position_ids()[6..], [0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]);
    assert_eq!(alone.shift_labels()[6..], [21, NONE, NONE, NONE, NONE, NONE, 23, 24, 25, NONE, NONE, NONE]);
    assert_eq!(alone.cu_seqlens(), [vec![0, 6], vec![0, 2, 6], vec![0, 4, 6]]);
    // A document that starts elsewhere than at 0 keeps its positions.
    let jump = GlobalBatch::new(1, 4, vec![1; 4], Some(vec![7, 8, 9, 3]), None).unwrap().unpacked().unwrap();
    assert_eq!(jump.position_ids(), [7, 8, 9, 3, 0, 1]);
}

#[test]
fn sequences_without_positions_are_single_documents_and_given_labels_are_kept() {
    let batch = GlobalBatch::new(2, 3, vec![1, 2, 3, 4, 5, 6], None, None).unwrap();
    assert_eq!(batch.position_ids(), [0, 1, 2, 0, 1, 2]);
    assert_eq!(batch.shift_labels(), [2, 3, NONE, 5, 6, NONE]);
    assert_eq!(batch.cu_seqlens(), [[0, 3], [0, 3]]);
    let labels = vec![7, NONE, 9];
    let batch = GlobalBatch::new(1, 3, vec![1, 2, 3], None, Some(labels.clone())).unwrap();
    assert_eq!(batch.shift_labels(), labels);
}

#[test]
fn a_micro_batch_is_a_block_of_sequences_and_tokens() {
    let middle = two_sequences().micro_batch(0..2, 4, 1).unwrap();
    // 6 tokens over 4 ranks: 2, 2, 1, 1.
    assert_eq!((middle.batch_size, middle.seq_len, middle.shard.clone()), (2, 6, (2..4).into()));
    assert_eq!(middle.seq_len_local(), 2);
    assert_eq!(middle.input_ids, [12, 13, 22, 23]);
    assert_eq!(
        middle.labels,
        [13, 14, 23, 24],
        "the second label of each sequence is the next shard's first token"
    );
    assert_eq!(middle.position_ids, [2, 3, 0, 1]);
    assert_eq!(*middle.cu_seqlens, [vec![0, 6], vec![0, 2, 6]], "of the whole sequences");
    let second_sequence = two_sequences().micro_batch(1..2, 3, 0).unwrap();
    assert_eq!((second_sequence.input_ids, second_sequence.labels), (vec![20, 21], vec![21, NONE]));
    assert_eq!(*second_sequence.cu_seqlens, [[0, 2, 6]]);
}

#[test]
fn concatenated_shards_equal_the_sequences() {
    let batch = two_sequences();
    for sp_size in 1..=6 {
        let shards: Vec<_> =
            (0..sp_size).map(|rank| batch.micro_batch(0..2, sp_size, rank).unwrap()).collect();
        for sequence in 0..2 {
            let side_by_side: Vec<_> = shards
                .iter()
                .flat_map(|shard| {
                    let tokens = sequence * shard.seq_len_local()..(sequence + 1) * shard.seq_len_local();
                    tokens.map(|at| (shard.input_ids[at], shard.labels[at], shard.position_ids[at]))
                })
                .collect();
            let whole: Vec<_> = (sequence * 6..(sequence + 1) * 6)
                .map(|at| (batch.input_ids()[at], batch.shift_labels()[at], batch.position_ids()[at]))
                .collect();
            assert_eq!(side_by_side, whole);
        }
        let valid: usize = shards.iter().map(MicroBatch::num_valid_tokens).sum();
        assert_eq!(valid, 9);
    }
}

#[test]
fn padding_sequences_are_fully_masked() {
    let mut batch = two_sequences();
    let before = batch.clone();
    assert_eq!(batch.pad_to_multiple(2).unwrap(), 0);
    assert_eq!(batch, before);
    assert_eq!(batch.pad_to_multiple(5).unwrap(), 3);
    assert_eq!(batch.batch_size(), 5);
    let padding = batch.micro_batch(2..5, 1, 0).unwrap();
    assert_eq!(padding.num_valid_tokens(), 0);
    assert_eq!(padding.input_ids, [0; 18]);
    assert_eq!(padding.position_ids, [0, 1, 2, 3, 4, 5].repeat(3));
    assert_eq!(*padding.cu_seqlens, [[0, 6]; 3]);
    assert_eq!(batch.micro_batch(0..2, 1, 0).unwrap(), before.micro_batch(0..2, 1, 0).unwrap());
    assert!(matches!(batch.pad_to_multiple(0), Err(DataError::Zero { .. })));
}

#[test]
fn tensors_of_wrong_length_are_named() {
    let make = |batch, seq_len, ids: usize, positions: Option<usize>, labels: Option<usize>| {
        let positions = positions.map(|len| vec![0; len]);
        GlobalBatch::new(batch, seq_len, vec![0; ids], positions, labels.map(|len| vec![0; len])).unwrap_err()
    };
    let wrong = |error: DataError| match error {
        DataError::WrongLength { tensor, found, .. } => (tensor, found),
        other => panic!("{other:?}"),
    };
    assert_eq!(wrong(make(2, 3, 5, None, None)), ("input_ids", 5));
    assert_eq!(wrong(make(2, 3, 6, Some(7), None)), ("position_ids", 7));
    assert_eq!(wrong(make(2, 3, 6, None, Some(3))), ("shift_labels", 3));
    assert_eq!(wrong(make(usize::MAX, 3, 6, None, None)), ("input_ids", 6), "the product overflows");
    assert!(matches!(make(0, 3, 0, None, None), DataError::NoSequences));
    assert!(matches!(make(2, 0, 0, None, None), DataError::InvalidSeqLen { seq_len: 0 }));
    assert_eq!(
        make(2, 3, 5, None, None).to_string(),
        "input_ids has 5 elements; [batch_size, seq_len] = [2, 3] takes 6"
    );
}

#[test]
fn invalid_shards_are_errors() {
    let batch = two_sequences();
    for sequences in [0..3, 1..1, 2..3] {
        let error = batch.micro_batch(sequences.clone(), 1, 0).unwrap_err();
        assert!(
            matches!(&error, DataError::SequencesOutOfRange { sequences: found, available: 2 } if *found == sequences)
        );
    }
    for (sp_size, sp_rank) in [(2, 2), (0, 0)] {
        let error = batch.micro_batch(0..1, sp_size, sp_rank).unwrap_err();
        assert!(matches!(error, DataError::RankOutOfRange { axis: "sp", .. }), "{error:?}");
    }
    let error = batch.micro_batch(0..1, 7, 0).unwrap_err();
    assert!(matches!(error, DataError::SeqLenBelowSp { seq_len: 6, sp_size: 7 }), "{error:?}");
}

#[test]
fn ids_outside_the_vocabulary_are_located() {
    let batch = two_sequences();
    batch.check_vocab(26).unwrap();
    let error = batch.check_vocab(23).unwrap_err();
    assert_eq!(error.to_string(), "token id 23 in sequence 1, position 3 is outside the vocabulary 0..23");
    for label in [-1, 30, i64::MIN] {
        let labels = vec![NONE, 29, label];
        let batch = GlobalBatch::new(1, 3, vec![0; 3], None, Some(labels)).unwrap();
        let error = batch.check_vocab(30).unwrap_err();
        let DataError::LabelOutOfVocab { sequence, position, label: found, .. } = error else {
            panic!("{error:?}")
        };
        assert_eq!((sequence, position, found), (0, 2, label));
    }
}

#[test]
fn values_are_sharded_and_hashed_with_their_tokens() {
    // 100·sequence + 10·position + column.
    let values: Vec<f32> = (0..2)
        .flat_map(|sequence| {
            (0..6).flat_map(move |at| (0..3).map(move |column| (100 * sequence + 10 * at + column) as f32))
        })
        .collect();
    let with_values = |values| GlobalBatch::without_ids(2, 6).unwrap().with_values("x", 3, values);
    let batch = with_values(values.clone()).unwrap();
    let part = batch.micro_batch(1..2, 4, 1).unwrap();
    assert_eq!(part.values["x"], [120.0, 121.0, 122.0, 130.0, 131.0, 132.0]);
    assert_eq!((part.num_valid_tokens(), part.input_ids.len()), (2, 2));
    let mut padded = batch.clone();
    padded.pad_to_multiple(4).unwrap();
    let padding = padded.micro_batch(3..4, 1, 0).unwrap();
    assert_eq!((&padding.values["x"][..], padding.num_valid_tokens()), (&[0.0; 18][..], 0));
    let mut other = values.clone();
    other[17] += 1.0;
    let other = with_values(other).unwrap();
    let hashes = |sequences: std::ops::Range<usize>| {
        [&batch, &other].map(|batch| batch.micro_batch(sequences.clone(), 1, 0).unwrap().batch_hash)
    };
    let ([first, first_of_other], [second, second_of_other]) = (hashes(0..1), hashes(1..2));
    assert!(first != first_of_other && second == second_of_other);
    for (width, len) in [(3, 35), (3, 37), (0, 36), (2, 36)] {
        let error =
            GlobalBatch::without_ids(2, 6).unwrap().with_values("x", width, vec![0.0; len]).unwrap_err();
        assert!(error.to_string().starts_with(&format!("\"x\" has {len} values")), "{error}");
    }
    for (batch_size, seq_len) in [(0, 2), (2, 0), (usize::MAX, 2), (1 << 31, u32::MAX as usize)] {
        assert!(GlobalBatch::without_ids(batch_size, seq_len).is_err(), "{batch_size} x {seq_len}");
    }
}
