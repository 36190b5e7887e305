use super::*;
use crate::data::mixture::{MixedSample, Mixture};

#[test]
fn every_prefix_of_a_mixture_has_its_proportions() {
    for weights in [&[1.0, 1.0][..], &[0.7, 0.2, 0.1], &[1.0, 3.0, 5.0, 7.0], &[1e-9, 1.0], &[2.0]] {
        let total: f64 = weights.iter().sum();
        for seed in 0..5 {
            let mixture = Mixture::new(weights, seed);
            let mut counts = vec![0_u64; weights.len()];
            for sample in 0..5000 {
                let MixedSample { source, number } = mixture.locate(sample);
                assert_eq!(number, counts[source], "each source's samples come in order");
                counts[source] += 1;
                for (count, weight) in counts.iter().zip(weights) {
                    let share = weight / total * (sample + 1) as f64;
                    let bound = weights.len() as f64;
                    assert!((*count as f64 - share).abs() < bound, "{weights:?} {sample} {counts:?}");
                }
            }
        }
    }
}

#[test]
fn a_mixture_is_found_at_any_sample_and_depends_on_the_seed() {
    let locate = |seed, sample| Mixture::new(&[0.5, 0.3, 0.2], seed).locate(sample);
    let far = u64::MAX - 10;
    let MixedSample { source, number } = locate(1, far);
    assert!(number < far && source < 3);
    let sources = |seed| (0..100).map(|sample| locate(seed, sample).source).collect::<Vec<_>>();
    assert_eq!(sources(1), sources(1));
    assert_ne!(sources(1), sources(2));
}

fn single(seed: u64) -> LoaderOptions {
    LoaderOptions { seed, micro_batch: 1, accumulation: 1, rank: DataRank::single() }
}

/// The first token of each of the next samples.
fn firsts(loader: &mut DataLoader, samples: usize) -> Vec<u32> {
    (0..samples).map(|_| loader.next_micro_batch().unwrap().input_ids[0]).collect()
}

#[test]
fn sources_of_a_mixture_have_their_own_epochs() {
    // 2 sequences against 8, equally often.
    let other = Corpus::from_documents([(5000..5032).collect()]).unwrap();
    let other = PackedSequences::new(other, 4).unwrap();
    let data = Dataset::mixture([(packed(&[8], 4), 1.0), (other, 1.0)]).unwrap();
    let mut loader = DataLoader::new(data, single(3)).unwrap();
    let seen = firsts(&mut loader, 16);
    let (small, mut large): (Vec<u32>, Vec<u32>) = seen.iter().partition(|&&token| token < 5000);
    assert_eq!((small.len(), large.len()), (8, 8), "{seen:?}");
    assert!(small.chunks(2).all(|epoch| epoch.iter().sum::<u32>() == 2004), "{seen:?}");
    large.sort_unstable();
    assert_eq!(large, (5000..5032).step_by(4).collect::<Vec<_>>());
}

#[test]
fn concatenated_sources_are_seen_once_an_epoch_and_share_no_sequence() {
    let sources = [&[5][..], &[3, 9], &[4]].map(|lens| packed(lens, 4));
    let data = Dataset::concatenated(sources).unwrap();
    assert_eq!(data.num_sequences(), 2 + 3 + 1);
    let mut loader = DataLoader::new(data.clone(), single(0)).unwrap();
    let mut seen = firsts(&mut loader, 6);
    seen.sort_unstable();
    let sequence = |source, sequence| data.sequence(source, sequence).unwrap().input_ids[0];
    let mut expected =
        [sequence(0, 0), sequence(0, 1), sequence(1, 0), sequence(1, 1), sequence(1, 2), sequence(2, 0)];
    expected.sort_unstable();
    assert_eq!(seen, expected);
    assert_eq!((loader.epoch(), data.padding_share()), (1, 3.0 / 24.0));
    let in_order = DataLoader::once_in_order(data.clone(), single(0)).unwrap();
    assert_eq!(firsts(&mut in_order.clone(), 3), [sequence(0, 0), sequence(0, 1), sequence(1, 0)]);
}

#[test]
fn the_end_of_the_data_is_padded_with_masked_sequences() {
    let sequences = std::sync::Arc::new(packed(&[20], 4));
    let options = LoaderOptions { micro_batch: 2, ..single(0) };
    let mut loader = DataLoader::new(sequences, options).unwrap().ending_at(5);
    assert_eq!(loader.steps_left(), Some(3));
    let batches: Vec<_> = (0..4).map(|_| loader.next_micro_batch().unwrap()).collect();
    let valid: Vec<_> = batches.iter().map(MicroBatch::num_valid_tokens).collect();
    assert_eq!(valid.iter().sum::<usize>(), 19);
    assert_eq!((valid[3], batches[2].batch_size, loader.steps_left()), (0, 2, Some(0)));
    assert_eq!(batches[2].input_ids[4..], [0; 4]);
}

#[test]
fn invalid_datasets_are_errors() {
    let error = Dataset::concatenated([]).unwrap_err();
    assert!(matches!(error, DataError::NoSequences), "{error:?}");
    let error = Dataset::concatenated([packed(&[5], 4), packed(&[5], 5)]).unwrap_err();
    assert!(matches!(error, DataError::SeqLensDiffer { first: 4, other: 5 }), "{error:?}");
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = Dataset::mixture([(packed(&[5], 4), weight)]).unwrap_err();
        assert!(matches!(error, DataError::InvalidWeight { .. }), "{error:?}");
    }
    let error = Dataset::concatenated([packed(&[5], 4)]).unwrap().sequence(1, 0).unwrap_err();
    assert!(matches!(error, DataError::NoSource { index: 1, available: 1 }), "{error:?}");
}

#[test]
fn the_hash_depends_on_packing_and_weights() {
    let lens = [5, 3, 9];
    let packed = |packing| PackedSequences::with_packing(documents(&lens), 4, packing).unwrap();
    let hash = |data: Result<Dataset, DataError>| data.unwrap().sampled_hash().unwrap();
    let mixed =
        |weight| hash(Dataset::mixture([(packed(Packing::Cut), 1.0), (packed(Packing::Cut), weight)]));
    let hashes = [
        hash(Dataset::concatenated([packed(Packing::Greedy)])),
        hash(Dataset::concatenated([packed(Packing::Cut)])),
        hash(Dataset::concatenated([packed(Packing::Concat)])),
        hash(Dataset::concatenated([packed(Packing::Cut), packed(Packing::Cut)])),
        mixed(1.0),
        mixed(2.0),
    ];
    for (index, hash) in hashes.iter().enumerate() {
        assert!(!hashes[..index].contains(hash), "{index}");
    }
}
