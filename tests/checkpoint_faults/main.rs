//! Fault injection in saves: killed processes, failing operations and full disks.
//!
//! Each case runs this binary as a child process: `--child DIR FAULT …`,
//! or `--tensors DIR FAULT AT`. The child injects faults through its own
//! `Storage`, so the library has no code for them.

#![allow(clippy::unwrap_used)]

mod cases;
mod child;
#[path = "../support/sample.rs"]
mod sample;
mod storage;
mod tensors;

use libtest_mimic::{Arguments, Trial};
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    if let [_, flag, dir, run @ ..] = &words[..]
        && flag == "--child"
    {
        return match child::Run::parse(run).and_then(|run| child::train(dir.as_ref(), run)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    if let [_, flag, dir, fault, at] = &words[..]
        && flag == "--tensors"
    {
        let (_, fault) = storage::Fault::ALL.into_iter().find(|(name, _)| name == fault).unwrap();
        tensors::save(dir.as_ref(), fault, at.parse().unwrap()).unwrap();
        return ExitCode::SUCCESS;
    }
    let trial = |(name, case): (&str, fn())| trial_of(name.to_owned(), case);
    let mut trials: Vec<Trial> = cases::ALL.into_iter().chain(tensors::ALL).map(trial).collect();
    let (name, missing) = ("a_disk_that_is_full_keeps_the_checkpoint_that_it_has", cases::cannot_mount());
    let needs = |reason: &String| format!("{name} [skipped: needs to mount a tmpfs: {reason}]");
    let name = missing.as_ref().map_or_else(|| name.to_owned(), needs);
    trials.push(trial_of(name, cases::small_disk).with_ignored_flag(missing.is_some()));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn trial_of(name: String, case: fn()) -> Trial {
    Trial::test(name, move || {
        case();
        Ok(())
    })
}
