//! Frozen parameters in checkpoints: saved without optimizer state, loaded on any mesh.

use super::training::{ADAM, LAMB, Setup, on_mesh, setup};
use candle_core::Tensor;
use std::path::Path;
use ulysses::checkpoint::{Checkpoint, Comparison, diff, step_name};

/// Freezes parts of the layers, and the whole head.
const FROZEN: &str =
    r#"{ "ulysses": { "parameter_groups": [{ "match": "q_proj|norm|lm_head", "frozen": true }] } }"#;
const FROZEN_BF16: &str = r#"{ "bf16": { "enabled": true },
    "ulysses": { "parameter_groups": [{ "match": "q_proj|norm|lm_head", "frozen": true }] } }"#;

fn is_frozen(name: &str) -> bool {
    ["q_proj", "norm", "lm_head"].iter().any(|part| name.contains(part))
}

fn open(dir: &Path, step: u64) -> Checkpoint {
    let checkpoint = Checkpoint::open(&dir.join(step_name(step))).unwrap();
    checkpoint.verify().unwrap();
    checkpoint
}

#[test]
fn frozen_parameters_are_saved_without_state_and_load_on_every_mesh() {
    for (optimizer, extra) in [(ADAM, FROZEN), (ADAM, FROZEN_BF16), (LAMB, FROZEN)] {
        let dir = tempfile::tempdir().unwrap();
        on_mesh(Setup { optimizer, extra, ..setup(2, 2, 3) }, |rank| {
            rank.train(3)?;
            rank.save(dir.path())
        });
        let saved = open(dir.path(), 3);
        // At least the head has no optimizer state, in both partitions.
        let bytes_of = |kind: &str| -> u64 {
            saved.manifest().files.iter().filter(|file| file.kind == kind).map(|file| file.bytes).sum()
        };
        assert!(bytes_of("exp_avg") + 4 * 29 * 11 < bytes_of("parameters"));
        let meshes = [(1, 1), (4, 1), (1, 3), (3, 2), (5, 1)];
        for ((dp, sp), stage) in meshes.into_iter().flat_map(|mesh| [0, 1, 2, 3].map(|stage| (mesh, stage))) {
            let again = tempfile::tempdir().unwrap();
            on_mesh(Setup { optimizer, extra, ..setup(dp, sp, stage) }, |rank| {
                rank.resume(dir.path())?;
                rank.save(again.path())
            });
            let comparisons = diff(&saved, &open(again.path(), 3)).unwrap();
            // 8 of 21 parameters are frozen: two q_proj, five norms and the head.
            assert_eq!(comparisons.len(), 21 + 2 * (21 - 8));
            for ((kind, name), comparison) in comparisons {
                let label = format!("{optimizer} {extra} on {dp}x{sp} stage {stage}: {kind} of {name}");
                assert_eq!(comparison, Comparison::Equal, "{label}");
                assert!(kind == "parameters" || !is_frozen(&name), "{label}");
            }
        }
    }
}

/// Returns the bits of every parameter.
fn parameters(all: Vec<(String, Tensor)>) -> Vec<(String, Vec<u32>)> {
    let bits = |tensor: Tensor| {
        let elements: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        elements.into_iter().map(f32::to_bits).collect()
    };
    all.into_iter().map(|(name, tensor)| (name, bits(tensor))).collect()
}

#[test]
fn a_resumed_run_with_frozen_parameters_is_bit_equal_to_an_uninterrupted_one() {
    for extra in [FROZEN, FROZEN_BF16] {
        for (dp, sp, stage) in [(1, 1, 0), (2, 2, 1), (3, 1, 2), (2, 2, 3)] {
            let setup = Setup { extra, ..setup(dp, sp, stage) };
            let dir = tempfile::tempdir().unwrap();
            let uninterrupted = on_mesh(setup, |rank| {
                rank.train(3)?;
                rank.save(dir.path())?;
                rank.train(3)?;
                Ok(parameters(rank.engine.gather_parameters()?))
            });
            let resumed = on_mesh(setup, |rank| {
                rank.resume(dir.path())?;
                rank.train(3)?;
                Ok(parameters(rank.engine.gather_parameters()?))
            });
            assert!(resumed == uninterrupted, "{setup:?}");
        }
    }
}

/// Optimizer state would be missing or discarded.
#[test]
fn freezing_or_unfreezing_on_resume_is_an_error_with_the_parameter_name() {
    for (before, after, expected) in [
        (
            "{}",
            FROZEN,
            "parameter model.layers.0.self_attn.q_proj.weight is trained in the checkpoint, but frozen in this run",
        ),
        (
            FROZEN,
            "{}",
            "parameter model.layers.0.self_attn.q_proj.weight is frozen in the checkpoint, but trained in this run",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        on_mesh(Setup { extra: before, ..setup(2, 1, 3) }, |rank| rank.save(dir.path()));
        on_mesh(Setup { extra: after, ..setup(1, 1, 0) }, |rank| {
            let error = rank.resume(dir.path()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            Ok(())
        });
    }
}
