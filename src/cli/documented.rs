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

#[test]
fn every_documented_command_is_one_that_there_is() {
    let commands: Vec<_> = all_blocks(Path::new(env!("CARGO_MANIFEST_DIR"))).into_iter().flatten().collect();
    let commands: Vec<_> =
        commands.iter().filter(|documented| documented.command.starts_with("ulysses ")).collect();
    assert!(commands.len() > 20, "{commands:?}");
    for documented in commands {
        for line in lines(&documented.command) {
            if let Err(error) = Cli::command().try_get_matches_from(&line) {
                panic!("{}:{}: {line:?}\n{error}", documented.file, documented.line);
            }
        }
    }
}

#[test]
fn a_synopsis_stands_for_all_of_its_lines() {
    let expected = [["ulysses", "verify", "--steps", "1"], ["ulysses", "inspect", "--steps", "1"]];
    assert_eq!(lines("ulysses verify|inspect [--steps N]"), expected);
}
