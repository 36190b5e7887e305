//! `ulysses checkpoint`.

mod earlier_version;
pub(super) mod resume;

use crate::golden;
use crate::support::cli::{Outcome, Workplace};
use crate::support::reference::load_tensors;
use crate::train::word_tokenizer;
use serde_json::{Value, json};
use std::fs;

/// A run of two steps on two ranks, saved after each step.
fn trained() -> Workplace {
    let place = Workplace::new();
    let vocab = json!({ "[UNK]": 0, "the": 1, "quick": 2, "brown": 3, "fox": 4 });
    place.write("tok/tokenizer.json", word_tokenizer(vocab));
    let config =
        json!({ "mesh_param": [2, 1], "zero_optimization": { "stage": 3 }, "checkpoint": { "interval": 1 } });
    place.write_config("c.json", config);
    let tokenizer = ["--tokenizer", "tok/tokenizer.json", "--seq-len", "16"];
    place.run(&[&["train", "c.json", "--steps", "2"], &tokenizer[..]].concat()).assert_done();
    place
}

#[test]
fn verify_inspect_and_diff_describe_checkpoints() {
    let place = trained();
    let outcome = place.run(&["checkpoint", "verify", "out/step_00000001"]);
    assert!(outcome.assert_done().stdout.contains("out/step_00000001: valid, 6 files"), "{outcome:?}");
    let outcome = place.run(&["checkpoint", "inspect", "out"]);
    let expected = [
        "checkpoint  out/step_00000002",
        "mesh dp 2 × sp 1, ZeRO stage 3; model state in 2 partitions",
        "2 (2 optimizer updates)",
        "8 sequences of 16 tokens consumed, seed 1234",
        "parameters, exp_avg, exp_avg_sq",
        "model.embed_tokens.weight",
    ];
    for expected in expected {
        assert!(outcome.assert_done().stdout.contains(expected), "no {expected:?} in {outcome:?}");
    }
    let outcome = place.run(&["checkpoint", "diff", "out/step_00000001", "out"]);
    outcome.assert_refused(1, &["the checkpoints differ"]);
    assert!(outcome.stdout.contains("exp_avg      lm_head.weight:"), "{outcome:?}");
    assert!(outcome.stdout.contains("steps 1 and 2: "), "{outcome:?}");
    assert!(outcome.stdout.contains("; largest absolute difference "), "{outcome:?}");
    let within =
        |tolerance| place.run(&["checkpoint", "diff", "out/step_00000001", "out", "--tolerance", tolerance]);
    within("1e3").assert_done();
    within("1e-9").assert_refused(1, &["the checkpoints differ by more than 1e-9"]);
    within("-1").assert_refused(2, &["expected a number of at least 0"]);
    place.run(&["checkpoint", "diff", "out", "out/step_00000002"]).assert_done();
    for dir in ["out", "out/step_00000002"] {
        let outcome = place.run(&["eval", dir, "--data", "text.txt"]);
        outcome.assert_refused(2, &[&format!("`ulysses checkpoint export {dir} --output DIR`")]);
    }
    for (path, found) in [("tok", "neither"), ("nowhere", "nothing")] {
        let message =
            format!("{path}: expected a checkpoint, or a directory with checkpoints, found {found}");
        place.run(&["checkpoint", "verify", path]).assert_refused(2, &[&message]);
    }
}

#[test]
fn an_exported_model_keeps_its_training() {
    let place = trained();
    let outcome = place.run(&["checkpoint", "export", "out", "--output", "hf"]);
    assert!(outcome.assert_done().stdout.contains("hf: 1 weight file,"), "{outcome:?}");
    assert_eq!(place.read("hf/tokenizer.json"), place.read("tok/tokenizer.json"));
    // The same step 3, once from the checkpoint and once as the first of a run on the export.
    let tokenizer = ["--tokenizer", "tok/tokenizer.json", "--seq-len", "16"];
    place.run(&[&["train", "c.json", "--steps", "3", "--resume"], &tokenizer[..]].concat()).assert_done();
    place
        .run(
            &[&["train", "c.json", "--steps", "1", "--model", "hf", "--output", "anew"], &tokenizer[..]]
                .concat(),
        )
        .assert_done();
    let (resumed, anew) = (place.losses("out/metrics.jsonl"), place.losses("anew/metrics.jsonl"));
    // Other sequences give another loss, but that of a trained model.
    assert!((anew[0] - resumed[0]).abs() > 1e-3, "{resumed:?} {anew:?}");
    assert!((anew[0] - resumed[2]).abs() < (resumed[0] - resumed[2]).abs(), "{resumed:?} {anew:?}");
}

#[test]
fn exports_are_split_into_files_and_refused_with_a_reason() {
    let place = trained();
    let arguments = ["checkpoint", "export", "out", "--dtype", "bf16", "--max-file-mb", "1"];
    place.run(&[&arguments[..], &["--output", "small"]].concat()).assert_done();
    assert_eq!(place.read_json("small/config.json")["torch_dtype"], "bfloat16");
    let outcome = place.run(&[&arguments[..], &["--output", "small"]].concat());
    outcome.assert_refused(2, &["--output small", "exists already"]);
    let outcome = place.run(&["checkpoint", "export", "out", "--output", "other", "--tokenizer", "c.json"]);
    outcome.assert_refused(2, &["would have no tokenizer", "c.json"]);
    fs::remove_file(place.path("tok/tokenizer.json")).unwrap();
    let outcome = place.run(&["checkpoint", "export", "out", "--output", "other"]);
    outcome.assert_refused(2, &["tok/tokenizer.json: no such tokenizer"]);
    assert!(!place.path("other").exists());
}

/// A run of one step from a model directory whose config has fields that do not affect the shape.
fn trained_from_a_model() -> Workplace {
    let place = Workplace::new();
    let weights = golden("tiny_strong", "model.safetensors");
    place.write("model/model.safetensors", fs::read(weights).unwrap());
    let mut config: Value =
        serde_json::from_slice(&fs::read(golden("tiny_strong", "config.json")).unwrap()).unwrap();
    config["dtype"] = json!("bfloat16");
    config["bos_token_id"] = json!(1);
    config["eos_token_id"] = json!([2, 5]);
    config["pad_token_id"] = json!(0);
    config["tie_word_embeddings"] = json!(true);
    config["_name_or_path"] = json!("somebody/a-model");
    place.write("model/config.json", config.to_string());
    place.write("model/generation_config.json", json!({ "eos_token_id": [2, 5], "top_p": 0.9 }).to_string());
    place.write_config("c.json", json!({ "checkpoint": {}, "ulysses": { "model": "model", "steps": 1 } }));
    place.run(&["train", "c.json"]).assert_done();
    place
}

fn export(place: &Workplace, output: &str, arguments: &[&str]) -> Outcome {
    place.run(&[&["checkpoint", "export", "out", "--output", output], arguments].concat())
}

/// The `config.json` that an f32 export of the source must have.
fn kept_config(place: &Workplace) -> Value {
    let mut config = place.read_json("model/config.json");
    config["dtype"] = json!("float32");
    // The head is not tied.
    config["tie_word_embeddings"] = json!(false);
    config
}

#[test]
fn an_export_keeps_every_field_of_the_initial_model() {
    let place = trained_from_a_model();
    let kept = kept_config(&place);
    let generation = place.read_json("model/generation_config.json");
    // The fields come from the checkpoint itself.
    fs::remove_dir_all(place.path("model")).unwrap();
    export(&place, "hf", &["--dtype", "f32"]).assert_done();
    assert_eq!(place.read_json("hf/config.json"), kept);
    assert_eq!(place.read_json("hf/generation_config.json"), generation);
    let outcome = export(&place, "as-source", &[]);
    assert!(outcome.assert_done().stderr.contains("--dtype f32 keeps every bit"), "{outcome:?}");
    assert_eq!(place.read_json("as-source/config.json")["dtype"], "bfloat16");
    let bytes = |dir: &str| fs::metadata(place.path(dir).join("model.safetensors")).unwrap().len();
    assert!(bytes("as-source") < bytes("hf") * 6 / 10);
    export(&place, "half", &["--dtype", "fp16"]).assert_done();
    assert_eq!(place.read_json("half/config.json")["dtype"], "float16");
    place.run(&["eval", "half", "--data", "text.txt", "--seq-len", "64"]).assert_done();
}

#[test]
fn frozen_parameters_of_a_run_in_16_bits_are_exported_as_they_came() {
    let place = trained_from_a_model();
    let exported = |run: &str, output: &str| {
        let outcome = place.run(&["checkpoint", "export", run, "--output", output, "--dtype", "f32"]);
        let weights = load_tensors(&place.path(&format!("{output}/model.safetensors"))).unwrap();
        let embedding = weights["model.embed_tokens.weight"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        (outcome.assert_done().stderr.clone(), embedding)
    };
    for model in ["nano", "model"] {
        let [exact, of_bf16] = [false, true].map(|is_bf16| {
            let run = format!("{model}-{is_bf16}");
            let groups = json!([{ "match": "embed_tokens", "frozen": true }]);
            let ulysses = json!({ "model": model, "steps": 1, "output": run, "parameter_groups": groups });
            let config = json!({ "bf16": { "enabled": is_bf16 }, "checkpoint": {}, "ulysses": ulysses });
            place.write_config("frozen.json", config);
            place.run(&["train", "frozen.json"]).assert_done();
            exported(&run, &format!("{run}-exported")).1
        });
        assert!(exact == of_bf16, "{model}");
    }
    fs::rename(place.path("model"), place.path("moved")).unwrap();
    let (notes, rounded) = exported("model-true", "rounded");
    assert!(notes.contains("exported in the 16 bits of the run: 1 frozen parameter;"), "{notes}");
    assert!(rounded != exported("model-false", "exact").1);
}

#[test]
fn parameters_beyond_the_range_of_fp16_are_not_exported_as_infinities() {
    let place = Workplace::new();
    place.write("model/config.json", fs::read(golden("tiny_strong", "config.json")).unwrap());
    let mut tensors: std::collections::HashMap<_, _> =
        load_tensors(golden("tiny_strong", "model.safetensors").as_ref()).unwrap().into_iter().collect();
    let large = (tensors["model.embed_tokens.weight"].ones_like().unwrap() * 1e5).unwrap();
    tensors.insert("model.embed_tokens.weight".to_owned(), large);
    candle_core::safetensors::save(&tensors, place.path("model/model.safetensors")).unwrap();
    place.write_config("c.json", json!({ "checkpoint": {}, "ulysses": { "model": "model", "steps": 1 } }));
    place.run(&["train", "c.json"]).assert_done();
    export(&place, "half", &["--dtype", "fp16"])
        .assert_refused(1, &["model.embed_tokens.weight", "out of range for float16"]);
    assert!(!place.path("half").exists());
}

/// Turns a checkpoint into one of an earlier version.
fn forget_source(place: &Workplace) {
    let name = "out/step_00000001/manifest.json";
    let mut manifest = place.read_json(name);
    let fields = manifest.as_object_mut().unwrap();
    fields.shift_remove("source").unwrap();
    fields.shift_remove("blake3").unwrap();
    let text = serde_json::to_string_pretty(&manifest).unwrap();
    let body = text.strip_suffix("\n}").unwrap();
    place.write(name, format!("{body},\n  \"blake3\": \"{}\"\n}}\n", blake3::hash(body.as_bytes())));
}

#[test]
fn an_export_of_an_old_checkpoint_takes_fields_from_the_model_or_lists_missing_ones() {
    let place = trained_from_a_model();
    forget_source(&place);
    let outcome = export(&place, "found", &["--dtype", "f32"]);
    assert!(outcome.assert_done().stderr.contains("using that of model"), "{outcome:?}");
    assert_eq!(place.read_json("found/config.json"), kept_config(&place));
    assert!(place.path("found/generation_config.json").exists());
    // The directory now contains another model.
    let mut other = place.read_json("model/config.json");
    other["rms_norm_eps"] = json!(1e-6);
    place.write("model/config.json", other.to_string());
    let outcome = export(&place, "lacking", &[]);
    for expected in ["model now describes another model", "`eos_token_id`", "`max_position_embeddings` is 64"]
    {
        assert!(outcome.assert_done().stderr.contains(expected), "no {expected:?} in {outcome:?}");
    }
    let config = place.read_json("lacking/config.json");
    assert_eq!((&config["eos_token_id"], &config["torch_dtype"]), (&Value::Null, &json!("float32")));
    place.run(&["eval", "lacking", "--data", "text.txt", "--seq-len", "64"]).assert_done();
}
