//! Runs the commands in the documents, each document's in one directory and in order.
//!
//! A synopsis (`DIR`, `[--json]`), and a command that is listed here with a reason, is only parsed, by
//! `cli/src/documented.rs`. Commands that need MPI run in builds with MPI.

use super::documented::{self, Documented, all_blocks, documents};
use super::{book, quoted, root};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// Prefixes of the commands that are not run, with reasons.
const NOT_RUN: [(&str, &str); 20] = [
    ("cargo install --profile dist --path cli", "minutes; CI builds it with less optimization"),
    ("cargo test", "it is what runs this"),
    ("ULYSSES_TEST_SEED=123 cargo test", "it is what runs this"),
    ("just nightly", "hours"),
    ("cargo run --release --example train_long_sequence", "a minute; the test below checks that it exists"),
    ("just bench-peer", "installs PyTorch and DeepSpeed, gigabytes, and measures for minutes"),
    ("just gpu-build", "builds for GPUs: minutes, and needs CUDA's compilers"),
    ("CUDA_HOME=/usr/local/cuda-12.4 ", "needs the toolkit of CUDA 12.4"),
    ("gpu/fake-driver", "minutes; CI runs gpu/fake-driver-check.sh"),
    ("scp ", "needs a machine with GPUs"),
    ("ssh ", "needs a machine with GPUs"),
    ("cargo build --release --features mpi", "minutes; CI builds it with less optimization"),
    ("ulysses launch --nproc 8 -- train config.json --mesh ulysses --backend nccl", "needs eight GPUs"),
    (
        "ulysses launch --nnodes ",
        "needs several machines; cli/tests/mpi/nodes.rs has hosts as network namespaces",
    ),
    (
        "ulysses launch --hosts n0:8,n1:8 ",
        "needs two machines; cli/tests/mpi/hosts.rs has network namespaces",
    ),
    ("ulysses launch --hostfile hosts.txt ", "needs the machines of the file"),
    (
        "mpirun --host n0:8,n1:8 ",
        "needs two machines; cli/tests/mpi/hosts.rs has hosts as network namespaces",
    ),
    ("sbatch ", "needs SLURM; cli/tests/mpi/slurm.rs submits the batch file"),
    ("torchrun ", "needs two machines with GPUs, and PyTorch"),
    ("RANK=3 WORLD_SIZE=4 ", "needs four GPUs"),
];

/// The document of the commands that need a build with MPI.
const CLUSTERS: &str = "docs/clusters.md";

/// Prefixes of those commands.
const UNDER_MPI: [&str; 3] = [
    "ulysses launch --nproc 4 -- train config.json --mesh 2x2 --backend mpi",
    "ulysses launch --nproc 4 --max-restarts 3 -- train config.json --output run --backend mpi",
    "mpirun -np 2 ulysses train configs/sequence_parallel.json",
];

/// A config and data that documents assume in the working directory.
const CONFIG: &str = r#"{
    "train_batch_size": 4, "checkpoint": { "interval": 100 },
    "ulysses": { "model": "nano", "data": "text.txt", "seq_len": 32, "steps": 100, "output": "out" }
}"#;

/// Returns whether it is a synopsis: placeholders in capitals such as `DIR`, optional parts, alternatives.
fn is_synopsis(documented: &Documented) -> bool {
    let is_placeholder = |word: &str| {
        let name = word.rsplit('=').next().unwrap_or(word).split('.').next().unwrap_or(word);
        name.len() > 1 && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
            || name == "DPxSP"
            || name == "N"
    };
    documented.command.contains(['[', '|']) || documented.command.split_whitespace().any(is_placeholder)
}

fn is_under_mpi(documented: &Documented) -> bool {
    UNDER_MPI.iter().any(|start| documented.command.starts_with(start))
}

fn is_run(documented: &Documented) -> bool {
    let is_listed = NOT_RUN.iter().any(|(start, _)| documented.command.starts_with(start));
    !is_listed && !is_synopsis(documented) && (!is_under_mpi(documented) || cfg!(feature = "mpi"))
}

/// Creates a directory with the files of a clone that commands name, and with a user's files.
fn workplace() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    fs::create_dir_all(at("configs")).unwrap();
    for entry in fs::read_dir(root().join("configs")).unwrap() {
        let entry = entry.unwrap();
        // Cluster manifests are in a separate folder that no command names.
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
    for name in ["c.json", "config.json"] {
        fs::write(at(name), CONFIG).unwrap();
    }
    fs::write(
        at("check.sh"),
        "#!/bin/sh\ntest \"$RANK\" -lt \"$WORLD_SIZE\" && test \"$*\" = 'some arguments'\n",
    )
    .unwrap();
    fs::set_permissions(at("check.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(at("ds_config.json"), r#"{ "train_batch_size": 8, "zero_optimization": { "stage": 3 } }"#)
        .unwrap();
    place
}

/// Runs the commands of a block in a shell that stops at the first failure, and returns their output.
fn run(block: &[&Documented], place: &Path) -> String {
    let script: Vec<&str> = block.iter().map(|documented| documented.command.as_str()).collect();
    let binary = Path::new(env!("CARGO_BIN_EXE_ulysses"));
    let path = std::env::join_paths(
        [binary.parent().unwrap().to_owned()]
            .into_iter()
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    let mut shell = Command::new("sh");
    shell.args(["-eux", "-c", &script.join("\n")]).current_dir(place).env("PATH", path.unwrap());
    // Open MPI refuses to run as root and to oversubscribe cores by default.
    for variable in ["ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM", "MCA_rmaps_base_oversubscribe"] {
        shell.env(format!("OMPI_{variable}"), "1");
    }
    let outcome = shell.env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success(), "{}:{}: {stderr}", block[0].file, block[0].line);
    String::from_utf8(outcome.stdout).unwrap()
}

/// Counts of a tested document.
#[derive(Default)]
struct Done {
    commands: usize,
    quoted_lines: usize,
}

/// Runs the commands of a document, and compares the plans that it quotes.
fn run_document(file: &str) -> Done {
    let text = fs::read_to_string(root().join(file)).unwrap();
    let place = workplace();
    let mut done = Done::default();
    for block in documented::blocks(file, &text) {
        let block: Vec<&Documented> = block.iter().filter(|documented| is_run(documented)).collect();
        let Some(last) = block.last() else { continue };
        let printed = run(&block, place.path());
        done.commands += block.len();
        if last.command.starts_with("ulysses plan ") {
            done.quoted_lines += quoted::compare(&text, last, &printed);
        }
    }
    done
}

/// Commands that wait for others leave a core to another document.
#[test]
fn the_commands_of_readme_and_book_run_as_they_are_written_and_print_what_is_quoted() {
    let left = Mutex::new(documents(root()).into_iter().filter(|file| file != CLUSTERS));
    let next = || left.lock().unwrap().next();
    let worker = || std::iter::from_fn(next).map(|file| run_document(&file)).collect::<Vec<Done>>();
    let done: Vec<Done> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    let num_run: usize = done.iter().map(|done| done.commands).sum();
    assert!(num_run >= 20, "{num_run} commands were run");
    let compared: usize = done.iter().map(|done| done.quoted_lines).sum();
    assert!(compared >= 10, "{compared} lines were compared");
}

#[test]
fn the_commands_for_clusters_run_as_they_are_written() {
    let num_run = run_document(CLUSTERS).commands;
    let num_under_mpi = if cfg!(feature = "mpi") { UNDER_MPI.len() } else { 0 };
    assert!(num_run > num_under_mpi, "{num_run} commands were run");
}

#[test]
fn commands_that_are_not_run_still_exist() {
    let commands: Vec<Documented> = all_blocks(root()).into_iter().flatten().collect();
    for start in NOT_RUN.iter().map(|(start, _)| start).chain(&UNDER_MPI) {
        assert!(
            commands.iter().any(|documented| documented.command.starts_with(start)),
            "{start}: nothing says so"
        );
    }
    for documented in &commands {
        assert!(!is_under_mpi(documented) || documented.file == CLUSTERS, "{documented:?}");
        let example =
            documented.command.split("--example ").nth(1).map(|rest| rest.split(' ').next().unwrap());
        if let Some(example) = example {
            assert!(root().join(format!("examples/{example}.rs")).exists(), "{documented:?}");
        }
    }
}

/// Shell commands must be in blocks that are tested.
#[test]
fn every_command_is_in_a_tested_block() {
    let read = documents(root());
    for path in book::documents() {
        let text = fs::read_to_string(&path).unwrap();
        let document = path.strip_prefix(root()).unwrap().display().to_string();
        let mut language = None;
        for (index, line) in text.lines().enumerate() {
            let place = format!("{document}:{}", index + 1);
            match (line.strip_prefix("```"), language) {
                (Some(opened), None) => {
                    assert!(
                        !["sh", "bash", "shell", "zsh"].contains(&opened),
                        "{place}: write `console` and `$ `"
                    );
                    assert!(
                        opened != "console" || read.contains(&document),
                        "{place}: nothing reads this file"
                    );
                    language = Some(opened);
                }
                (Some(_), Some(_)) => language = None,
                (None, Some(language)) => {
                    assert!(
                        language == "console" || !line.starts_with("$ "),
                        "{place}: not in a `console` block"
                    );
                }
                (None, None) => {}
            }
        }
    }
}
