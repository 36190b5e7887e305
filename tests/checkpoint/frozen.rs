//! Frozen parameters in checkpoints: saved without optimizer state, loaded on any mesh.

use super::training::{ADAM, LAMB, SEED, Setup, model, on_mesh, setup};
use candle_core::Tensor;
use half::bf16;
use std::path::Path;
use ulysses::checkpoint::{
    Checkpoint, Comparison, ExportDtype, ExportOptions, InitialWeights, LocalStorage, diff, export, step_name,
};
use ulysses::model::{HfWeights, Model, RandomWeights, WeightSource};

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

#[test]
fn an_export_takes_frozen_parameters_of_a_run_in_16_bits_from_its_initial_model() {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(Setup { extra: FROZEN_BF16, ..setup(2, 2, 3) }, |rank| {
        rank.train(1)?;
        rank.save(dir.path())
    });
    let (checkpoint, model) = (open(dir.path(), 1), Model::new(&model()).unwrap());
    let exported = |name: &str, initial: Option<&InitialWeights>| {
        let output = dir.path().join(name);
        let options = ExportOptions { initial, ..ExportOptions::new(ExportDtype::F32) };
        let rounded = export(&checkpoint, &output, options, &LocalStorage).unwrap().rounded;
        (rounded, HfWeights::open(&output).unwrap())
    };
    let seeds @ [of_run, _] = [SEED, SEED + 1].map(|seed| RandomWeights { seed });
    let [initial, other] = seeds.each_ref().map(|weights| InitialWeights::new(&model, weights));
    let (none_rounded, exact) = exported("exact", Some(&initial));
    assert_eq!((none_rounded, exported("none", None).0), (0, 8));
    // The five norms are ones in every model.
    let (all_but_norms, rounded) = exported("rounded", Some(&other));
    assert_eq!(all_but_norms, 3);
    for spec in model.units().iter().flat_map(|unit| &unit.parameters) {
        let read = |weights: &dyn WeightSource| {
            let mut values = vec![0.0; spec.numel()];
            weights.read(spec, 0..spec.numel(), &mut values).unwrap();
            values
        };
        if is_frozen(&spec.name) {
            let (initial, in_bf16) = (read(&of_run), |x: &f32| bf16::from_f32(*x).to_f32());
            assert_eq!(read(&exact), initial, "{}", spec.name);
            assert_eq!(read(&rounded), initial.iter().map(in_bf16).collect::<Vec<_>>(), "{}", spec.name);
        } else {
            assert_eq!(read(&exact), read(&rounded), "{}", spec.name);
        }
    }
}
