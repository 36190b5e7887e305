//! `ulysses launch`: runs the processes of a job, on this machine or on several.
//!
//! NCCL's ranks, and any other program, are started by `launch` itself: on several machines by one `launch` on each, which
//! meet in a store (`nodes/`). MPI's ranks are started by the installed `mpirun` (`mpi/`).

mod args;
mod job;
mod job_spec;
mod memory_dir;
mod mpi;
mod nodes;
mod on_one_node;
mod output;
mod processes;
mod rank_failure;
mod ranks;
mod restart;
mod running;
mod signals;
mod training;
mod watchdog;

use crate::failure::{Failure, OrFail};
use anyhow::{Context, anyhow};
pub(super) use args::LaunchArgs;
use job_spec::JobSpec;
pub(super) use memory_dir::MEMORY_DIR_VARIABLE;
use memory_dir::MemoryDir;
use output::RankLogs;
pub(super) use restart::Restart;
use std::sync::Arc;
use std::time::Duration;
use training::{Training, names_mpi};
use ulysses::mesh::Cluster;
pub(super) use watchdog::{WatchdogArgs, watch};

pub(super) fn run(args: LaunchArgs) -> Result<(), Failure> {
    let hosts = args.hosts()?;
    let nodes = args.nodes()?;
    let num_nodes = hosts.as_ref().map_or(usize::from(args.nnodes), Vec::len);
    let min_nodes = args.min_nodes(num_nodes)?;
    let is_ulysses = args.program.is_none();
    let mut training = if is_ulysses { Training::parse(&args.arguments)? } else { None };
    let (num_ranks, ranks_per_node) = match &hosts {
        Some(hosts) => (hosts.iter().map(|host| host.slots).sum(), hosts[0].slots),
        None => (args.local_processes() * num_nodes, args.local_processes()),
    };
    let cluster = match num_ranks == num_nodes * ranks_per_node {
        true => Cluster { nodes: num_nodes, ranks_per_node },
        false => Cluster { nodes: 1, ranks_per_node: num_ranks },
    };
    let (first_config, uses_mpirun) = match &mut training {
        Some(training) => {
            let (config, uses_mpirun) = training.check(cluster, args.max_restarts)?;
            (Some(config), uses_mpirun)
        }
        None => (None, hosts.is_some() || is_ulysses && names_mpi(&args.arguments)),
    };
    let program = match args.program {
        Some(program) => program,
        None => std::env::current_exe().context("cannot find the path of this program").or_run()?,
    };
    let logs = args.log_dir.map(|directory| {
        let shown = directory.display().to_string();
        let logs = RankLogs::in_directory(directory).map(Arc::new);
        logs.with_context(|| format!("--log-dir: cannot create {shown}")).or_usage()
    });
    let grace = Duration::from_secs(args.grace);
    let copies = first_config.as_ref().and_then(|config| config.checkpoint.as_ref()?.memory_interval);
    let is_needed = copies.is_some() && args.max_restarts > 0 && !args.dry_run;
    let memory = is_needed.then(|| MemoryDir::create(&args.memory_dir, grace)).transpose().or_usage()?;
    let job = JobSpec {
        program,
        arguments: args.arguments,
        training: training.zip(first_config),
        max_restarts: args.max_restarts,
        min_nodes,
        grace,
        logs: logs.transpose()?,
        memory,
    };
    let refuse = |message: &str| Err(Failure::Usage(anyhow!("{message}")));
    match (nodes, uses_mpirun) {
        (Some(_), true) => refuse(
            "--rdzv-endpoint starts ranks that NCCL connects; for MPI use --hosts or --hostfile, on one machine only",
        ),
        (Some(nodes), false) => nodes::run(&job, &nodes, num_ranks / num_nodes),
        (None, true) => mpi::run(&job, hosts, num_ranks, args.dry_run),
        (None, false) if hosts.is_some() => refuse(
            "--hosts and --hostfile start ranks that MPI connects; for NCCL run `ulysses launch --nnodes N --node-rank R \
             --rdzv-endpoint HOST:PORT` on every machine",
        ),
        (None, false) if args.dry_run => {
            refuse("--dry-run shows the command of mpirun: use it with the backend mpi")
        }
        (None, false) => on_one_node::run(&job, num_ranks),
    }
}
