//! The sampler of matrices itself.

use crate::support::sample::{axes, choose};
use std::collections::BTreeSet;

const SEEDS: std::ops::Range<u64> = 0..40;

fn product(sizes: [usize; 4]) -> Vec<[usize; 4]> {
    let number: usize = sizes.iter().product();
    let case = |index: usize| {
        let mut rest = index;
        sizes.map(|size| {
            let value = rest % size;
            rest /= size;
            value
        })
    };
    (0..number).map(case).collect()
}

fn labeled(cases: &[[usize; 4]]) -> Vec<Vec<String>> {
    cases.iter().map(|[a, b, c, d]| axes![a, b, c, d]).collect()
}

/// A full grid, one with axes of one value, and cases that are no product.
fn matrices() -> [Vec<[usize; 4]>; 3] {
    let mut ragged = product([3, 2, 5, 2]);
    ragged.retain(|[a, b, c, d]| (a * 7 + b * 5 + c * 3 + d) % 4 > 1);
    [product([3, 4, 4, 2]), product([1, 7, 1, 2]), ragged]
}

fn pairs(cases: impl IntoIterator<Item = [usize; 4]>) -> BTreeSet<[usize; 4]> {
    let of_case = |case: [usize; 4]| {
        (0..4).flat_map(move |a| (0..4).map(move |b| [a, b, case[a], case[b]])).collect::<Vec<_>>()
    };
    cases.into_iter().flat_map(of_case).collect()
}

#[test]
fn a_sample_has_every_pair_of_values_that_the_matrix_has() {
    for cases in matrices() {
        for seed in SEEDS {
            let sample = choose(&labeled(&cases), seed);
            let distinct: BTreeSet<_> = sample.iter().collect();
            assert_eq!(distinct.len(), sample.len(), "a case is chosen once");
            assert_eq!(pairs(sample.iter().map(|index| cases[*index])), pairs(cases.clone()), "seed {seed}");
        }
    }
}

#[test]
fn a_sample_of_96_layouts_has_at_most_26() {
    let [cases, ..] = matrices();
    let sizes: Vec<_> = SEEDS.map(|seed| choose(&labeled(&cases), seed).len()).collect();
    // Two axes of four values have 16 pairs; a twentieth of the other 80.
    assert!(sizes.iter().all(|size| (20..=26).contains(size)), "{sizes:?}");
}

#[test]
fn the_samples_of_some_seeds_have_every_case() {
    for cases in matrices() {
        let drawn: BTreeSet<usize> = SEEDS.flat_map(|seed| choose(&labeled(&cases), seed)).collect();
        assert_eq!(drawn.len(), cases.len());
    }
}
