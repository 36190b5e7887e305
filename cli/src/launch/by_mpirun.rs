//! Jobs whose ranks `mpirun` starts, on this machine or on hosts.

use super::hosts::Host;
use super::job::{NoOtherNodes, Outcome};
use super::mpirun::{Placement, command, installed, shown};
use super::output::Source;
use super::rank_failure::RankFailure;
use super::restarts::JobSpec;
use super::signals::Signals;
use super::training::Variation;
use crate::{Failure, OrFail, print};
use anyhow::Context;

/// Runs a job of `num_ranks`, with restarts. `dry_run` prints the command instead.
pub(super) fn run(
    job: &JobSpec,
    hosts: Option<Vec<Host>>,
    num_ranks: usize,
    dry_run: bool,
) -> Result<(), Failure> {
    let launcher = installed();
    let signals = Signals::watch().context("cannot handle signals").or_run()?;
    let (mut restarts, mut variation) = (0, Variation::default());
    loop {
        let placement = hosts.as_ref().map_or(Placement::Here(num_ranks), |hosts| Placement::Hosts(hosts));
        let command = command(launcher, &placement, &job.program, &job.arguments(&variation));
        if dry_run {
            return print(format_args!("{}\n", shown(&command)));
        }
        let start = job.start(vec![(Source::Mpirun(launcher), command)], None);
        let failure = match start.run(&signals, &mut NoOtherNodes).or_run()? {
            Outcome::Done | Outcome::Interrupted => return Ok(()),
            Outcome::Stopped { exit_code } => return Err(Failure::Ended { exit_code }),
            Outcome::Failed(failure) => with_host(failure, hosts.as_deref()),
        };
        job.allow_restart(&failure, &mut restarts)?;
        variation.resumes = true;
    }
}

/// Adds the name of the failed rank's host: `mpirun` fills the hosts in order.
fn with_host(failure: RankFailure, hosts: Option<&[Host]>) -> RankFailure {
    let (Some(rank), Some(hosts)) = (failure.rank, hosts) else { return failure };
    let mut first = 0;
    let host = hosts.iter().find(|host| {
        first += host.slots;
        rank < first
    });
    failure.on_host(host.map(|host| host.name.clone()))
}
