//! Every `ulysses` command line that README and book show is one that the command line takes.
//! `tests/docs` runs them.

#[path = "../../tests/support/documented.rs"]
mod support;

use super::Cli;
use clap::CommandFactory;
use std::path::Path;
use support::all_blocks;

/// The lines that a synopsis stands for: each alternative, with all that is optional, and numbers where there are to be.
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

/// The command lines of `ulysses` in a command: what a launcher starts, and what `ulysses launch` starts.
fn of_ulysses(command: &str) -> Vec<String> {
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
fn every_documented_command_is_one_that_there_is() {
    let mut num_lines = 0;
    for documented in all_blocks(Path::new(env!("CARGO_MANIFEST_DIR"))).into_iter().flatten() {
        for line in of_ulysses(&documented.command).iter().flat_map(|command| lines(command)) {
            num_lines += 1;
            if let Err(error) = Cli::command().try_get_matches_from(&line) {
                panic!("{}:{}: {line:?}\n{error}", documented.file, documented.line);
            }
        }
    }
    assert!(num_lines > 40, "{num_lines}");
}

#[test]
fn commands_of_launchers_are_looked_into() {
    let started = of_ulysses("mpirun -np 2 ulysses train c.json");
    assert_eq!(started, ["ulysses train c.json"]);
    let launched = of_ulysses("ulysses launch --nproc 2 -- train c.json");
    assert_eq!(launched, ["ulysses launch --nproc 2 -- train c.json", "ulysses train c.json"]);
    assert_eq!(of_ulysses("ulysses launch --program ./a.sh -- b").len(), 1);
    assert_eq!(of_ulysses("git clone ulysses.git"), [""; 0]);
}

#[test]
fn a_synopsis_stands_for_all_of_its_lines() {
    let expected = [["ulysses", "verify", "--steps", "1"], ["ulysses", "inspect", "--steps", "1"]];
    assert_eq!(lines("ulysses verify|inspect [--steps N]"), expected);
}
