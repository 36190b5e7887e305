//! `ulysses checkpoint`.

use crate::support::cli::Workplace;
use crate::train::word_tokenizer;
use serde_json::json;
use std::fs;

/// A run of two steps, saved after each, on two ranks.
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
fn verify_inspect_and_diff_say_what_there_is() {
    let place = trained();
    let outcome = place.run(&["checkpoint", "verify", "out/step_00000001"]);
    assert!(outcome.assert_done().stdout.contains("out/step_00000001: sound, 6 files"), "{outcome:?}");
    let outcome = place.run(&["checkpoint", "inspect", "out"]);
    let expected = [
        "checkpoint  out/step_00000002",
        "mesh dp 2 × sp 1, ZeRO stage 3",
        "2 (2 updates)",
        "8 samples of 16 tokens, seed 1234",
        "parameters, exp_avg, exp_avg_sq × 2 partition(s)",
        "model.embed_tokens.weight",
    ];
    for expected in expected {
        assert!(outcome.assert_done().stdout.contains(expected), "no {expected:?} in {outcome:?}");
    }
    let outcome = place.run(&["checkpoint", "diff", "out/step_00000001", "out"]);
    outcome.assert_refused(1, &["the checkpoints differ"]);
    assert!(outcome.stdout.contains("exp_avg      lm_head.weight:"), "{outcome:?}");
    assert!(outcome.stdout.contains("steps 1 and 2: "), "{outcome:?}");
    place.run(&["checkpoint", "diff", "out", "out/step_00000002"]).assert_done();
    for dir in ["out", "out/step_00000002"] {
        let outcome = place.run(&["eval", dir, "--data", "text.txt"]);
        outcome.assert_refused(2, &[&format!("`ulysses checkpoint export {dir} --output DIR`")]);
    }
    place.run(&["checkpoint", "verify", "tok"]).assert_refused(2, &["tok: neither a checkpoint nor"]);
}

#[test]
fn an_exported_model_trains_on_from_where_it_was() {
    let place = trained();
    let outcome = place.run(&["checkpoint", "export", "out", "--output", "hf"]);
    assert!(outcome.assert_done().stdout.contains("hf: 1 weight file(s)"), "{outcome:?}");
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
    // Other rows, so another loss; but that of a model that has trained.
    assert!((anew[0] - resumed[0]).abs() > 1e-3, "{resumed:?} {anew:?}");
    assert!((anew[0] - resumed[2]).abs() < (resumed[0] - resumed[2]).abs(), "{resumed:?} {anew:?}");
}

#[test]
fn exports_are_cut_into_files_and_refused_with_a_reason() {
    let place = trained();
    let arguments = ["checkpoint", "export", "out", "--dtype", "bf16", "--max-file-mb", "1"];
    place.run(&[&arguments[..], &["--output", "small"]].concat()).assert_done();
    assert_eq!(place.read_json("small/config.json")["torch_dtype"], "bfloat16");
    let outcome = place.run(&[&arguments[..], &["--output", "small"]].concat());
    outcome.assert_refused(2, &["--output small", "of this name already"]);
    let outcome = place.run(&["checkpoint", "export", "out", "--output", "other", "--tokenizer", "c.json"]);
    outcome.assert_refused(2, &["would have no tokenizer", "c.json"]);
    fs::remove_file(place.path("tok/tokenizer.json")).unwrap();
    let outcome = place.run(&["checkpoint", "export", "out", "--output", "other"]);
    outcome.assert_refused(2, &["tok/tokenizer.json: no such tokenizer"]);
    assert!(!place.path("other").exists());
}
