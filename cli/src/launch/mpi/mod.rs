//! Jobs whose ranks `mpirun` starts, on this machine or on hosts.

pub(in crate::launch) mod hosts;
pub(in crate::launch) mod mpirun;
mod probe;

use crate::launch::job::{NoOtherNodes, Outcome};
use crate::launch::output::Source;
use crate::launch::rank_failure::RankFailure;
use crate::launch::restarts::JobSpec;
use crate::launch::signals::Signals;
use crate::launch::training::Variation;
use crate::{Failure, OrFail, print};
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
    let launcher = installed();
    let signals = Signals::watch().context("cannot handle signals").or_run()?;
    let (mut restarts, mut variation) = (0, Variation::default());
    let is_probed = job.max_restarts > 0 && !dry_run;
    let probe = hosts.as_ref().filter(|_| is_probed).map(|hosts| Probe::new(hosts));
    loop {
        // The hosts that a smaller mesh leaves idle replace the next ones that are lost.
        let used = hosts.as_ref().map(|hosts| match variation.smaller {
            Some(mesh) => first_slots(hosts, mesh.dp * mesh.sp),
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
        let reason = if lost.is_empty() {
            job.allow_restart(&failure, &mut restarts)?
        } else {
            let reason = continue_on(&left, &lost, &failure, job, &mut restarts, &mut variation).or_run()?;
            hosts = Some(left);
            reason
        };
        job.resume(&mut variation, reason);
    }
}

/// Plans a restart on the hosts that are left, and returns its reason.
///
/// # Errors
/// Why the job cannot continue.
fn continue_on(
    left: &[Host],
    lost: &[Host],
    failure: &RankFailure,
    job: &JobSpec,
    restarts: &mut u32,
    variation: &mut Variation,
) -> anyhow::Result<String> {
    let lost: Vec<&str> = lost.iter().map(|host| host.name.as_str()).collect();
    let reason = format!("cannot reach host {}; {failure}", lost.join(", "));
    if left.len() < job.min_nodes {
        return Err(anyhow!("{reason}; {} host(s) are left, --min-nodes is {}", left.len(), job.min_nodes));
    }
    let num_ranks = left.iter().map(|host| host.slots).sum();
    let smaller = job.smaller_mesh(num_ranks).map_err(|why| anyhow!("{reason}; {why}"))?;
    let mut with = format!(" on {} host(s)", left.len());
    if let Some(mesh) = smaller {
        with = format!("{with} with mesh {mesh}");
        variation.smaller = smaller;
    }
    job.allow(&reason, restarts, &with).map_err(anyhow::Error::msg)
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
