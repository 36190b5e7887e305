//! Jobs whose ranks `mpirun` starts, on this machine or on hosts.

pub(in crate::launch) mod hosts;
pub(in crate::launch) mod mpirun;
mod probe;

use crate::failure::{Failure, OrFail};
use crate::launch::job_spec::{FewerNodes, JobSpec};
use crate::launch::output::Source;
use crate::launch::rank_failure::RankFailure;
use crate::launch::restart::Cause;
use crate::launch::signals::Signals;
use crate::launch::supervisor::{Ended, ProcessCommand, Supervisor};
use crate::launch::training::Variation;
use crate::output::{log_line, print};
use anyhow::{Error, anyhow};
use hosts::Host;
pub(in crate::launch) use mpirun::Placement;
use mpirun::{command, installed, shown};
use probe::Probe;

/// Prints the command of the first start instead of running it.
pub(in crate::launch) fn print_command(job: &JobSpec, placement: &Placement) -> Result<(), Failure> {
    check(job, placement)?;
    let command = command(installed(), placement, &job.program, &job.arguments(&Variation::default()));
    print(format_args!("{}\n", shown(&command)))
}

/// Runs a job, with restarts.
pub(in crate::launch) fn run(
    job: &JobSpec,
    supervisor: &mut Supervisor,
    mut placement: Placement,
) -> Result<(), Failure> {
    check(job, &placement)?;
    let signals = Signals::watch().or_run()?;
    let launcher = installed();
    let mut variation = Variation::default();
    let probe = probe_before_start(job, &mut placement, &mut variation)?;
    loop {
        // The hosts that a smaller mesh leaves idle replace the next ones that are lost.
        let used = variation.smaller.map_or_else(|| placement.clone(), |mesh| placement.on(mesh));
        let mut command = command(launcher, &used, &job.program, &job.arguments(&variation));
        variation.set_restart(&mut command);
        let mut failure = None;
        let commands = vec![ProcessCommand { source: Source::Mpirun(launcher), command }];
        let ended = supervisor.run(commands, None, &signals, &mut |failed, _| {
            failure = failure.take().or_else(|| failed.cloned());
            None
        });
        let failure = match (ended.or_run()?, failure) {
            (Ended::Failed, Some(failure)) => with_host(failure, &used),
            (Ended::Stopped(exit_code), _) => return Err(Failure::Ended { exit_code }),
            (Ended::Done, _) => return Ok(()),
            (Ended::Failed, None) => {
                return Err(Failure::Run(anyhow!("mpirun failed for an unknown reason")));
            }
        };
        let lost = match (&placement, &probe) {
            (Placement::Hosts(hosts), Some(probe)) => probe.lost_since(hosts),
            _ => Vec::new(),
        };
        let used_and_lost = lost.iter().map(|host| &host.name).filter(|name| used.has(name));
        let lost_hosts: Vec<String> = used_and_lost.cloned().collect();
        let (mut cause, mut fewer) = (Cause::from(&failure), None);
        if !lost_hosts.is_empty() {
            cause.text = format!("cannot reach host {}; {failure}", lost_hosts.join(", "));
            cause.lost_hosts = lost_hosts;
            fewer = Some(leave_out(&lost, &mut placement, job, &cause.text)?);
        } else if failure.is_usage() {
            return Err(Failure::Usage(anyhow!("{failure}")));
        }
        variation = job.restart(cause, fewer, &variation).map_err(Error::msg).or_run()?;
    }
}

fn check(job: &JobSpec, placement: &Placement) -> Result<(), Failure> {
    let slots = placement.slots();
    job.check_min_nodes(slots.len(), slots).map_err(Error::msg).or_usage()
}

/// Probes the hosts. If the job may start without those that are lost, it gets a smaller mesh for the others.
fn probe_before_start(
    job: &JobSpec,
    placement: &mut Placement,
    variation: &mut Variation,
) -> Result<Option<Probe>, Failure> {
    let Placement::Hosts(hosts) = placement else { return Ok(None) };
    let may_start_without = job.min_nodes < hosts.len();
    if job.max_restarts == 0 && !may_start_without {
        return Ok(None);
    }
    let probe = Probe::new(hosts);
    let lost = probe.lost_at_first();
    if !lost.is_empty() && may_start_without {
        let names = lost.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ");
        let reason = format!("cannot reach host {names}");
        let fewer = leave_out(&lost, placement, job, &reason)?;
        log_line(format_args!("launch: {reason}; the job starts{fewer}"));
        variation.smaller = fewer.mesh;
    }
    Ok(Some(probe))
}

/// Removes the lost hosts, and returns what is left.
///
/// # Errors
/// `reason` and why the job cannot run on the other hosts.
fn leave_out(
    lost: &[Host],
    placement: &mut Placement,
    job: &JobSpec,
    reason: &str,
) -> Result<FewerNodes, Failure> {
    if let Placement::Hosts(hosts) = placement {
        hosts.retain(|host| !lost.contains(host));
    }
    job.on_fewer("host", placement.slots()).map_err(|why| anyhow!("{reason}; {why}")).or_run()
}

/// Adds the name of the failed rank's host: `mpirun` fills the hosts in order.
fn with_host(mut failure: RankFailure, used: &Placement) -> RankFailure {
    if let (Some(rank), Placement::Hosts(hosts)) = (failure.rank, used) {
        let mut slots = hosts.iter().flat_map(|host| std::iter::repeat_n(&host.name, host.slots));
        failure.host = slots.nth(rank).cloned();
    }
    failure
}
