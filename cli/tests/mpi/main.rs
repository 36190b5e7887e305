//! The MPI backend, under `mpirun` on this machine: the conformance suite, and training.
//!
//! Each test of the suite is a job that runs this binary itself: `--ranks FILE`.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod conformance;
mod golden;
mod hosts;
mod job;
mod large;
mod launching;
mod meshes;
mod nodes;
mod sharded;
mod slurm;
mod training;

use libtest_mimic::{Arguments, Trial};
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    if let [_, flag, file] = &words[..]
        && flag == "--ranks"
    {
        conformance::run_as_rank(file);
        return ExitCode::SUCCESS;
    }
    let mut arguments = Arguments::from_args();
    // A job uses all cores, but half of the time it waits.
    arguments.test_threads = Some(2);
    let trials = conformance::trials().into_iter().chain(training::trials()).chain(meshes::trials());
    let trials = trials.chain(launching::trials());
    let trials =
        trials.chain(golden::trials()).chain(hosts::trials()).chain(nodes::trials()).chain(slurm::trials());
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// A test that passes if `case` returns.
fn trial(name: impl Into<String>, case: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        case();
        Ok(())
    })
}
