//! `ulysses launch`: runs the processes of a job, on this machine or on several.
//!
//! NCCL's ranks, and any other program, are started by `launch` itself: on several machines by one `launch` on each, which
//! meet in a store (`nodes/`). MPI's ranks are started by the installed `mpirun` (`mpi/`). Both plan the starts of a
//! [`JobSpec`], whose processes on this machine a [`Supervisor`] runs.

mod args;
mod job_spec;
mod memory_dir;
mod mpi;
mod nodes;
mod output;
mod processes;
mod rank_failure;
mod restart;
mod running;
mod signals;
mod supervisor;
mod training;
mod watchdog;

use crate::failure::{Failure, OrFail};
use anyhow::Context;
pub(super) use args::LaunchArgs;
use job_spec::JobSpec;
pub(super) use memory_dir::MEMORY_DIR_VARIABLE;
use memory_dir::MemoryDir;
use mpi::Placement;
use output::RankLogs;
pub(super) use restart::Restart;
use std::time::Duration;
use supervisor::Supervisor;
use training::{Training, names_mpi};
use ulysses::mesh::Cluster;
pub(super) use watchdog::{WatchdogArgs, watch};

/// Runs a job, or prints how `mpirun` would start it.
pub(super) fn run(args: LaunchArgs) -> Result<(), Failure> {
    let hosts = args.hosts()?;
    let meeting = args.meeting()?;
    let slots = match &hosts {
        Some(hosts) => hosts.iter().map(|host| host.slots).collect(),
        None => vec![args.local_processes(); args.nnodes.into()],
    };
    let min_nodes = args.min_nodes(slots.len())?;
    let training = match args.program {
        None => Training::parse(&args.arguments, cluster(&slots), args.max_restarts)?,
        Some(_) => None,
    };
    let uses_mpi = match &training {
        Some(training) => training.uses_mpi,
        None => hosts.is_some() || args.program.is_none() && names_mpi(&args.arguments),
    };
    args.check_connection(uses_mpi)?;
    let num_processes = slots[0];
    let placement = hosts.map_or(Placement::Here(num_processes), Placement::Hosts);
    let keeps_copies = training.as_ref().is_some_and(Training::keeps_copies) && args.max_restarts > 0;
    let job = JobSpec {
        program: match args.program {
            Some(program) => program,
            None => std::env::current_exe().context("cannot find the path of this program").or_run()?,
        },
        arguments: args.arguments,
        training,
        max_restarts: args.max_restarts,
        min_nodes,
    };
    if args.dry_run {
        return mpi::print_command(&job, &placement);
    }
    let memory = keeps_copies.then(|| MemoryDir::in_directory(&args.memory_dir));
    let logs = args.log_dir.map(RankLogs::in_directory).transpose().or_usage()?;
    let mut supervisor = Supervisor::new(Duration::from_secs(args.grace), memory, logs)?;
    match uses_mpi {
        true => mpi::run(&job, &mut supervisor, placement),
        false => nodes::run(&job, &mut supervisor, meeting.as_ref(), num_processes),
    }
}

/// Returns the cluster of machines with these numbers of ranks. Unequal ones count as one machine.
fn cluster(slots: &[usize]) -> Cluster {
    match slots.iter().all(|ranks| *ranks == slots[0]) {
        true => Cluster { nodes: slots.len(), ranks_per_node: slots[0] },
        false => Cluster { nodes: 1, ranks_per_node: slots.iter().sum() },
    }
}
