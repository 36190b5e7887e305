//! Checkpoints saved on one mesh and loaded on another.

use super::training::{ADAGRAD, ADAM, LAMB, LION, MOMENTUM, SGD, Setup, on_mesh, setup};
use crate::support::sample::{axes, sampled};
use std::path::Path;
use tempfile::TempDir;
use ulysses::checkpoint::{Checkpoint, Comparison, diff, step_name};
use ulysses::engine::{EngineError, StepReport};

/// Returns the bits of every value of a report.
fn bits(report: &StepReport) -> (u64, [u64; 3], u64, bool, u64) {
    let numbers = [report.loss, report.lr, report.grad_norm].map(f64::to_bits);
    (report.step, numbers, report.label_tokens, report.skipped, report.comm_bytes)
}

const OVER_SP: &str = r#"{ "ulysses": { "zero_partition_axes": ["dp", "sp"] } }"#;
const BF16: &str = r#"{ "bf16": { "enabled": true } }"#;
const BF16_OVER_SP: &str =
    r#"{ "bf16": { "enabled": true }, "ulysses": { "zero_partition_axes": ["dp", "sp"] } }"#;

fn over_sp(dp: usize, sp: usize, stage: u8) -> Setup {
    Setup { extra: OVER_SP, ..setup(dp, sp, stage) }
}

fn open(dir: &Path, step: u64) -> Checkpoint {
    let checkpoint = Checkpoint::open(&dir.join(step_name(step))).unwrap();
    checkpoint.verify().unwrap();
    checkpoint
}

/// A checkpoint after three steps.
struct Saved {
    setup: Setup,
    dir: TempDir,
    checkpoint: Checkpoint,
}

impl Saved {
    fn new(setup: Setup) -> Self {
        let dir = tempfile::tempdir().unwrap();
        on_mesh(setup, |rank| {
            rank.train(3)?;
            rank.save(dir.path())
        });
        Self { setup, checkpoint: open(dir.path(), 3), dir }
    }

    /// Returns the numbers of partitions and files.
    fn counts(&self) -> (usize, usize) {
        let manifest = self.checkpoint.manifest();
        (manifest.num_partitions, manifest.files.len())
    }

    /// Loads it with another setup, and checks that this saves the same state. Returns what was saved.
    fn assert_loads(&self, setup: Setup) -> Checkpoint {
        let again = tempfile::tempdir().unwrap();
        on_mesh(setup, |rank| {
            rank.resume(self.dir.path())?;
            rank.save(again.path())
        });
        let (saved, loaded) = (&self.checkpoint, open(again.path(), 3));
        let label = format!("{:?} to {setup:?}", self.setup);
        assert_eq!(loaded.manifest().progress, saved.manifest().progress, "{label}");
        let comparisons = diff(saved, &loaded).unwrap();
        assert_eq!(comparisons.len(), saved.manifest().kinds.len() * 21, "{label}");
        for (tensor, comparison) in comparisons {
            assert_eq!(comparison, Comparison::Equal, "{label}: {tensor:?}");
        }
        loaded
    }
}

#[test]
fn loaded_state_is_bit_equal_on_every_mesh() {
    let saved =
        [(ADAM, 3), (MOMENTUM, 2), (SGD, 1), (LION, 2), (ADAGRAD, 2), (LAMB, 3)].map(|(optimizer, kinds)| {
            let saved = Saved::new(Setup { optimizer, ..setup(2, 2, 3) });
            assert_eq!(saved.checkpoint.manifest().kinds.len(), kinds);
            saved
        });
    let meshes = [(1, 1), (4, 1), (1, 4), (2, 1), (3, 2), (5, 1)];
    let setups = meshes.into_iter().flat_map(|(dp, sp)| [0, 1, 2, 3].map(|stage| setup(dp, sp, stage)));
    let cases = setups.flat_map(|setup| {
        saved.iter().map(move |saved| (Setup { optimizer: saved.setup.optimizer, ..setup }, saved))
    });
    for (setup, saved) in sampled(cases, |(setup, _)| setup.axes()) {
        let loaded = saved.assert_loads(setup);
        assert_eq!(loaded.manifest().num_partitions, setup.dp, "{setup:?}");
    }
}

#[test]
fn a_resumed_run_on_the_same_mesh_is_bit_equal_to_an_uninterrupted_one() {
    let over_dp = [(1, 1, 0, 1), (2, 2, 0, 2), (2, 2, 1, 1), (3, 1, 2, 2), (2, 2, 3, 2)]
        .map(|(dp, sp, stage, accumulation)| Setup { accumulation, ..setup(dp, sp, stage) });
    let in_bf16 = Setup { extra: BF16_OVER_SP, ..setup(1, 2, 3) };
    let over_sp =
        [Setup { accumulation: 2, ..over_sp(1, 3, 3) }, over_sp(2, 2, 1), over_sp(1, 4, 2), in_bf16];
    let cases = over_dp
        .into_iter()
        .chain(over_sp)
        .flat_map(|setup| [ADAM, MOMENTUM, ADAGRAD, LAMB].map(|optimizer| Setup { optimizer, ..setup }));
    for setup in sampled(cases, Setup::axes) {
        let dir = tempfile::tempdir().unwrap();
        let uninterrupted = on_mesh(setup, |rank| {
            rank.train(3)?;
            rank.save(dir.path())?;
            rank.train(4)
        });
        let resumed = on_mesh(setup, |rank| {
            rank.resume(dir.path())?;
            rank.train(4)
        });
        let all_bits = |reports: &[StepReport]| reports.iter().map(bits).collect::<Vec<_>>();
        assert_eq!(uninterrupted[0].iter().map(|report| report.step).collect::<Vec<_>>(), [4, 5, 6, 7]);
        for (resumed, uninterrupted) in resumed.iter().zip(&uninterrupted) {
            assert_eq!(all_bits(resumed), all_bits(uninterrupted), "{setup:?}");
        }
    }
}

#[test]
fn hsdp_partitions_are_written_once_and_load_on_every_mesh() {
    // Partitions over two adjacent ranks: four dp ranks hold two replicas.
    const SHARDED: &str = r#"{ "zero_optimization": { "stage": 3, "mics_shard_size": 2 } }"#;
    let sharded = |dp, sp| Setup { extra: SHARDED, ..setup(dp, sp, 3) };
    let saved = Saved::new(sharded(4, 2));
    assert_eq!(saved.counts(), (2, 2 * 3));
    for setup in [setup(1, 1, 0), setup(4, 1, 3), setup(3, 2, 2), sharded(4, 1), sharded(6, 1)] {
        saved.assert_loads(setup);
    }
}

#[test]
fn partitions_over_sp_are_written_by_their_ranks_and_load_in_both_settings() {
    let (mut all_saved, mut cases) = (Vec::new(), Vec::new());
    for ((dp_only, both), stage) in [("{}", OVER_SP), (BF16, BF16_OVER_SP)]
        .into_iter()
        .flat_map(|axes| [1, 2, 3].map(|stage| (axes, stage)))
    {
        let over_dp = |dp, sp, stage| Setup { extra: dp_only, ..setup(dp, sp, stage) };
        let over_sp = |dp, sp, stage| Setup { extra: both, ..setup(dp, sp, stage) };
        for (saving, partitions) in [(over_sp(2, 2, stage), 4), (over_dp(2, 2, stage), 2)] {
            let saved = Saved::new(saving);
            assert_eq!(saved.counts(), (partitions, partitions * 3), "{saving:?}");
            // Both settings on the same mesh, other meshes and another stage.
            let loading = [
                over_sp(2, 2, stage),
                over_dp(2, 2, stage),
                over_sp(1, 3, stage),
                over_sp(3, 2, stage),
                over_dp(1, 1, 0),
                over_sp(1, 4, 4 - stage),
            ];
            cases.extend(loading.map(|loading| (all_saved.len(), loading)));
            all_saved.push(saved);
        }
    }
    for (saved, loading) in sampled(cases, |(saved, loading)| {
        let Setup { extra: from, stage: from_stage, .. } = all_saved[*saved].setup;
        [axes![from, from_stage], loading.axes()].concat()
    }) {
        all_saved[saved].assert_loads(loading);
    }
}

#[test]
fn state_of_a_ring_loads_without_one_and_back() {
    const RING: &str = r#"{ "ulysses": { "ring_size": 2 } }"#;
    const RING_OF_ALL: &str = r#"{ "ulysses": { "ring_size": 4, "zero_partition_axes": ["dp", "sp"] }, "zero_optimization": { "stage": 3 } }"#;
    let ring = |dp, sp| Setup { extra: RING, ..setup(dp, sp, 3) };
    let ring_of_all = Setup { extra: RING_OF_ALL, ..setup(1, 4, 3) };
    for (saving, loading) in [
        (ring(2, 2), [setup(2, 2, 3), setup(1, 1, 0), ring_of_all]),
        (ring_of_all, [setup(2, 2, 3), setup(4, 1, 2), ring(1, 4)]),
        (setup(2, 2, 3), [ring(1, 2), ring(2, 4), ring_of_all]),
    ] {
        let saved = Saved::new(saving);
        for setup in loading {
            saved.assert_loads(setup);
        }
    }
}

#[test]
fn state_of_divided_layers_loads_on_every_mesh_and_back() {
    // Three ranks share two KV heads: the last one has two query heads, the others one.
    let tp = |dp, sp, size: usize, stage| {
        let extra = [
            r#"{ "tensor_parallel_size": 1 }"#,
            r#"{ "tensor_parallel_size": 2 }"#,
            r#"{ "tensor_parallel_size": 3 }"#,
        ];
        Setup { extra: extra[size - 1], ..setup(dp, sp, stage) }
    };
    for (saving, files, loading) in [
        (tp(2, 1, 2, 3), 4 * 3, [tp(2, 1, 2, 1), tp(1, 1, 1, 0), tp(1, 1, 3, 2), tp(1, 2, 2, 3)]),
        (tp(1, 1, 3, 1), 3 * 3, [tp(1, 1, 3, 0), tp(3, 1, 1, 3), tp(2, 1, 2, 3), tp(1, 2, 2, 2)]),
        (tp(2, 2, 1, 2), 2 * 3, [tp(1, 1, 2, 0), tp(2, 1, 3, 3), tp(1, 2, 2, 1), tp(2, 2, 2, 3)]),
    ] {
        let saved = Saved::new(saving);
        assert_eq!(saved.checkpoint.manifest().files.len(), files, "{saving:?}");
        for setup in loading {
            saved.assert_loads(setup);
        }
    }
}

#[test]
fn state_of_stages_loads_on_every_mesh_and_back() {
    const PP: &str = r#"{ "pipeline_parallel_size": 2 }"#;
    const PP_TP: &str = r#"{ "pipeline_parallel_size": 2, "tensor_parallel_size": 2 }"#;
    let with = |extra, dp, sp, stage| Setup { extra, ..setup(dp, sp, stage) };
    for (saving, files, loading) in [
        (with(PP, 2, 1, 3), 4 * 3, [with("{}", 1, 1, 0), with(PP, 1, 2, 1), with(PP_TP, 2, 1, 2)]),
        (with(PP_TP, 1, 1, 1), 4 * 3, [with("{}", 3, 1, 3), with(PP, 1, 1, 0), with(PP_TP, 1, 1, 1)]),
        (with("{}", 2, 2, 2), 2 * 3, [with(PP, 1, 1, 0), with(PP, 3, 1, 3), with(PP_TP, 1, 2, 1)]),
    ] {
        let saved = Saved::new(saving);
        assert_eq!(saved.checkpoint.manifest().files.len(), files, "{saving:?}");
        for setup in loading {
            saved.assert_loads(setup);
        }
    }
}

#[test]
fn every_partition_is_written_once() {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(setup(2, 3, 1), |rank| rank.save(dir.path()));
    let manifest = open(dir.path(), 0).manifest().clone();
    assert_eq!(manifest.files.len(), 2 * 3, "partitions × kinds, independent of sp");
    let elements: usize = open(dir.path(), 0).layouts().iter().map(|layout| layout.numel()).sum();
    let headers = 6 * 2000;
    let payload = 3 * 4 * elements as u64;
    assert!((payload..payload + headers).contains(&manifest.total_bytes()), "{}", manifest.total_bytes());
}

#[test]
fn a_checkpoint_of_another_optimizer_is_an_error_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(setup(2, 1, 3), |rank| {
        rank.train(2)?;
        rank.save(dir.path())
    });
    let other = Setup { optimizer: MOMENTUM, ..setup(2, 1, 3) };
    let expected = on_mesh(other, |rank| rank.train(2));
    let after_refusal = on_mesh(other, |rank| {
        let checkpoint = Checkpoint::open(&dir.path().join(step_name(2)))?;
        let error = rank.engine.load_checkpoint(&checkpoint).unwrap_err();
        assert!(matches!(error, EngineError::Checkpoint(_)));
        let message = error.to_string();
        assert!(
            message.contains(
                "the optimizer state (`optimizer.type`) is parameters, exp_avg, exp_avg_sq in the checkpoint"
            ) && message.contains("but parameters, momentum in this run"),
            "{message}"
        );
        rank.train(2)
    });
    assert_eq!(
        after_refusal[0].iter().map(bits).collect::<Vec<_>>(),
        expected[0].iter().map(bits).collect::<Vec<_>>()
    );
}
