use super::*;

const LENS: [usize; 7] = [9, 1, 14, 3, 20, 8, 9];

pub(super) fn all_tokens(documents: &Documents) -> Vec<u32> {
    let mut tokens = Vec::new();
    documents.read_tokens(0..documents.num_tokens(), &mut tokens).unwrap();
    tokens
}

#[test]
fn a_split_takes_whole_documents_and_every_one_once() {
    let [training, held_out] = Documents::split(documents(&LENS), 0.3).unwrap();
    assert_eq!((training.num_documents(), held_out.num_documents()), (5, 2));
    let mut union = [all_tokens(&training), all_tokens(&held_out)].concat();
    union.sort_unstable();
    assert_eq!(union, all_tokens(&documents(&LENS).into()));
    for part in [&training, &held_out] {
        for index in 0..part.num_documents() {
            let range = part.document(index).unwrap();
            let tokens = &all_tokens(part)[range.clone()];
            let number = (tokens[0] / 1000) as usize - 1;
            assert_eq!(tokens, document(number, LENS[number]));
            for token in [range.start, range.end - 1] {
                assert_eq!(part.document_at(token).unwrap(), index);
            }
        }
        assert_eq!(part.document_at(part.num_tokens()).unwrap(), part.num_documents());
    }
    let again = Documents::split(documents(&LENS), 0.3).unwrap();
    assert_eq!(all_tokens(&again[1]), all_tokens(&held_out), "it depends on nothing else");
}

#[test]
fn both_sides_of_a_split_are_never_empty() {
    for fraction in [1e-9, 0.5, 1.0 - 1e-9] {
        let [training, held_out] = Documents::split(documents(&[3, 4]), fraction).unwrap();
        assert_eq!((training.num_documents(), held_out.num_documents()), (1, 1));
    }
    for fraction in [0.0, 1.0, -0.5, f64::NAN] {
        let error = Documents::split(documents(&LENS), fraction).unwrap_err();
        assert!(matches!(error, DataError::NoSplit { .. }), "{error:?}");
    }
    let error = Documents::split(documents(&[1]), 0.5).unwrap_err();
    assert!(matches!(error, DataError::NoSplit { num_tokens: 1, .. }), "{error:?}");
}

#[test]
fn the_end_of_a_single_document_is_held_out() {
    let [training, held_out] = Documents::split(documents(&[10]), 0.2).unwrap();
    assert_eq!(all_tokens(&training), document(0, 10)[..8]);
    assert_eq!(all_tokens(&held_out), document(0, 10)[8..]);
    let mut labels = Vec::new();
    held_out.read_labels(1..2, &mut labels).unwrap();
    assert_eq!(labels, [1009]);
}

#[test]
fn a_selection_packs_independently_of_the_rest() {
    let [training, _] = Documents::split(documents(&LENS), 0.3).unwrap();
    let tokens = all_tokens(&training);
    let own = (0..training.num_documents()).map(|index| tokens[training.document(index).unwrap()].to_vec());
    let own = std::sync::Arc::new(Corpus::from_documents(own).unwrap());
    for packing in [Packing::Greedy, Packing::Cut, Packing::Concat] {
        let selected = PackedSequences::with_packing(training.clone(), 6, packing).unwrap();
        let expected = PackedSequences::with_packing(own.clone(), 6, packing).unwrap();
        assert_eq!(selected.num_sequences(), expected.num_sequences());
        for sequence in 0..expected.num_sequences() {
            assert_eq!(
                selected.sequence(sequence).unwrap(),
                expected.sequence(sequence).unwrap(),
                "{packing:?} sequence {sequence}"
            );
        }
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_named_by_document() {
    let all = Documents::from(documents(&[3, 6, 2]));
    all.check_vocab(3002).unwrap();
    let error = all.check_vocab(2005).unwrap_err().to_string();
    assert_eq!(error, "token id or label 2005 at position 5 of document 1 is outside the vocabulary 0..2005");
    // Far enough to be in a later chunk.
    let mut long = vec![0; 200_000];
    long[170_000] = 9;
    let error = Documents::from(Corpus::from_documents([long]).unwrap()).check_vocab(9).unwrap_err();
    assert!(matches!(error, DataError::DocumentOutOfVocab { position: 170_000, .. }), "{error:?}");
}

#[test]
fn ranges_beyond_the_documents_are_errors() {
    let [training, _] = Documents::split(documents(&LENS), 0.3).unwrap();
    let end = training.num_tokens();
    let error = training.read_tokens(end - 1..end + 1, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, DataError::NoTokenRange { .. }), "{error:?}");
    let error = training.document(5).unwrap_err();
    assert!(matches!(error, DataError::NoDocument { index: 5, available: 5 }), "{error:?}");
}

#[test]
fn different_data_has_a_different_hash() {
    let hash = |lens: &[usize]| Documents::from(documents(lens)).sampled_hash().unwrap();
    let changed = |at: usize| {
        let mut tokens = document(0, 100);
        tokens[at] += 1;
        Documents::from(Corpus::from_documents([tokens]).unwrap()).sampled_hash().unwrap()
    };
    let hashes = [hash(&[100]), hash(&[99]), hash(&[50, 50]), hash(&[49, 51]), changed(0), changed(50)];
    for (index, hash) in hashes.iter().enumerate() {
        assert!(!hashes[..index].contains(hash), "{index}");
    }
    assert_eq!(hash(&[100]), hash(&[100]));
}
