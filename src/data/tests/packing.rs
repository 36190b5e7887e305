use super::*;

const NONE: i64 = IGNORED_LABEL;

#[test]
fn sequences_cut_documents_and_look_one_token_ahead() {
    // Documents of 3, 6 and 2 tokens over sequences of 4: the second one is cut twice, the last sequence is padded.
    let sequences = packed(&[3, 6, 2], 4);
    assert_eq!(sequences.num_sequences(), 3);
    let expected = [
        PackedSequence {
            input_ids: vec![1000, 1001, 1002, 2000],
            shift_labels: vec![1001, 1002, NONE, 2001],
            position_ids: vec![0, 1, 2, 0],
            cu_seqlens: vec![0, 3, 4],
        },
        PackedSequence {
            input_ids: vec![2001, 2002, 2003, 2004],
            shift_labels: vec![2002, 2003, 2004, 2005],
            position_ids: vec![0, 1, 2, 3],
            cu_seqlens: vec![0, 4],
        },
        PackedSequence {
            input_ids: vec![2005, 3000, 3001, 0],
            shift_labels: vec![NONE, 3001, NONE, NONE],
            position_ids: vec![0, 0, 1, 0],
            cu_seqlens: vec![0, 1, 3, 4],
        },
    ];
    for (index, expected) in expected.into_iter().enumerate() {
        assert_eq!(sequences.sequence(index).unwrap(), expected, "sequence {index}");
    }
}

#[test]
fn a_document_that_ends_with_the_sequence_has_no_label_there() {
    let sequences = packed(&[4, 4], 4);
    assert_eq!(sequences.num_sequences(), 2, "no sequence of padding alone");
    assert_eq!(sequences.sequence(0).unwrap().shift_labels, [1001, 1002, 1003, NONE]);
    assert_eq!(sequences.sequence(1).unwrap().cu_seqlens, [0, 4]);
}

#[test]
fn a_corpus_shorter_than_a_sequence_is_one_padded_sequence() {
    let sequence = packed(&[2], 5).sequence(0).unwrap();
    assert_eq!(sequence.input_ids, [1000, 1001, 0, 0, 0]);
    assert_eq!(sequence.shift_labels, [1001, NONE, NONE, NONE, NONE]);
    assert_eq!(sequence.position_ids, [0, 1, 0, 1, 2]);
    assert_eq!(sequence.cu_seqlens, [0, 2, 5]);
}

#[test]
fn every_token_is_in_one_sequence_and_every_successor_is_a_label_once() {
    let lens = [1, 7, 2, 1, 19, 4, 3];
    for seq_len in 1..=40 {
        let sequences = packed(&lens, seq_len);
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        for index in 0..sequences.num_sequences() {
            let sequence = sequences.sequence(index).unwrap();
            assert_eq!(sequence.input_ids.len(), seq_len);
            let stated =
                GlobalBatch::new(1, seq_len, sequence.input_ids.clone(), Some(sequence.position_ids), None);
            assert_eq!(
                stated.unwrap().cu_seqlens()[0],
                sequence.cu_seqlens,
                "bounds follow from the positions"
            );
            tokens.extend(sequence.input_ids);
            labels.extend(sequence.shift_labels);
        }
        let total: usize = lens.iter().sum();
        assert_eq!(tokens[..total], corpus::tokens_of(sequences.corpus()).concat());
        assert!(tokens.len() - total < seq_len && tokens[total..].iter().all(|&token| token == 0));
        // A label is its token plus 1, in the same document, and only the last tokens of documents have none.
        for (&token, &label) in tokens.iter().zip(&labels) {
            let is_last =
                lens.iter().enumerate().any(|(index, len)| document(index, *len).last() == Some(&token));
            let expected = if token == 0 || is_last { NONE } else { i64::from(token) + 1 };
            assert_eq!(label, expected, "token {token}, seq_len {seq_len}");
        }
    }
}

#[test]
fn invalid_sequences_are_errors() {
    for seq_len in [0, 1 << 32] {
        let error = PackedSequences::new(documents(&[3]), seq_len).unwrap_err();
        assert!(
            matches!(error, DataError::InvalidSeqLen { seq_len: found } if found == seq_len),
            "{error:?}"
        );
    }
    let sequences = packed(&[3, 6, 2], 4);
    for index in [3, usize::MAX] {
        let error = sequences.sequence(index).unwrap_err();
        assert!(matches!(error, DataError::SequencesOutOfRange { available: 3, .. }), "{error:?}");
    }
}

#[test]
fn concat_attends_and_predicts_across_document_bounds() {
    let sequences = PackedSequences::with_packing(documents(&[3, 6, 2]), 4, Packing::Concat).unwrap();
    let expected = [
        PackedSequence {
            input_ids: vec![1000, 1001, 1002, 2000],
            shift_labels: vec![1001, 1002, 2000, 2001],
            position_ids: vec![0, 1, 2, 3],
            cu_seqlens: vec![0, 4],
        },
        PackedSequence {
            input_ids: vec![2001, 2002, 2003, 2004],
            shift_labels: vec![2002, 2003, 2004, 2005],
            position_ids: vec![0, 1, 2, 3],
            cu_seqlens: vec![0, 4],
        },
        PackedSequence {
            input_ids: vec![2005, 3000, 3001, 0],
            shift_labels: vec![3000, 3001, NONE, NONE],
            position_ids: vec![0, 1, 2, 0],
            cu_seqlens: vec![0, 3, 4],
        },
    ];
    for (index, expected) in expected.into_iter().enumerate() {
        assert_eq!(sequences.sequence(index).unwrap(), expected, "sequence {index}");
    }
    assert_eq!(sequences.num_predicted_tokens(), 10);
}

#[test]
fn one_document_gives_the_same_sequences_with_every_packing() {
    for len in 1..=33 {
        let [greedy, cut, concat] = [Packing::Greedy, Packing::Cut, Packing::Concat]
            .map(|packing| PackedSequences::with_packing(documents(&[len]), 8, packing).unwrap());
        assert_eq!(
            (greedy.num_sequences(), concat.num_sequences()),
            (cut.num_sequences(), cut.num_sequences())
        );
        for sequence in 0..cut.num_sequences() {
            assert_eq!(
                greedy.sequence(sequence).unwrap(),
                cut.sequence(sequence).unwrap(),
                "sequence {sequence} of {len} tokens"
            );
            assert_eq!(
                concat.sequence(sequence).unwrap(),
                cut.sequence(sequence).unwrap(),
                "sequence {sequence} of {len} tokens"
            );
        }
    }
}

#[test]
fn the_padding_share_is_the_share_of_padding_tokens() {
    for packing in [Packing::Greedy, Packing::Cut, Packing::Concat] {
        let sequences = PackedSequences::with_packing(documents(&[5, 3, 4, 7]), 8, packing).unwrap();
        let padding = |sequence| {
            sequences.sequence(sequence).unwrap().input_ids.iter().filter(|&&token| token == 0).count()
        };
        let padding: usize = (0..sequences.num_sequences()).map(padding).sum();
        assert_eq!(
            sequences.padding_share(),
            padding as f64 / (8 * sequences.num_sequences()) as f64,
            "{packing:?}"
        );
    }
}
