//! Invalid configs, data, tokenizers and output directories.

use crate::support::cli::{Outcome, Workplace};
use crate::train::word_tokenizer;
use serde_json::{Value, json};

/// Trains with changes to the default test config.
fn by_config(changes: Value) -> Outcome {
    let place = Workplace::new();
    place.write_config("c.json", changes);
    let outcome = place.run(&["train", "c.json"]);
    assert!(!place.path("out").exists(), "nothing is written: {outcome:?}");
    outcome
}

#[test]
fn unreadable_config_files_are_named() {
    let place = Workplace::new();
    place.run(&["train", "nothing.json"]).assert_refused(2, &["nothing.json", "No such file"]);
    place.run(&["train", "."]).assert_refused(2, &["config file .", "directory"]);
    place.write("bytes.json", [0xff, 0xfe, 0x00]);
    place.run(&["train", "bytes.json"]).assert_refused(2, &["bytes.json", "UTF-8"]);
}

/// `src/config/tests/diagnostics.rs` has every kind of error.
#[test]
fn config_errors_have_line_and_column() {
    let place = Workplace::new();
    place.write("c.json", "{\n  \"train_batch_sise\": 4\n}");
    place
        .run(&["train", "c.json"])
        .assert_refused(2, &["c.json:2:3", "`train_batch_sise`", "did you mean `train_batch_size`?"]);
}

#[test]
fn values_out_of_range_are_refused_with_their_key() {
    for (changes, key) in [
        (json!({ "ulysses": { "seq_len": 0 } }), "`ulysses.seq_len`"),
        (json!({ "ulysses": { "steps": 0 } }), "`ulysses.steps`"),
        (json!({ "ulysses": { "threads_per_rank": 0 } }), "`ulysses.threads_per_rank`"),
        (json!({ "bf16": { "enabled": 1 } }), "`bf16.enabled`"),
    ] {
        by_config(changes).assert_refused(2, &["c.json:1:", key]);
    }
}

#[test]
fn contradictory_batch_sizes_and_meshes_are_refused_with_the_equation() {
    let triple = json!({ "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2 });
    by_config(triple).assert_refused(2, &["`train_batch_size` is 4", "= 6", "make them agree"]);
    by_config(json!({ "mesh_param": [3, 1] })).assert_refused(2, &["4 is not a multiple of dp 3", "3 and 6"]);
    by_config(json!({ "train_batch_size": null })).assert_refused(2, &["batch size is not set"]);
    by_config(json!({ "train_batch_size": 1_000_000_000_000_u64 })).assert_refused(2, &["GiB", "batch"]);
}

#[test]
fn missing_required_settings_are_named() {
    for key in ["model", "data", "seq_len", "steps"] {
        let flag = format!("--{}", key.replace('_', "-"));
        let outcome = by_config(json!({ "ulysses": { key: null } }));
        outcome.assert_refused(2, &[&format!("`ulysses.{key}` is not set"), &flag]);
    }
}

#[test]
fn unreadable_data_is_refused() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    place.write("empty.txt", "");
    place.write("one.txt", "a");
    place.write("binary.dat", [0x80_u8, 0xff, 0x00, 0xc3].repeat(100));
    place.write("binaries/a.dat", [0x80_u8, 0xff]);
    std::fs::create_dir(place.path("nothing_in_it")).unwrap();
    for (data, expected) in [
        ("missing.txt", "does not exist; give a text or token file, a directory, or a pattern"),
        ("empty.txt", "contains no text"),
        ("nothing_in_it", "contains no text"),
        ("binary.dat", "is not valid UTF-8 text"),
        ("binaries", "1 not UTF-8"),
        ("one.txt", "no next token to predict"),
        ("/dev/null", "neither a file nor a directory"),
    ] {
        let outcome = place.run(&["train", "c.json", "--data", data]);
        outcome.assert_refused(1, &[data, expected]);
        assert!(!place.path("out").exists(), "{data}");
    }
}

#[test]
fn invalid_or_mismatched_tokenizers_are_refused() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    place.write("broken.json", "{}");
    place.write("text.json", "hello");
    for tokenizer in ["missing.json", "broken.json", "text.json", "."] {
        let outcome = place.run(&["train", "c.json", "--tokenizer", tokenizer]);
        outcome.assert_refused(2, &["cannot load the tokenizer", tokenizer, "tokenizer.json"]);
    }
    place.write("large.json", word_tokenizer(json!({ "[UNK]": 0, "the": 300 })));
    let model = crate::golden("tiny_strong", "");
    let outcome = place.run(&["train", "c.json", "--tokenizer", "large.json", "--model", &model]);
    outcome.assert_refused(1, &["large.json does not fit the model", "token id or label 300", "0..256"]);
    place.write("huge.json", word_tokenizer(json!({ "[UNK]": 0, "the": u32::MAX })));
    let outcome = place.run(&["train", "c.json", "--tokenizer", "huge.json"]);
    outcome.assert_refused(2, &["GiB", "choose a smaller model"]);
}

#[test]
fn invalid_output_directories_are_refused() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    place.write("file", "kept");
    for (output, expected) in [
        ("file", "expected a directory"),
        ("file/below", "cannot create the output directory"),
        ("/proc/nothing", "cannot create the output directory"),
    ] {
        place.run(&["train", "c.json", "--output", output]).assert_refused(1, &[output, expected]);
    }
    assert_eq!(place.read("file"), "kept");
    place.run(&["train", "c.json", "--output", ""]).assert_refused(2, &["--output", "non-empty"]);
}

/// Every place that reads or writes a path, and everything there that is no file of ours.
#[cfg(unix)]
#[test]
fn pipes_devices_and_links_are_refused_wherever_a_file_is_expected() {
    use std::os::unix::fs::symlink;
    let place = Workplace::new();
    place.write_config("c.json", json!({ "checkpoint": { "interval": 3 } }));
    place.run(&["train", "c.json"]).assert_done();
    let batch = crate::golden("tiny_strong", "inputs.safetensors");
    let read: [&[&str]; 8] = [
        &["train", "PATH"],
        &["plan", "PATH"],
        &["data", "inspect", "PATH"],
        &["data", "prepare", "PATH", "--output", "o.tokens"],
        &["data", "prepare", "text.txt", "--output", "o.tokens", "--tokenizer", "PATH"],
        &["verify", "--model", "nano", "--mesh", "1x1", "--batch", "PATH"],
        &["plan", "c.json", "--machine", "PATH"],
        &["launch", "--hostfile", "PATH", "--dry-run", "--program", "true", "--", "x"],
    ];
    let written: [&[&str]; 5] = [
        &["report", "out", "--output", "PATH"],
        &["plan", "c.json", "--html", "PATH"],
        &["mesh", "2x2", "--svg", "PATH"],
        &["verify", "--model", "nano", "--mesh", "1x1", "--batch", &batch, "--output", "PATH"],
        &["train", "c.json", "--output", "traced", "--trace", "PATH"],
    ];
    place.write("victim", "mine");
    let [pipe, endless, sparse, link, hard] =
        ["pipe", "endless", "sparse", "link", "hard"].map(|name| place.path(name));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    symlink("/dev/zero", &endless).unwrap();
    symlink("victim", &link).unwrap();
    std::fs::hard_link(place.path("victim"), &hard).unwrap();
    std::fs::File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
    symlink("nowhere", place.path("dangling")).unwrap();
    symlink("loop", place.path("loop")).unwrap();
    symlink("/proc/self/mem", place.path("memory")).unwrap();
    std::fs::create_dir(place.path("directory")).unwrap();
    let refused = |command: &[&str], path: &str| {
        let words: Vec<&str> =
            command.iter().map(|word| if *word == "PATH" { path } else { *word }).collect();
        let outcome = place.run(&words);
        assert!(matches!(outcome.code, Some(1 | 2)), "{words:?}: {outcome:?}");
        assert!(outcome.stderr.contains(path) && outcome.stderr.len() < 4096, "{words:?}: {outcome:?}");
    };
    for command in read {
        let kinds = ["pipe", "endless", "sparse", "dangling", "loop", "memory", "directory", "c.json/below"];
        kinds.into_iter().for_each(|path| refused(command, path));
    }
    for command in written {
        let kinds = ["pipe", "endless", "link", "hard", "loop", "memory", "directory", "c.json/below"];
        kinds.into_iter().for_each(|path| refused(command, path));
    }
    assert_eq!(place.read("victim"), "mine");
    // The files of a run that is resumed.
    for (file, target) in [
        ("config.json", "pipe"),
        ("config.json", "link"),
        ("run.json.part", "link"),
        ("metrics.jsonl.part", "link"),
    ] {
        let _ = std::fs::remove_file(place.path("out").join(file));
        symlink(place.path(target), place.path("out").join(file)).unwrap();
        let outcome = place.run(&["train", "c.json", "--resume", "--steps", "9"]);
        assert!(matches!(outcome.code, Some(0 | 1)), "{file}: {outcome:?}");
        assert_eq!(place.read("victim"), "mine", "{file}");
        let _ = std::fs::remove_file(place.path("out").join(file));
    }
}

/// Control characters are escaped.
#[test]
fn names_are_shown_with_their_control_characters_escaped() {
    let place = Workplace::new();
    let (name, shown) = ("\u{1b}[31mred\u{9b}1m\r", "\\u001b[31mred\\u009b1m\\u000d");
    place.write_config("c.json", json!({ "ulysses": { "data": name } }));
    let flag = format!("--{name}");
    let refused: [&[&str]; 5] = [
        &["train", name],
        &["train", "c.json"],
        &["train", "c.json", &flag],
        &["data", "inspect", name],
        &["checkpoint", "inspect", name],
    ];
    for arguments in refused {
        let outcome = place.run(arguments);
        assert!(matches!(outcome.code, Some(1 | 2)), "{arguments:?}: {outcome:?}");
        assert!(outcome.stderr.contains(shown), "{arguments:?}: {outcome:?}");
        let is_obeyed = |char: char| char.is_control() && !matches!(char, '\n' | '\t');
        assert!(!outcome.stderr.contains(is_obeyed), "{arguments:?}: {outcome:?}");
    }
    let prepared = place.run(&["data", "prepare", "text.txt", "--output", name]);
    assert!(prepared.assert_done().stdout.starts_with(shown), "{prepared:?}");
}
