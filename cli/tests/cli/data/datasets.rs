//! Datasets: packing, mixtures, epochs, validation, sequence length schedules, `ulysses eval`.

use crate::support::cli::Workplace;
use crate::train::word_tokenizer;
use serde_json::{Value, json};

/// A workplace with 40 documents of different lengths, and `text.txt`.
fn place() -> Workplace {
    let place = Workplace::new();
    for number in 0..40 {
        let words = ["alpha ", "beta ", "gamma ", "delta "].iter().cycle().skip(number % 4);
        let text: String = words.take(1 + number * 7 % 23).copied().collect();
        place.write(&format!("docs/{number:02}.txt"), text);
    }
    place
}

/// Bytes of all documents.
fn num_bytes(place: &Workplace) -> u64 {
    (0..40).map(|number| place.read(&format!("docs/{number:02}.txt")).len() as u64).sum()
}

/// Trains on the documents and returns the metrics of steps and of evaluations.
fn train(place: &Workplace, changes: Value, arguments: &[&str]) -> (Vec<Value>, Vec<Value>) {
    place.write_config("c.json", json!({ "ulysses": { "data": "docs" } }));
    let mut config = place.read_json("c.json");
    for (key, change) in changes.as_object().unwrap() {
        config["ulysses"][key] = change.clone();
    }
    config["checkpoint"] = json!({ "interval": 2 });
    if config["ulysses"].get("epochs").is_some() {
        config["ulysses"].as_object_mut().unwrap().remove("steps");
    }
    place.write("c.json", config.to_string());
    let arguments = [&["train", "c.json"], arguments].concat();
    place.run(&arguments).assert_done();
    let output = arguments.iter().position(|flag| *flag == "--output").map_or("out", |at| arguments[at + 1]);
    let records = place.metrics(&format!("{output}/metrics.jsonl"));
    records.into_iter().partition(|record| record.get("loss").is_some())
}

fn numbers(records: &[Value], key: &str) -> Vec<f64> {
    records.iter().map(|record| record[key].as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, label: &str) {
    assert_eq!(found.len(), expected.len(), "{label}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= tolerance * expected.abs(), "{label}: {found} for {expected}");
    }
}

#[test]
fn validation_loss_is_the_same_on_every_mesh_and_in_the_metrics() {
    let place = place();
    let validation = json!({ "validation": { "fraction": 0.2, "eval_interval": 2 }, "steps": 5 });
    let run = |mesh: &str| train(&place, validation.clone(), &["--mesh", mesh, "--output", mesh]);
    let (steps, expected) = run("1x1");
    assert_eq!((steps.len(), numbers(&expected, "step")), (5, vec![2.0, 4.0, 5.0]));
    for record in &expected {
        let [loss, perplexity] = ["eval_loss", "eval_perplexity"].map(|key| record[key].as_f64().unwrap());
        assert!((perplexity - loss.exp()).abs() < 1e-9 * perplexity, "{record}");
    }
    let losses = numbers(&expected, "eval_loss");
    assert!(losses[2] < losses[0], "{losses:?}");
    for mesh in ["2x1", "1x3", "4x1", "2x2"] {
        let (_, found) = run(mesh);
        assert_eq!(numbers(&found, "eval_tokens"), numbers(&expected, "eval_tokens"));
        assert_close(&numbers(&found, "eval_loss"), &losses, 1e-5, mesh);
    }
}

#[test]
fn validation_may_use_separate_data_and_fewer_batches() {
    let place = place();
    let run = |output: &str, validation: Value| {
        train(&place, json!({ "validation": validation, "steps": 2 }), &["--output", output]).1
    };
    let all = run("all", json!({ "data": "text.txt" }));
    assert_eq!((all.len(), all[0]["eval_tokens"].as_u64()), (1, Some(4499)));
    let some = run("some", json!({ "data": "text.txt", "eval_batches": 3 }));
    assert_eq!(some[0]["eval_tokens"], 3 * 4 * 64);
}

#[test]
fn an_evaluation_does_not_change_training() {
    let place = place();
    let exact = |changes: Value, output| {
        let (steps, _) = train(&place, changes, &["--mesh", "2x2", "--output", output]);
        let keys = ["step", "loss", "grad_norm", "tokens", "comm_bytes"];
        steps.iter().map(|step| keys.map(|key| step[key].to_string())).collect::<Vec<_>>()
    };
    let with = exact(json!({ "validation": { "data": "text.txt", "eval_interval": 1 } }), "with");
    assert_eq!(with, exact(json!({}), "without"));
}

#[test]
fn an_epoch_sees_every_token_once_on_every_mesh_and_after_a_resume() {
    let place = place();
    let tokens = |records: &[Value]| numbers(records, "label_tokens").iter().sum::<f64>();
    // The first byte of each document is not predicted.
    let predicted = (num_bytes(&place) - 40) as f64;
    let epochs = json!({ "epochs": 2 });
    let (whole, _) = train(&place, epochs.clone(), &["--output", "whole"]);
    assert_eq!(tokens(&whole), 2.0 * predicted);
    for mesh in ["2x1", "4x1", "2x2"] {
        let (other, _) = train(&place, epochs.clone(), &["--mesh", mesh, "--output", mesh]);
        assert_eq!(numbers(&other, "label_tokens"), numbers(&whole, "label_tokens"), "{mesh}");
        assert_close(&numbers(&other, "loss"), &numbers(&whole, "loss"), 1e-4, mesh);
    }
    // On another mesh, and for another epoch.
    let last = whole.len() as u64 / 4 * 2;
    let from = format!("--resume=whole/step_{last:08}");
    let (rest, _) = train(&place, epochs, &["--mesh", "2x1", "--output", "rest", &from]);
    assert_eq!(numbers(&rest, "label_tokens"), numbers(&whole, "label_tokens")[last as usize..]);
    let (more, _) = train(&place, json!({ "epochs": 3 }), &["--output", "more", &from]);
    let done: f64 = numbers(&whole, "label_tokens")[..last as usize].iter().sum();
    assert_eq!(tokens(&more) + done, 3.0 * predicted);
}

#[test]
fn a_finished_epoch_can_be_extended_by_another_without_losing_tokens() {
    let place = place();
    let (once, _) = train(&place, json!({ "epochs": 1 }), &["--output", "run"]);
    let manifest = place.read_json(&format!("run/step_{:08}/manifest.json", once.len()));
    let consumed = manifest["progress"]["data"]["samples_consumed"].as_u64().unwrap();
    assert_ne!(consumed % 4, 0, "the last batch was filled with masked rows");
    let (twice, _) = train(&place, json!({ "epochs": 2 }), &["--output", "run", "--resume"]);
    let predicted = 2 * (num_bytes(&place) - 40);
    assert_eq!(numbers(&twice, "label_tokens").iter().sum::<f64>() as u64, predicted);
}

#[test]
fn text_field_and_end_of_document_come_from_the_config() {
    let place = place();
    place.write("a.jsonl", "{\"text\": 7, \"body\": \"abcd\"}\n");
    place.write("b.bin", [1_u16, 2, 9, 3, 4, 5, 9, 6, 7].map(u16::to_le_bytes).concat());
    let data = json!(["a.jsonl", "b.bin"]);
    let changes = json!({ "data": data, "text_field": "body", "end_of_document": 9, "epochs": 1 });
    let (steps, _) = train(&place, changes, &[]);
    // Four documents of 4, 3, 4 and 2 tokens, the first of which is not predicted.
    assert_eq!(numbers(&steps, "label_tokens").iter().sum::<f64>(), 9.0);
    place.write_config("c.json", json!({ "ulysses": { "data": "a.jsonl" } }));
    let wrong = place.run(&["train", "c.json", "--output", "no"]);
    wrong.assert_refused(1, &["a.jsonl, line 1, `text`: invalid type: integer `7`, expected a string"]);
    assert!(!wrong.stderr.contains("column"), "{wrong:?}");
}

#[test]
fn validation_tokens_outside_the_vocabulary_are_refused_before_training() {
    let place = place();
    place.write("big.bin", [1_u16, 9999, 2].map(u16::to_le_bytes).concat());
    let ulysses = json!({ "data": "docs", "validation": { "data": "big.bin" } });
    place.write_config("c.json", json!({ "ulysses": ulysses }));
    place
        .run(&["train", "c.json"])
        .assert_refused(1, &["big.bin", "token id 9999 is outside the vocabulary"]);
    assert!(!place.path("out").exists(), "nothing was written");
}

#[test]
fn packings_and_repeated_paths_train() {
    let place = place();
    let paths = ["--data", "docs", "--data", "text.txt"];
    let valid = |packing: &str| {
        let arguments = [&paths[..], &["--packing", packing, "--epochs", "1", "--output", packing]].concat();
        let (steps, _) = train(&place, json!({ "epochs": 1 }), &arguments);
        let padding = steps[0]["padding_share"].as_f64().unwrap();
        assert!(padding > 0.0 && padding < 0.1, "{packing}: {padding}");
        numbers(&steps, "label_tokens").iter().sum::<f64>() as u64
    };
    let all = num_bytes(&place) + 4500;
    assert_eq!([valid("greedy"), valid("cut"), valid("concat")], [all - 41, all - 41, all - 1]);
    let wrong = place.run(&["train", "c.json", "--packing", "tight"]);
    wrong.assert_refused(2, &["--packing", "tight", "expected greedy, cut or concat"]);
}

#[test]
fn a_mixture_draws_by_weight_and_has_no_epochs() {
    let place = place();
    let sources =
        |weight: f64| json!([{ "path": "docs", "weight": weight }, { "path": "text.txt", "weight": 1.0 }]);
    let losses = |weight: f64, mesh: &str, output: &str| {
        let changes = json!({ "data": sources(weight), "steps": 6 });
        numbers(&train(&place, changes, &["--mesh", mesh, "--output", output]).0, "loss")
    };
    let (even, odd) = (losses(1.0, "1x1", "even"), losses(9.0, "1x1", "odd"));
    assert_ne!(even, odd);
    assert_close(&losses(9.0, "2x2", "mesh"), &odd, 1e-4, "2x2");
    let epochs = place.run(&["train", "c.json", "--epochs", "2", "--output", "no"]);
    epochs.assert_refused(2, &["`ulysses.epochs`", "weights", "`ulysses.steps`"]);
    place.write_config("c.json", json!({ "ulysses": { "seq_len_schedule": [[2, 32]] } }));
    let schedule = place.run(&["train", "c.json", "--epochs", "2"]);
    schedule.assert_refused(2, &["`ulysses.epochs`", "`ulysses.seq_len_schedule`"]);
}

#[test]
fn sequence_length_schedules_can_be_resumed_in_any_phase() {
    let place = place();
    let grows = json!({ "seq_len_schedule": [[4, 128], [7, 96]], "steps": 10 });
    let exact = |records: &[Value]| {
        let keys = ["step", "loss", "grad_norm", "tokens"];
        records.iter().map(|step| keys.map(|key| step[key].to_string())).collect::<Vec<_>>()
    };
    let (whole, _) = train(&place, grows.clone(), &["--mesh", "2x2", "--output", "whole"]);
    let whole = exact(&whole);
    assert_eq!(whole.len(), 10);
    for step in [2, 4, 6, 8] {
        let (from, output) = (format!("--resume=whole/step_{step:08}"), format!("from-{step}"));
        let (rest, _) = train(&place, grows.clone(), &["--mesh", "2x2", "--output", &output, &from]);
        assert_eq!(exact(&rest), whole[step..], "from step {step}");
    }
    // A run resumes with another sequence length.
    train(&place, json!({ "steps": 4 }), &["--mesh", "2x2", "--output", "short"]);
    let arguments = ["--mesh", "2x2", "--output", "short", "--resume"];
    let (longer, _) = train(&place, grows, &arguments);
    assert_eq!(exact(&longer), whole);
    let tokens = |range: std::ops::Range<usize>| {
        whole[range].iter().map(|step| step[3].parse::<u64>().unwrap()).max().unwrap()
    };
    assert!(tokens(0..4) <= 4 * 64 && tokens(4..7) > 4 * 96 && tokens(7..10) <= 4 * 96);
}

#[test]
fn a_resume_on_other_data_or_packing_is_refused() {
    let place = place();
    train(&place, json!({ "steps": 2 }), &["--packing", "cut"]);
    let other = |arguments: &[&str]| {
        place.run(&[&["train", "c.json", "--steps", "4", "--resume"], arguments].concat())
    };
    // The same number of sequences, with other documents.
    let hash = ["the hash of data, packing and weights", "ulysses.seq_len_schedule"];
    other(&["--packing", "concat"]).assert_refused(2, &hash);
    let changed = place.read("docs/07.txt").replace("alpha", "omega");
    place.write("docs/07.txt", changed);
    other(&["--packing", "cut"]).assert_refused(2, &hash);
    other(&["--packing", "cut", "--seq-len", "32"]).assert_refused(2, &["seq_len", "64", "32"]);
}

#[test]
fn eval_gives_the_same_loss_on_every_mesh_and_batch_size() {
    let place = place();
    let eval = |arguments: &[&str]| -> Value {
        let common = ["eval", "nano", "--data", "docs", "--seq-len", "64", "--json"];
        let outcome = place.run(&[&common, arguments].concat());
        serde_json::from_str(&outcome.assert_done().stdout).unwrap()
    };
    let expected = eval(&[]);
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    assert_eq!(expected["tokens"], num_bytes(&place) - 40);
    let bits = number(&expected, "loss") / std::f64::consts::LN_2;
    assert!((number(&expected, "bits_per_byte") - bits).abs() < 1e-12, "a token is a byte: {expected}");
    for arguments in [&["--mesh", "2x2"][..], &["--mesh", "4x1"], &["--mesh", "1x3"], &["--batch-size", "5"]]
    {
        let found = eval(arguments);
        assert_eq!(found["tokens"], expected["tokens"]);
        let label = format!("{arguments:?}");
        assert_close(&[number(&found, "loss")], &[number(&expected, "loss")], 1e-6, &label);
    }
    let concat = eval(&["--packing", "concat"]);
    assert_eq!(
        (&concat["tokens"], &concat["bytes"]),
        (&json!(num_bytes(&place) - 1), &json!(num_bytes(&place) - 1))
    );
    let text = place.run(&["eval", "nano", "--data", "docs"]);
    for expected in ["bits per byte", "without special tokens and each document's first token"] {
        assert!(text.assert_done().stdout.contains(expected), "no {expected:?} in {text:?}");
    }
}

#[test]
fn bits_per_byte_do_not_depend_on_the_tokenizer() {
    let place = place();
    let vocab = json!({ "[UNK]": 0, "alpha": 1, "beta": 2, "gamma": 3, "delta": 4 });
    place.write("tokenizer.json", word_tokenizer(vocab));
    place.write("words.txt", "alpha beta gamma delta");
    let outcome = place.run(&[
        "eval",
        "nano",
        "--data",
        "words.txt",
        "--tokenizer",
        "tokenizer.json",
        "--seq-len",
        "8",
        "--json",
    ]);
    let found: Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    // " beta gamma delta"
    assert_eq!((&found["tokens"], &found["bytes"]), (&json!(3), &json!(17)));
    let bits = 3.0 * found["loss"].as_f64().unwrap() / std::f64::consts::LN_2 / 17.0;
    assert!((found["bits_per_byte"].as_f64().unwrap() - bits).abs() < 1e-12, "{found}");
}

#[test]
fn eval_refuses_invalid_arguments() {
    let place = place();
    let eval = |arguments: &[&str]| place.run(&[&["eval", "nano"], arguments].concat());
    eval(&[]).assert_refused(2, &["--data"]);
    eval(&["--data", "nothing"]).assert_refused(1, &["nothing does not exist"]);
    eval(&["--data", "docs", "--seq-len", "0"])
        .assert_refused(2, &["--seq-len: expected at least 1, found 0"]);
    eval(&["--data", "docs", "--batch-size", "0"]).assert_refused(2, &["--batch-size"]);
    eval(&["--data", "docs", "--mesh", "1x5"]).assert_refused(2, &["num_heads = 4", "sp = 5"]);
    place.write("short.txt", "a");
    eval(&["--data", "short.txt"]).assert_refused(1, &["short.txt", "no next token"]);
}

#[test]
fn the_summary_shows_data_wait_and_padding() {
    let place = place();
    place.write_config("c.json", json!({ "ulysses": { "data": "docs" } }));
    let outcome = place.run(&["train", "c.json", "--verbose"]);
    let line =
        outcome.assert_done().stdout.lines().find(|line| line.starts_with("data ")).unwrap().to_owned();
    assert!(line.contains("% of the time") && line.ends_with("% of the tokens are padding"), "{line}");
    assert!(
        outcome.stderr.contains("sequences of 64 tokens, ") && outcome.stderr.contains(" % padding"),
        "{outcome:?}"
    );
    let mut without_labels = 0;
    for step in place.metrics("out/metrics.jsonl") {
        let [waited, all] = ["data_seconds", "step_seconds"].map(|key| step[key].as_f64().unwrap());
        assert!(waited >= 0.0 && waited <= all, "{step}");
        let [tokens, with_labels] = ["tokens", "label_tokens"].map(|key| step[key].as_u64().unwrap());
        assert!(tokens == 4 * 64 && with_labels <= tokens, "{step}");
        without_labels += tokens - with_labels;
    }
    assert!(without_labels > 0, "padding and last tokens are computed too");
}
