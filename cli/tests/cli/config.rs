//! `ulysses config`.

use crate::support::cli::Workplace;
use serde_json::json;

#[test]
fn resolve_completes_a_file_and_shows_auto_values() {
    let place = Workplace::new();
    place.write(
        "c.json",
        r#"{"train_batch_size": 8, "gradient_clipping": "auto", "dump_state": false, "scheduler":
            {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}"#,
    );
    let outcome = place.run(&["config", "resolve", "c.json", "--mesh", "2x2", "--steps", "40"]);
    outcome.assert_done();
    let resolved: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(resolved["train_micro_batch_size_per_gpu"], json!(4));
    assert_eq!(resolved["sequence_parallel_size"], json!(2));
    assert_eq!(resolved["scheduler"]["params"]["total_num_steps"], json!(40));
    for remark in [
        "auto: `gradient_clipping` = 1.0 (the default of Hugging Face's Trainer)",
        "auto: `scheduler.params.total_num_steps` = 40",
        "note: `dump_state` has no effect",
    ] {
        assert!(outcome.stderr.contains(remark), "{}", outcome.stderr);
    }
    place.write("resolved.json", &outcome.stdout);
    place.run(&["config", "resolve", "resolved.json"]).assert_done();
}

#[test]
fn resolve_lists_values_that_depend_on_a_missing_flag() {
    let place = Workplace::new();
    place.write(
        "c.json",
        r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}"#,
    );
    let outcome = place.run(&["config", "resolve", "c.json", "--set", "seed=5", "--zero-stage", "2"]);
    let resolved: serde_json::Value = serde_json::from_str(&outcome.assert_done().stdout).unwrap();
    assert_eq!(resolved["scheduler"]["params"]["total_num_steps"], json!("auto"));
    assert_eq!((&resolved["seed"], &resolved["zero_optimization"]["stage"]), (&json!(5), &json!(2)));
    for waiting in [
        "unset: `scheduler.params.total_num_steps` needs --steps, or `ulysses.steps`",
        "unset: `data_parallel_size` needs --mesh: the batch sizes need dp 2, such as 2x1",
        "unset: `ulysses.model` needs --model",
    ] {
        assert!(outcome.stderr.contains(waiting), "{}", outcome.stderr);
    }
    let outcome = place.run(&["config", "resolve", "c.json", "--mesh", "2x1", "--steps", "9"]);
    assert!(!outcome.assert_done().stderr.contains("`data_parallel_size` waits"), "{outcome:?}");
    place
        .run(&["config", "resolve", "c.json", "--mesh", "3x1"])
        .assert_refused(2, &["`train_batch_size` is 8"]);
}

#[test]
fn errors_in_set_are_reported_like_errors_in_the_file() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    for command in [&["train", "c.json"][..], &["plan", "c.json"], &["config", "resolve", "c.json"]] {
        let run = |flags: &[&str]| place.run(&[command, flags].concat());
        run(&["--set", "zero_optimization.stge=3"]).assert_refused(
            2,
            &["--set zero_optimization.stge=3: unknown key", "`zero_optimization.stage`?"],
        );
        run(&["--set", "seed"]).assert_refused(2, &["'seed' for '--set ", "KEY=VALUE"]);
        run(&["--zero-stage", "4"]).assert_refused(2, &["--zero-stage", "4"]);
        run(&["--batch-size", "0"]).assert_refused(2, &["--batch-size 0: `train_batch_size`: expected"]);
    }
}

#[test]
fn errors_are_shown_with_their_line() {
    let place = Workplace::new();
    place.write("c.json", "{\n  \"gradient_cliping\": 1\n}");
    let outcome = place.run(&["config", "resolve", "c.json"]);
    outcome.assert_refused(
        2,
        &["c.json:2:3", "did you mean `gradient_clipping`?", "    2 |   \"gradient_cliping\": 1"],
    );
    assert!(!outcome.stderr.contains('\u{1b}'), "{:?}", outcome.stderr);
}

#[test]
fn explain_shows_a_key_and_suggests_similar_ones() {
    let place = Workplace::new();
    let outcome = place.run(&["config", "explain", "zero_optimization.contiguous_gradients"]);
    outcome.assert_done();
    assert!(
        outcome.stdout.contains("no effect: the gradients of a layer are always contiguous"),
        "{}",
        outcome.stdout
    );
    place
        .run(&["config", "explain", "overlap_com"])
        .assert_refused(2, &["did you mean `zero_optimization.overlap_comm`?"]);
    let outcome = place.run(&["config", "explain", "learning_rate"]);
    assert!(
        outcome.assert_done().stdout.starts_with("`learning_rate` is called `optimizer.params.lr` here\n")
    );
}
