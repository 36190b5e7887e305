//! `ulysses verify` against the fixtures that PyTorch computed.

use crate::golden;
use crate::support::cli::{Outcome, Workplace};
use crate::support::compare::{assert_all_close, assert_close, values};
use crate::support::reference::{Tensors, load_tensors};
use candle_core::{DType, Tensor};
use serde_json::{Value, json};
use std::path::Path;

const MESHES: [&str; 5] = ["1x2", "2x1", "2x2", "1x3", "1x8"];
const STAGES: [&str; 4] = ["0", "1", "2", "3"];
const TOLERANCE: f64 = 1e-5;

#[track_caller]
fn verify(place: &Workplace, fixture: &str, flags: &[&str]) -> Outcome {
    let (model, batch) = (golden(fixture, ""), golden(fixture, "inputs.safetensors"));
    place.run(&[&["verify", "--model", &model, "--batch", &batch], flags].concat())
}

fn fixture_tensors(fixture: &str, file: &str) -> Tensors {
    load_tensors(Path::new(&golden(fixture, file))).unwrap()
}

/// Runs with `--output` and returns the written tensors.
fn written(fixture: &str, flags: &[&str]) -> Tensors {
    let place = Workplace::new();
    let outcome = verify(&place, fixture, &[flags, &["--output", "out.safetensors"]].concat());
    assert!(outcome.assert_done().stdout.contains("out.safetensors"), "{outcome:?}");
    let tensors = load_tensors(&place.path("out.safetensors")).unwrap();
    assert!(tensors.values().all(|tensor| tensor.dtype() == DType::F32));
    tensors
}

/// Returns the tensors with a prefix, without the prefix.
fn take(tensors: &Tensors, prefix: &str) -> Tensors {
    let named = tensors.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?, tensor)));
    named.map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect()
}

fn assert_pytorch_s(label: &str, written: &Tensors, fixture: &str) {
    let expected = fixture_tensors(fixture, "outputs.safetensors");
    assert_eq!(written["loss"].dims(), [1], "{label}");
    assert_eq!(written["logits"].dims(), expected["logits"].dims(), "{label}");
    for name in ["loss", "logits"] {
        let label = format!("{label}: {name}");
        assert_close(&label, &values(&written[name]), &expected[name], TOLERANCE);
    }
    let expected = fixture_tensors(fixture, "grads.safetensors");
    assert_all_close(&format!("{label}: gradient"), &take(written, "grad."), &expected, TOLERANCE);
}

#[test]
fn every_mesh_and_stage_agrees_with_a_single_rank() {
    let place = Workplace::new();
    for fixture in ["tiny_strong", "packed_strong"] {
        for mesh in MESHES {
            for stage in STAGES {
                let flags = ["--mesh", mesh, "--zero-stage", stage, "--device", "cpu"];
                let outcome = verify(&place, fixture, &flags);
                let within = outcome.assert_done().stdout.contains("within tolerance 2.00e-5");
                assert!(within && outcome.stderr.is_empty(), "{fixture} {mesh} {stage}: {outcome:?}");
            }
        }
    }
}

#[test]
fn packed_documents_are_compared_with_each_alone() {
    let place = Workplace::new();
    for mesh in ["1x1", "2x2", "1x3"] {
        let flags = ["--packing", "--mesh", mesh, "--steps", "1"];
        let outcome = verify(&place, "packed_strong", &flags);
        assert!(outcome.assert_done().stdout.contains("a single rank, every document alone;"), "{outcome:?}");
    }
    // They are computed in another order.
    verify(&place, "packed_strong", &["--packing", "--mesh", "2x2", "--tolerance", "0"])
        .assert_refused(1, &["the mesh or the packing changes the result"]);
    let means = ["--packing", "--mesh", "2x1", "--set", "loss_normalization=\"micro_batch\""];
    verify(&place, "packed_strong", &means)
        .assert_refused(2, &["`--packing` needs `loss_normalization` \"global\""]);
}

#[test]
fn a_tolerance_of_zero_fails_for_another_order_of_summation() {
    let place = Workplace::new();
    let outcome = verify(&place, "tiny_strong", &["--mesh", "2x2", "--tolerance", "0"]);
    outcome.assert_refused(1, &["the mesh changes the result", "tolerance 0"]);
    assert!(outcome.stdout.contains("EXCEEDS tolerance"), "{outcome:?}");
    verify(&place, "tiny_strong", &["--mesh", "1x1", "--tolerance", "0"]).assert_done();
}

/// 2^16, the default, overflows only if the loss is divided by fewer tokens than in training.
#[test]
fn the_loss_scale_is_that_of_training_and_gradients_that_overflow_at_it_never_pass() {
    let place = Workplace::new();
    let run = |power: u32, tolerance: &[&str]| {
        let set = format!("fp16={{\"enabled\": true, \"initial_scale_power\": {power}}}");
        verify(&place, "tiny_strong", &[&["--mesh", "2x2", "--set", &set], tolerance].concat())
    };
    assert!(run(16, &[]).assert_done().stdout.contains("within tolerance 2.00e-2"));
    run(40, &["--tolerance", "1e300"]).assert_refused(1, &["not finite", "loss scale"]);
}

#[test]
fn the_default_tolerance_suits_steps_and_dtypes() {
    let place = Workplace::new();
    let bf16 = r#"bf16={"enabled": true}"#;
    let sent = r#"seq_parallel_communication_data_type="bf16""#;
    let lion = r#"optimizer={"type": "Lion", "params": {"lr": 0.001}}"#;
    for (settings, steps) in [(&[bf16][..], "3"), (&[sent], "0"), (&[lion], "4"), (&[lion, bf16], "2")] {
        let settings = settings.iter().flat_map(|setting| ["--set", *setting]);
        let flags: Vec<&str> = ["--mesh", "1x3", "--steps", steps].into_iter().chain(settings).collect();
        verify(&place, "tiny_strong", &flags).assert_done();
    }
}

/// Three ranks share two KV heads, whose projections are whole on each: parameters are compared by name.
#[test]
fn divided_layers_are_compared_parameter_by_parameter() {
    let place = Workplace::new();
    let batch = golden("tiny_strong", "inputs.safetensors");
    for (mesh, steps) in [("1x1x3", "0"), ("1x1x2", "2"), ("dp=1,ring=2,ulysses=1,tp=4", "0")] {
        let flags = ["verify", "--model", "nano", "--batch", &batch, "--mesh", mesh, "--steps", steps];
        place.run(&flags).assert_done();
    }
}

/// In exact arithmetic q_proj and k_proj have no gradient if each token is a document.
#[test]
fn gradients_that_are_rounding_do_not_alarm() {
    let place = Workplace::new();
    let ids = Tensor::arange(1_i64, 33, &candle_core::Device::Cpu).unwrap().reshape((2, 16)).unwrap();
    let (labels, positions) = ((&ids + 1.0).unwrap(), ids.zeros_like().unwrap());
    let batch = [("input_ids", ids), ("shift_labels", labels), ("position_ids", positions)];
    let file = place.path("b.safetensors");
    candle_core::safetensors::save(&std::collections::HashMap::from(batch), &file).unwrap();
    for (mesh, steps) in [("1x4", "0"), ("2x2", "3"), ("3x1", "2")] {
        let flags =
            ["verify", "--model", "nano", "--batch", "b.safetensors", "--mesh", mesh, "--steps", steps];
        place.run(&flags).assert_done();
    }
}

#[test]
fn keys_of_the_config_are_honored_or_refused() {
    let place = Workplace::new();
    let written = |flags: &[&str]| {
        let file = place.path("o.safetensors");
        let batch = golden("tiny_strong", "inputs.safetensors");
        let all = ["verify", "--model", "nano", "--batch", &batch, "--output", "o.safetensors"];
        place.run(&[&all, flags].concat()).assert_done();
        load_tensors(&file).unwrap()
    };
    let one = written(&["--mesh", "1x1"]);
    // The initial weights of a preset.
    assert!(values(&written(&["--mesh", "1x1", "--set", "seed=7"])["logits"]) != values(&one["logits"]));
    // Means of micro batches differ from the mean of the batch, and agree with the single rank's.
    let means = ["--mesh", "2x1", "--set", "loss_normalization=\"micro_batch\""];
    verify(&place, "packed_strong", &means).assert_done();
    verify(&place, "tiny_strong", &["--mesh", "1x2", "--set", "gradient_accumulation_steps=2"]).assert_done();
    for (set, expected) in [
        ("ulysses.flexible_sp=true", "`ulysses.flexible_sp` is not supported by `verify`"),
        ("gradient_accumulation_steps=99", "`gradient_accumulation_steps` is 99, but the batch has"),
        ("zero_optimization.mics_shard_size=3", "shard size"),
        ("ulysses.ring_size=3", "ring_size"),
    ] {
        verify(&place, "tiny_strong", &["--mesh", "2x2", "--set", set]).assert_refused(2, &[expected]);
    }
}

#[test]
fn json_holds_every_error() {
    let place = Workplace::new();
    let flags = ["--mesh", "2x2", "--json", "--steps", "1"];
    let outcome = verify(&place, "tiny_strong", &flags);
    let report: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    assert_eq!((&report["mesh"], &report["passed"]), (&json!("2x2"), &json!(true)));
    let errors = report["relative_errors"].as_object().unwrap();
    let largest = errors.values().map(|error| error.as_f64().unwrap()).fold(0.0, f64::max);
    assert_eq!(report["largest_relative_error"], largest);
    assert!(largest > 0.0 && largest < report["tolerance"].as_f64().unwrap(), "{report}");
    let parameters = fixture_tensors("tiny_strong", "model.safetensors").len();
    assert_eq!(errors.len(), 2 + 2 * parameters, "loss, logits, gradients and parameters");
    let failed = verify(&place, "tiny_strong", &[&flags[..], &["--tolerance", "0"]].concat());
    failed.assert_refused(1, &["tolerance 0"]);
    let report: Value = serde_json::from_str(&failed.stdout).unwrap();
    assert_eq!(report["passed"], false);
    let written = verify(&place, "tiny_strong", &[&flags[..], &["--output", "o.safetensors"]].concat());
    let report: Value = serde_json::from_str(&written.assert_done().stdout).unwrap();
    assert_eq!(report["output"], "o.safetensors");
}

#[test]
fn the_output_is_what_pytorch_computes() {
    for (fixture, mesh, stage) in [
        ("tiny_strong", "1x1", "0"),
        ("tiny_strong", "2x2", "3"),
        ("tiny_strong", "1x3", "1"),
        ("packed_strong", "1x8", "2"),
    ] {
        let written = written(fixture, &["--mesh", mesh, "--zero-stage", stage]);
        assert_pytorch_s(&format!("{fixture} {mesh} {stage}"), &written, fixture);
        assert!(take(&written, "param.").is_empty(), "nothing was trained");
    }
}

#[test]
fn padding_sequences_are_not_written() {
    let written = written("packed_strong", &["--mesh", "2x2", "--zero-stage", "2"]);
    assert_eq!(written["logits"].dims(), [1, 64, 256]);
    assert_pytorch_s("packed 2x2", &written, "packed_strong");
}

/// AdamW divides a gradient by its magnitude: where PyTorch's f32 gradient is rounding noise, so is the
/// direction of the step. `tests/parity/golden.rs` finds these entries by the f64 gradient; here
/// they are counted: a few of 63 000, each off by at most one step size per step.
fn assert_trained_as_by_pytorch(label: &str, actual: &Tensors, expected: &Tensors, lr: f64, steps: f64) {
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(actual), names(expected), "{label}");
    let mut off = 0;
    for (name, expected) in expected {
        let (actual, expected) = (values(&actual[name]), values(expected));
        let largest = expected.iter().fold(0.0_f64, |largest, e| largest.max(e.abs()));
        for (actual, expected) in actual.iter().zip(&expected) {
            let error = (actual - expected).abs();
            assert!(error <= 2.0 * lr * steps, "{label} {name}: {actual} for {expected}");
            off += usize::from(error > TOLERANCE * largest);
        }
    }
    assert!(off <= 5, "{label}: {off} entries differ");
}

#[test]
fn the_parameters_after_steps_are_pytorch_s() {
    let place = Workplace::new();
    let manifest: Value =
        serde_json::from_str(&std::fs::read_to_string(golden("", "manifest.json")).unwrap()).unwrap();
    let adamw = &manifest["adamw"];
    let params: serde_json::Map<_, _> = ["lr", "betas", "eps", "weight_decay"]
        .into_iter()
        .map(|key| (key.to_owned(), adamw[key].clone()))
        .collect();
    for (trajectory, clip) in [("adamw", 0.0), ("adamw_clip0.5", 0.5)] {
        let optimizer = json!({ "type": "AdamW", "params": params });
        let config = json!({ "optimizer": optimizer, "gradient_clipping": clip });
        place.write("c.json", config.to_string());
        for (mesh, steps) in [("1x1", 1), ("2x2", 1), ("2x2", 3), ("1x3", 2)] {
            let (config, step_flag) = (place.path("c.json").display().to_string(), steps.to_string());
            let flags = ["--mesh", mesh, "--steps", &step_flag, "--config", &config, "--zero-stage", "3"];
            let written = written("tiny_strong", &flags);
            let label = format!("{trajectory} {mesh} after {steps}");
            // The gradients are those of the first step, unclipped.
            assert_pytorch_s(&label, &written, "tiny_strong");
            let expected = fixture_tensors("tiny_strong", &format!("{trajectory}_step{steps}.safetensors"));
            let lr = adamw["lr"].as_f64().unwrap();
            let parameters = take(&written, "param.");
            assert_trained_as_by_pytorch(&label, &parameters, &expected, lr, f64::from(steps));
        }
    }
}
