//! Tests that the parser accepts every `ulysses` command line in README and book. `cli/tests/cli/docs` runs them.

#[path = "../../tests/support/documented.rs"]
mod support;

use super::arguments::command;
use std::fs;
use std::path::{Path, PathBuf};
use support::all_blocks;

/// Expands a synopsis: every alternative, with all optional parts and with numbers for placeholders.
fn lines(command: &str) -> Vec<Vec<String>> {
    let plain = command.replace(['[', ']'], "");
    plain.split_whitespace().fold(vec![Vec::new()], |lines, word| {
        let one = match word {
            "N" => "1",
            "DPxSP" => "2x2",
            word => word,
        };
        let extended = |line: &Vec<String>| {
            let with = |choice: &str| [line.as_slice(), &[choice.to_owned()]].concat();
            one.split('|').map(with).collect::<Vec<_>>()
        };
        lines.iter().flat_map(extended).collect()
    })
}

/// Returns the `ulysses` command lines in a command, including those that a launcher starts.
fn ulysses_commands(command: &str) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(start) = format!(" {command}").find(" ulysses ") {
        let line = &command[start..];
        found.push(line.to_owned());
        if let Some((launch, started)) = line.split_once(" -- ")
            && !launch.contains(" --program ")
        {
            found.push(format!("ulysses {started}"));
        }
    }
    found
}

#[test]
fn every_documented_command_is_accepted() {
    let mut num_lines = 0;
    for documented in all_blocks(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))).into_iter().flatten()
    {
        for line in ulysses_commands(&documented.command).iter().flat_map(|command| lines(command)) {
            num_lines += 1;
            if let Err(error) = command().try_get_matches_from(&line) {
                panic!("{}:{}: {line:?}\n{error}", documented.file, documented.line);
            }
        }
    }
    assert!(num_lines > 40, "{num_lines}");
}

/// Returns the files of `configs/clusters`, each with the command that starts a rank.
fn cluster_commands() -> Vec<(String, Vec<String>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/clusters");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let words = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let words = if path.extension().is_some_and(|extension| extension == "sbatch") {
            let line = text.lines().find_map(|line| line.strip_prefix("srun ")?.split(" || ").next());
            line.unwrap()
                .split(' ')
                .map(|word| word.trim_matches('"').replace("$SLURM_CPUS_PER_TASK", "8"))
                .collect()
        } else {
            // YAML lists that are valid JSON.
            let list = |key: &str| -> Vec<String> {
                let list = text.split(key).nth(1).unwrap().split(']').next().unwrap();
                serde_json::from_str(&format!("{list}]")).unwrap()
            };
            [list(" command: "), list(" args: ")].concat()
        };
        (path.display().to_string(), words)
    };
    files.map(words).collect()
}

#[test]
fn the_cluster_files_start_ulysses_train() {
    let files = cluster_commands();
    assert!(files.len() >= 4, "{files:?}");
    for (file, words) in files {
        let begin = words.iter().position(|word| word == "ulysses").unwrap();
        let matches = command().try_get_matches_from(&words[begin..]);
        let matches = matches.unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!(matches.subcommand_name(), Some("train"), "{file}");
    }
}

#[test]
fn commands_behind_launchers_are_found() {
    let started = ulysses_commands("mpirun -np 2 ulysses train c.json");
    assert_eq!(started, ["ulysses train c.json"]);
    let launched = ulysses_commands("ulysses launch --nproc 2 -- train c.json");
    assert_eq!(launched, ["ulysses launch --nproc 2 -- train c.json", "ulysses train c.json"]);
    assert_eq!(ulysses_commands("ulysses launch --program ./a.sh -- b").len(), 1);
    assert_eq!(ulysses_commands("git clone ulysses.git"), [""; 0]);
}

#[test]
fn a_synopsis_expands_to_all_of_its_lines() {
    let expected = [["ulysses", "verify", "--steps", "1"], ["ulysses", "inspect", "--steps", "1"]];
    assert_eq!(lines("ulysses verify|inspect [--steps N]"), expected);
}
