use super::*;
use rand_chacha::rand_core::RngCore;

const NONE: i64 = IGNORED_LABEL;

fn greedy(lens: &[usize], seq_len: usize) -> PackedSequences {
    PackedSequences::with_packing(documents(lens), seq_len, Packing::Greedy).unwrap()
}

#[test]
fn documents_that_fit_are_whole_and_long_ones_fill_their_own_sequences() {
    // The third document fills two sequences of 4; its last 2 tokens share a sequence with the first document of 2.
    let sequences = greedy(&[3, 2, 10, 1], 4);
    let expected = [
        PackedSequence {
            input_ids: vec![3000, 3001, 3002, 3003],
            shift_labels: vec![3001, 3002, 3003, 3004],
            position_ids: vec![0, 1, 2, 3],
            cu_seqlens: vec![0, 4],
        },
        PackedSequence {
            input_ids: vec![3004, 3005, 3006, 3007],
            shift_labels: vec![3005, 3006, 3007, 3008],
            position_ids: vec![0, 1, 2, 3],
            cu_seqlens: vec![0, 4],
        },
        PackedSequence {
            input_ids: vec![1000, 1001, 1002, 4000],
            shift_labels: vec![1001, 1002, NONE, NONE],
            position_ids: vec![0, 1, 2, 0],
            cu_seqlens: vec![0, 3, 4],
        },
        PackedSequence {
            input_ids: vec![2000, 2001, 3008, 3009],
            shift_labels: vec![2001, NONE, 3009, NONE],
            position_ids: vec![0, 1, 0, 1],
            cu_seqlens: vec![0, 2, 4],
        },
    ];
    assert_eq!(sequences.num_sequences(), 4);
    for (index, expected) in expected.into_iter().enumerate() {
        assert_eq!(sequences.sequence(index).unwrap(), expected, "sequence {index}");
    }
    assert_eq!(sequences.padding_share(), 0.0);
}

/// Lengths that fall off like those of texts, some longer than a sequence.
fn lengths(num_documents: usize, mean: f64) -> Vec<usize> {
    let mut random = crate::data::order::generator(1, 0);
    let uniform = |bits: u64| (bits >> 11) as f64 / (1_u64 << 53) as f64;
    (0..num_documents).map(|_| 1 + (-(1.0 - uniform(random.next_u64())).ln() * mean) as usize).collect()
}

#[test]
fn every_token_is_in_one_sequence_and_has_its_successor_as_label() {
    let lens = lengths(200, 20.0);
    for seq_len in [1, 7, 32, 64, 1000] {
        let sequences = greedy(&lens, seq_len);
        let mut seen = Vec::new();
        for sequence in (0..sequences.num_sequences()).map(|sequence| sequences.sequence(sequence).unwrap()) {
            assert_eq!(sequence.cu_seqlens.last(), Some(&(seq_len as u32)));
            for (token, label) in sequence.input_ids.into_iter().zip(sequence.shift_labels) {
                let document = (token / 1000) as usize;
                let is_last = token > 0 && (token % 1000) as usize == lens[document - 1] - 1;
                assert_eq!(label, if token == 0 || is_last { NONE } else { i64::from(token) + 1 });
                seen.extend((token > 0).then_some(token));
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, documents::all_tokens(sequences.documents()), "seq_len {seq_len}");
    }
}

#[test]
fn documents_that_fit_into_a_sequence_are_never_cut() {
    let (lens, seq_len) = (lengths(300, 20.0), 32);
    let sequences = greedy(&lens, seq_len);
    let mut whole = 0;
    for sequence in (0..sequences.num_sequences()).map(|sequence| sequences.sequence(sequence).unwrap()) {
        for bounds in sequence.cu_seqlens.windows(2) {
            let first = sequence.input_ids[bounds[0] as usize];
            let len = (bounds[1] - bounds[0]) as usize;
            if first > 0 && lens[(first / 1000) as usize - 1] <= seq_len {
                assert_eq!((first % 1000, len), (0, lens[(first / 1000) as usize - 1]));
                whole += 1;
            }
        }
    }
    assert_eq!(whole, lens.iter().filter(|&&len| len <= seq_len).count());
}

#[test]
fn a_hundred_thousand_documents_leave_less_than_a_percent_empty() {
    let lens = lengths(100_000, 400.0);
    let corpus = Corpus::from_documents(lens.iter().map(|&len| vec![1; len])).unwrap();
    let sequences = PackedSequences::new(corpus, 2048).unwrap();
    assert!(sequences.padding_share() < 0.01, "{}", sequences.padding_share());
}
