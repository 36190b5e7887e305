//! Samples of test matrices: cases in which every pair of values of two axes occurs, and a twentieth of the others.
//!
//! The seed chooses among them. By default it is a hash of the Rust sources, so it differs from change to change and is
//! the same on every machine. `ULYSSES_TEST_SEED` is another seed, or `all` for whole matrices.

#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "not every test binary uses all"
)]

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::panic::Location;
use std::path::Path;
use std::sync::LazyLock;

const VARIABLE: &str = "ULYSSES_TEST_SEED";

/// The seed, or `None` for whole matrices.
static SEED: LazyLock<Option<u64>> = LazyLock::new(|| {
    let seed = match std::env::var(VARIABLE) {
        Ok(all) if all == "all" => None,
        Ok(seed) => {
            Some(seed.parse().unwrap_or_else(|_| panic!("{VARIABLE}: a number or `all`, not {seed:?}")))
        }
        Err(_) => Some(hash_of_sources()),
    };
    // Not by `eprintln`, whose text the harness of the tests keeps.
    let _ = writeln!(std::io::stderr(), "samples of test matrices: {}", setting(seed));
    seed
});

fn setting(seed: Option<u64>) -> String {
    format!("{VARIABLE}={}", seed.map_or_else(|| "all".to_owned(), |seed| seed.to_string()))
}

/// Returns the seed of random input, or `None` where each run draws other input.
pub fn seed() -> Option<u64> {
    *SEED
}

/// Of nine digits, as people type it.
fn hash_of_sources() -> u64 {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|dir| dir.join("Cargo.lock").exists());
    let root = root.expect("the tests are in a workspace");
    let mut folders =
        vec![root.join("src"), root.join("kernels"), root.join("chat"), root.join("cli"), root.join("tests")];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    hash(&files.iter().map(|file| std::fs::read(file).unwrap()).collect::<Vec<_>>()) % 1_000_000_000
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The values of a case on all axes: `axes![dp, sp]` is `["dp 2", "sp 3"]`, from variables.
macro_rules! axes {
    ($($axis:ident),+) => { vec![$(format!("{} {:?}", stringify!($axis), $axis)),+] };
}
pub(crate) use axes;

/// Returns the cases of a matrix to run, in their order.
///
/// If the test panics in its loop over them, the values of the case and the seed are printed.
#[track_caller]
pub fn sampled<T>(cases: impl IntoIterator<Item = T>, axes: impl FnMut(&T) -> Vec<String>) -> Sample<T> {
    sampled_every(1, cases, axes)
}

/// As [`sampled`], of a matrix whose cases take seconds: every `stride`-th case of a sample, from one that the seed chooses. Pairs of
/// values are covered by the runs of several seeds only.
#[track_caller]
pub fn sampled_every<T>(
    stride: usize,
    cases: impl IntoIterator<Item = T>,
    axes: impl FnMut(&T) -> Vec<String>,
) -> Sample<T> {
    let cases: Vec<T> = cases.into_iter().collect();
    let values: Vec<Vec<String>> = cases.iter().map(axes).collect();
    let place = Location::caller();
    let chosen: HashSet<usize> = match seed() {
        // Other tests with the same matrix draw other samples.
        Some(seed) => {
            let seed = hash(&(seed, place.file(), place.line()));
            let chosen = choose(&values, seed);
            let first = seed as usize % stride.min(chosen.len().max(1));
            chosen.into_iter().skip(first).step_by(stride).collect()
        }
        None => (0..cases.len()).collect(),
    };
    println!("{place}: {} of {} cases", chosen.len(), cases.len());
    let labels = values.iter().map(|values| values.join(", "));
    let cases = cases.into_iter().zip(labels).enumerate().filter(|(index, _)| chosen.contains(index));
    Sample { cases: cases.map(|(_, case)| case).collect::<Vec<_>>().into_iter(), label: String::new() }
}

/// Returns the indices of a sample: as long as there are new pairs, a case with the most; then a twentieth of the rest.
pub fn choose(cases: &[Vec<String>], seed: u64) -> Vec<usize> {
    let pairs: Vec<_> = cases.iter().map(|values| pairs(values)).collect();
    let mut rest: Vec<usize> = (0..cases.len()).collect();
    rest.sort_by_key(|index| hash(&(seed, index)));
    let (mut chosen, mut covered) = (Vec::new(), HashSet::<(&str, &str)>::new());
    loop {
        let new = |index: &usize| pairs[*index].iter().filter(|pair| !covered.contains(*pair)).count();
        let most = rest.iter().map(new).max().unwrap_or(0);
        let Some(place) = rest.iter().position(|index| most > 0 && new(index) == most) else { break };
        let best = rest.remove(place);
        covered.extend(&pairs[best]);
        chosen.push(best);
    }
    chosen.extend(&rest[..rest.len().div_ceil(20)]);
    chosen
}

/// Returns the pairs of values of two axes, and each value alone.
fn pairs(values: &[String]) -> Vec<(&str, &str)> {
    let with_later = |a: usize| values[a..].iter().map(move |b| (values[a].as_str(), b.as_str()));
    (0..values.len()).flat_map(with_later).collect()
}

/// The cases of a matrix to run.
pub struct Sample<T> {
    cases: std::vec::IntoIter<(T, String)>,
    /// Values of the case that runs.
    label: String,
}

impl<T> Iterator for Sample<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let (case, label) = self.cases.next()?;
        self.label = label;
        Some(case)
    }
}

impl<T> Drop for Sample<T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with {}; {}", self.label, setting(seed()));
        }
    }
}
