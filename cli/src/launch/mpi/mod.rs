//! Jobs whose ranks `mpirun` starts, on this machine or on hosts.

pub(in crate::launch) mod hosts;
pub(in crate::launch) mod mpirun;
mod probe;

use crate::failure::{Failure, OrFail};
use crate::launch::job::{NoOtherNodes, Outcome};
use crate::launch::job_spec::JobSpec;
use crate::launch::output::Source;
use crate::launch::rank_failure::RankFailure;
use crate::launch::restart::Cause;
use crate::launch::signals::Signals;
use crate::launch::training::Variation;
use crate::output::{log_line, print};
use anyhow::{Context, anyhow};
use hosts::{Host, first_slots};
use mpirun::{Placement, command, installed, shown};
use probe::Probe;

/// Runs a job of `num_ranks`, with restarts. `dry_run` prints the command instead.
pub(in crate::launch) fn run(
    job: &JobSpec,
    mut hosts: Option<Vec<Host>>,
    num_ranks: usize,
    dry_run: bool,
) -> Result<(), Failure> {
    if let Some(hosts) = hosts.as_ref().filter(|hosts| job.min_nodes < hosts.len()) {
        let fewest = hosts.iter().take(job.min_nodes).map(|host| host.slots).sum();
        let refused = |message| anyhow!("--min-nodes {}: {message}", job.min_nodes);
        job.smaller_mesh(fewest).map_err(refused).or_usage()?;
    }
    let signals = Signals::watch().context("cannot handle signals").or_run()?;
    let launcher = installed();
    let (mut restarts, mut variation) = (0, Variation::default());
    let may_lose = |hosts: &&mut Vec<Host>| job.max_restarts > 0 || job.min_nodes < hosts.len();
    let probe = match hosts.as_mut().filter(may_lose).filter(|_| !dry_run) {
        Some(hosts) => Some(probe_before_start(job, hosts, &mut variation)?),
        None => None,
    };
    loop {
        // The hosts that a smaller mesh leaves idle replace the next ones that are lost.
        let used = hosts.as_ref().map(|hosts| match variation.smaller {
            Some(mesh) => first_slots(hosts, mesh.sizes.num_ranks()),
            None => hosts.clone(),
        });
        let placement = used.as_ref().map_or(Placement::Here(num_ranks), |used| Placement::Hosts(used));
        let command = command(launcher, &placement, &job.program, &job.arguments(&variation));
        if dry_run {
            return print(format_args!("{}\n", shown(&command)));
        }
        let start = job.start(vec![(Source::Mpirun(launcher), command)], None, &variation);
        let failure = match start.run(&signals, &mut NoOtherNodes).or_run()? {
            Outcome::Done | Outcome::Interrupted => return Ok(()),
            Outcome::Stopped { exit_code } => return Err(Failure::Ended { exit_code }),
            Outcome::Failed(failure) => with_host(failure, used.as_deref()),
        };
        let answers = hosts.as_deref().zip(probe.as_ref()).map(|(hosts, probe)| probe.split(hosts));
        let (left, mut lost) = answers.unwrap_or_default();
        lost.retain(|host| used.iter().flatten().any(|used| used.name == host.name));
        if lost.is_empty() {
            job.restart_after(&failure, &mut restarts, &mut variation)?;
        } else {
            let lost_hosts: Vec<String> = lost.into_iter().map(|host| host.name).collect();
            let text = format!("cannot reach host {}; {failure}", lost_hosts.join(", "));
            let cause = Cause { text, failed_rank: failure.rank, lost_hosts };
            let fewer = job.on_fewer("host", left.iter().map(|host| host.slots));
            let fewer = fewer.map_err(|why| anyhow!("{}; {why}", cause.text)).or_run()?;
            let restarted = job.restart(cause, Some(fewer), &mut restarts, &mut variation);
            restarted.map_err(anyhow::Error::msg).or_run()?;
            hosts = Some(left);
        }
    }
}

/// Probes the hosts. If the job may start without those that are lost, it gets a smaller mesh for the others.
fn probe_before_start(
    job: &JobSpec,
    hosts: &mut Vec<Host>,
    variation: &mut Variation,
) -> Result<Probe, Failure> {
    let (probe, lost) = Probe::new(hosts);
    if !lost.is_empty() && job.min_nodes < hosts.len() {
        let names = lost.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ");
        hosts.retain(|host| !lost.contains(host));
        let fewer = job.on_fewer("host", hosts.iter().map(|host| host.slots));
        let fewer = fewer.map_err(|why| anyhow!("cannot reach host {names}; {why}")).or_run()?;
        log_line(format_args!("launch: cannot reach host {names}; the job starts{fewer}"));
        variation.smaller = fewer.mesh;
    }
    Ok(probe)
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
