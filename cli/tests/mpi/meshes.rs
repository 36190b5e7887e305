//! Meshes of processes: what they train, bit for bit, is what threads do.

use crate::support::cli::Workplace;
use crate::support::sample::{axes, sampled};
use crate::training::assert_processes_are_threads;
use crate::trial;
use libtest_mimic::Trial;
use serde_json::json;

/// The ranks along pp, dp, ring, ulysses and tp.
type Sizes = [usize; 5];

/// Each axis alone, all pairs and triples of pp, dp, sp and tp, of which sp is a ring, Ulysses or both; up to 8 processes.
const MESHES: [Sizes; 27] = [
    [2, 1, 1, 1, 1],
    [1, 2, 1, 1, 1],
    [1, 4, 1, 1, 1],
    [1, 1, 2, 1, 1],
    [1, 1, 3, 1, 1],
    [1, 1, 4, 1, 1],
    [1, 1, 1, 2, 1],
    [1, 1, 1, 3, 1],
    [1, 1, 1, 4, 1],
    [1, 1, 1, 1, 2],
    [1, 1, 1, 1, 3],
    [2, 2, 1, 1, 1],
    [2, 1, 2, 1, 1],
    [2, 1, 1, 2, 1],
    [2, 1, 1, 1, 2],
    [1, 2, 2, 1, 1],
    [1, 2, 1, 2, 1],
    [1, 2, 1, 1, 2],
    [1, 1, 2, 2, 1],
    [1, 1, 2, 1, 2],
    [1, 1, 1, 2, 2],
    [2, 2, 1, 2, 1],
    [2, 2, 1, 1, 2],
    [2, 1, 2, 1, 2],
    [2, 1, 1, 2, 2],
    [1, 2, 2, 1, 2],
    [1, 2, 1, 2, 2],
];

/// A sample, or with `ULYSSES_TEST_SEED=all` every mesh at every ZeRO stage.
pub(crate) fn trials() -> Vec<Trial> {
    let cases = MESHES.into_iter().flat_map(|sizes| (0..=3).map(move |stage| (sizes, stage)));
    let sample =
        sampled(cases, |([pp, dp, ring, ulysses, tp], stage)| axes![pp, dp, ring, ulysses, tp, stage]);
    let case = |(sizes, stage)| {
        let name = format!("processes_of_{}_at_stage_{stage}_are_what_threads_are", mesh(sizes));
        trial(name, move || check(sizes, stage))
    };
    sample.map(case).collect()
}

/// The value of `--mesh`.
fn mesh([pp, dp, ring, ulysses, tp]: Sizes) -> String {
    let axis = |name: &str, size: usize| if size > 1 { format!("{name}={size}") } else { String::new() };
    let sp = if ring > 1 { format!("ring={ring},ulysses={ulysses}") } else { format!("sp={ulysses}") };
    let axes = [axis("pp", pp), format!("dp={dp}"), sp, axis("tp", tp)];
    axes.into_iter().filter(|axis| !axis.is_empty()).collect::<Vec<_>>().join(",")
}

fn check(sizes: Sizes, stage: u64) {
    let place = Workplace::new();
    let accumulation = if sizes[0] > 1 { 4 } else { 1 + stage % 2 };
    let config = json!({
        "train_batch_size": 24, "gradient_accumulation_steps": accumulation, "zero_optimization": { "stage": stage },
        "ulysses": { "seq_len": 31, "steps": 2 },
    });
    place.write_config("config.json", config);
    assert_processes_are_threads(&place, sizes.iter().product(), &mesh(sizes), 2);
}
