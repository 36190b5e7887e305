//! The commands that users are told to run are run, each document's in one directory and in order.
//!
//! What shows a form rather than a command (`DIR`, `[--json]`) and what is listed here with its reason is parsed
//! only, by `src/cli/documented.rs`.

use crate::documented::{Documented, all_blocks};
use crate::root;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Beginnings of commands that are not run, and why.
const NOT_RUN: [(&str, &str); 7] = [
    ("cargo install --path .", "minutes; CI builds the same"),
    ("cargo test --release", "it is what runs this"),
    (
        "cargo run --release --example train_long_sequence",
        "a minute; the test below looks whether it is there",
    ),
    ("just bench-peer", "installs PyTorch and DeepSpeed, gigabytes, and measures for minutes"),
    ("just gpu-build", "builds for GPUs: minutes, and needs CUDA's compilers"),
    ("scp ", "needs a machine with GPUs"),
    ("ssh ", "needs a machine with GPUs"),
];

/// What the text takes for granted in a directory: a config and data of the user's.
const CONFIG: &str = r#"{
    "train_batch_size": 4, "checkpoint": { "interval": 100 },
    "ulysses": { "model": "nano", "data": "text.txt", "seq_len": 32, "steps": 100, "output": "out" }
}"#;

/// Whether it is a synopsis: words of capitals such as `DIR`, optional parts, alternatives.
fn is_synopsis(documented: &Documented) -> bool {
    let is_placeholder = |word: &str| {
        let name = word.rsplit('=').next().unwrap_or(word).split('.').next().unwrap_or(word);
        name.len() > 1 && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
            || name == "DPxSP"
            || name == "N"
    };
    documented.command.contains(['[', '|']) || documented.command.split_whitespace().any(is_placeholder)
}

fn is_run(documented: &Documented) -> bool {
    !is_synopsis(documented) && NOT_RUN.iter().all(|(start, _)| !documented.command.starts_with(start))
}

/// A directory with what a clone has that commands name, and with files of a user's own.
fn workplace() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    fs::create_dir_all(at("configs")).unwrap();
    for entry in fs::read_dir(root().join("configs")).unwrap() {
        let entry = entry.unwrap();
        // Manifests for clusters lie in a folder of their own, and no command names them.
        if entry.file_type().unwrap().is_dir() {
            continue;
        }
        fs::copy(entry.path(), at("configs").join(entry.file_name())).unwrap();
    }
    fs::create_dir(at("configs/machines")).unwrap();
    for entry in fs::read_dir(root().join("configs/machines")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), at("configs/machines").join(entry.file_name())).unwrap();
    }
    let fixture = "tests/fixtures/golden/tiny_strong";
    fs::create_dir_all(at(fixture)).unwrap();
    for file in ["config.json", "model.safetensors", "inputs.safetensors"] {
        fs::copy(root().join(fixture).join(file), at(fixture).join(file)).unwrap();
    }
    fs::copy(root().join("README.md"), at("README.md")).unwrap();
    fs::write(at("text.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(100)).unwrap();
    fs::write(at("c.json"), CONFIG).unwrap();
    fs::write(at("ds_config.json"), r#"{ "train_batch_size": 8, "zero_optimization": { "stage": 3 } }"#)
        .unwrap();
    place
}

/// Runs the commands of a block by a shell, which ends at the first that fails.
fn run(block: &[&Documented], place: &Path) {
    let script: Vec<&str> = block.iter().map(|documented| documented.command.as_str()).collect();
    let binary = Path::new(env!("CARGO_BIN_EXE_ulysses"));
    let path = std::env::join_paths(
        [binary.parent().unwrap().to_owned()]
            .into_iter()
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    let mut shell = Command::new("sh");
    shell.args(["-eux", "-c", &script.join("\n")]).current_dir(place).env("PATH", path.unwrap());
    let outcome = shell.env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success(), "{}:{}: {stderr}", block[0].file, block[0].line);
}

#[test]
fn the_commands_of_readme_and_book_run_as_they_are_written() {
    let blocks = all_blocks(root());
    let mut places: Vec<(String, tempfile::TempDir)> = Vec::new();
    let mut num_run = 0;
    for block in &blocks {
        let block: Vec<&Documented> = block.iter().filter(|documented| is_run(documented)).collect();
        let Some(first) = block.first() else { continue };
        if places.last().is_none_or(|(file, _)| *file != first.file) {
            places.push((first.file.clone(), workplace()));
        }
        run(&block, places.last().unwrap().1.path());
        num_run += block.len();
    }
    assert!(num_run >= 20, "{num_run} commands were run");
}

#[test]
fn what_is_not_run_is_there_and_has_a_reason_that_still_holds() {
    let commands: Vec<Documented> = all_blocks(root()).into_iter().flatten().collect();
    for (start, _) in NOT_RUN {
        assert!(
            commands.iter().any(|documented| documented.command.starts_with(start)),
            "{start}: nothing says so"
        );
    }
    for documented in &commands {
        let example =
            documented.command.split("--example ").nth(1).map(|rest| rest.split(' ').next().unwrap());
        if let Some(example) = example {
            assert!(root().join(format!("examples/{example}.rs")).exists(), "{documented:?}");
        }
    }
}
