//! Interoperability with Python: `ulysses verify` and transformers compute the same logits, for models
//! exported by ulysses and for models created by transformers.
//!
//! TensorBoard reads the event files of a run.
//!
//! Needs a Python with `torch` and `transformers`, or `tensorboard`: `ULYSSES_PYTHON`, or else `python3`. Without it
//! the tests are reported as ignored, with the reason in their names. `just interop`
//! creates a virtual environment and runs the tests.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

use libtest_mimic::{Arguments, Trial};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, ExitCode};
use support::cli::Workplace;

const TOLERANCE: f64 = 2e-5;

/// The model families of `make_model.py`.
const FAMILIES: [&str; 49] = [
    "llama",
    "llama_linear",
    "llama_dynamic",
    "llama3",
    "llama_untied",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_windows",
    "qwen3_5",
    "gemma2",
    "gemma3",
    "gemma3_capped",
    "granite",
    "olmo2",
    "phi3",
    "smollm3",
    "gemma",
    "ministral",
    "ministral3",
    "olmo3",
    "exaone4",
    "exaone4_full",
    "seed_oss",
    "phi3_long",
    "phi3_short",
    "cohere",
    "cohere2",
    "glm",
    "glm4",
    "glm4_linear",
    "ernie4_5",
    "ernie4_5_biases",
    "gpt2",
    "gpt2_untied",
    "gpt_neox",
    "gpt_neox_linear",
    "starcoder2",
    "nemotron",
    "nemotron_biases",
    "stablelm",
    "lfm2",
    "lfm2_biases",
    "gemma3_vision",
    "mistral3_vision",
    "ministral3_vision",
    "qwen3_vision",
    "qwen3_5_vision",
];

fn main() -> ExitCode {
    let python = std::env::var("ULYSSES_PYTHON").unwrap_or_else(|_| "python3".into());
    // Make a relative path absolute, since the scripts run in other directories.
    let python = if python.contains('/') {
        std::path::absolute(&python).expect("non-empty path").display().to_string()
    } else {
        python
    };
    let missing = missing(&python, "torch, transformers");
    let test_with = |missing: &Option<String>, name: &str, run: Box<dyn FnOnce(&str) + Send>| {
        let python = python.clone();
        let run = move || {
            run(&python);
            Ok(())
        };
        let name = match missing {
            None => name.to_owned(),
            Some(reason) => format!("{name} [skipped: {reason}]"),
        };
        Trial::test(name, run).with_ignored_flag(missing.is_some())
    };
    let test = |name: &str, run| test_with(&missing, name, run);
    let mut trials = vec![
        test_with(
            &self::missing(&python, "tensorboard"),
            "tensorboard_reads_the_metrics_of_a_run_from_its_event_files",
            Box::new(tensorboard),
        ),
        test(
            "transformers_computes_the_logits_of_an_exported_model",
            Box::new(|python| exported(python, "5000")),
        ),
        test("transformers_reads_an_export_in_several_files", Box::new(|python| exported(python, "1"))),
    ];
    for family in FAMILIES {
        let name = format!("transformers_and_verify_agree_on_a_random_{family}");
        trials.push(test(&name, Box::new(move |python| imported(python, family))));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Returns why a Python cannot import the modules of a test, or `None` if it can.
fn missing(python: &str, modules: &str) -> Option<String> {
    match Command::new(python).args(["-c", &format!("import {modules}")]).output() {
        Err(error) => Some(format!("cannot run {python}: {error}")),
        Ok(output) if !output.status.success() => {
            let (stderr, cannot) =
                (String::from_utf8_lossy(&output.stderr), format!("cannot import {modules}"));
            Some(format!("{python}: {}", stderr.lines().last().unwrap_or(&cannot)))
        }
        Ok(_) => None,
    }
}

/// Trains, resumes, and reads the event files with TensorBoard.
fn tensorboard(python: &str) {
    let place = Workplace::new();
    let changes = json!({
        "checkpoint": {},
        "tensorboard": { "enabled": true, "output_path": "boards", "job_name": "run" },
        "ulysses": { "validation": { "fraction": 0.1 } },
    });
    place.write_config("c.json", changes);
    place.run(&["train", "c.json", "--steps", "3"]).assert_done();
    place.run(&["train", "c.json", "--steps", "5", "--resume"]).assert_done();
    let stdout = run_script(python, &place, &["read_events.py", "boards/run"]);
    let read: Value = serde_json::from_slice(&stdout).unwrap();
    let metrics = place.metrics("out/metrics.jsonl");
    let steps: Vec<&Value> = metrics.iter().filter(|line| line["loss"].is_number()).collect();
    assert_eq!(steps.len(), 5);
    for key in ["loss", "grad_norm", "tokens_per_second", "all_to_all_seconds"] {
        let events = read[format!("Train/Steps/{key}")].as_array().unwrap();
        assert_eq!(events.len(), 5, "{key}");
        for (event, step) in events.iter().zip(&steps) {
            assert_eq!(event[0], step["step"], "{key}");
            assert_eq!(event[1].as_f64().unwrap() as f32, step[key].as_f64().unwrap() as f32, "{key}");
        }
    }
    let samples = read["Train/Samples/train_loss"].as_array().unwrap();
    assert_eq!(
        samples.iter().map(|event| event[0].as_u64().unwrap()).collect::<Vec<_>>(),
        [4, 8, 12, 16, 20]
    );
    let evaluations = read["Eval/Steps/eval_loss"].as_array().unwrap();
    assert_eq!(evaluations.iter().map(|event| event[0].as_u64().unwrap()).collect::<Vec<_>>(), [3, 5]);
}

/// Trains on four ranks, exports, and compares the logits of `ulysses verify` and transformers
/// for one batch.
fn exported(python: &str, max_file_mb: &str) {
    let place = Workplace::new();
    let changes = json!({
        "mesh_param": [2, 2],
        "zero_optimization": { "stage": 3 },
        "checkpoint": {},
        "ulysses": { "model": "tiny", "steps": 20 },
    });
    place.write_config("c.json", changes);
    place.run(&["train", "c.json"]).assert_done();
    place.run(&["checkpoint", "export", "out", "--output", "hf", "--max-file-mb", max_file_mb]).assert_done();
    assert_eq!(place.path("hf/model.safetensors").exists(), max_file_mb != "1");
    compare(python, &place, ("tiny", "hf"), "2x1x2");
}

/// Creates a model in several files with transformers, and compares; then trains it for a step,
/// exports it, and compares again.
fn imported(python: &str, family: &str) {
    let place = Workplace::new();
    run_script(python, &place, &["make_model.py", family, "made"]);
    assert!(place.path("made/model.safetensors.index.json").exists(), "in several files");
    compare(python, &place, (family, "made"), "1x2");
    let changes = json!({
        "mesh_param": [2, 2],
        "zero_optimization": { "stage": 3 },
        "checkpoint": {},
        "ulysses": { "model": "made", "steps": 1 },
    });
    place.write_config("c.json", changes);
    place.run(&["train", "c.json"]).assert_done();
    place.run(&["checkpoint", "export", "out", "--output", "hf"]).assert_done();
    // A norm over all heads cannot be divided.
    let is_whole = ["olmo", "qwen3_5"].iter().any(|whole| family.starts_with(whole));
    let mesh = if is_whole { "1x3" } else { "1x2x2" };
    compare(python, &place, (family, "hf"), mesh);
    if family.ends_with("vision") {
        // Also checks that all other tensors are there, unchanged.
        run_script(python, &place, &["same_tensors.py", "made", "hf"]);
    }
}

/// Compares the logits of `ulysses verify` and transformers for one batch.
fn compare(python: &str, place: &Workplace, (family, model): (&str, &str), mesh: &str) {
    write_batch(&place.path("batch.safetensors"));
    let arguments = ["verify", "--model", model, "--batch", "batch.safetensors", "--mesh", mesh];
    place.run(&[&arguments[..], &["--output", "ours.safetensors"]].concat()).assert_done();
    let stdout = run_script(python, place, &["logits.py", model, "batch.safetensors", "ours.safetensors"]);
    let reported: Value = serde_json::from_slice(&stdout).unwrap();
    println!(
        "{family}, {model}: the logits differ by {} of the largest, {}",
        reported["error"], reported["largest"]
    );
    let (error, largest) = (reported["error"].as_f64().unwrap(), reported["largest"].as_f64().unwrap());
    assert!(largest > 1.0, "the logits must not be tiny: {reported}");
    // After its training step, heads of this model have outputs near 0, which their norm magnifies: by 9e-5 transformers
    // itself differs from a computation in f64, and by 1.1e-4 this library.
    let tolerance = if family == "qwen3_5_vision" { 4e-4 } else { TOLERANCE };
    assert!(error <= tolerance, "{reported}");
}

/// Runs a script of this directory in the workplace. Returns its output.
fn run_script(python: &str, place: &Workplace, script_and_arguments: &[&str]) -> Vec<u8> {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop");
    let [script, arguments @ ..] = script_and_arguments else { unreachable!("a script") };
    let output = Command::new(python)
        .arg(scripts.join(script))
        .args(arguments)
        .current_dir(place.path("."))
        .output()
        .unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Writes two sequences of 40 bytes of text.
fn write_batch(path: &Path) {
    let text = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs.";
    let ids: Vec<u8> = text.bytes().take(80).flat_map(|byte| i64::from(byte).to_le_bytes()).collect();
    let view = TensorView::new(Dtype::I64, vec![2, 40], &ids).unwrap();
    safetensors::serialize_to_file([("input_ids", view)], None, path).unwrap();
}
