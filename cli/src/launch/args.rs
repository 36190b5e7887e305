//! The arguments of `ulysses launch`.

use super::mpi::hosts::{Host, parse_hosts, read_hostfile};
use super::nodes::Meeting;
use crate::failure::{Failure, OrFail};
use anyhow::anyhow;
use std::path::PathBuf;
use std::time::Duration;
use ulysses::comm::store::NodeEndpoint;
use ulysses::device::gpu_count;

/// The port of torchrun's `--rdzv-endpoint` when it names none.
const DEFAULT_PORT: u16 = 29_400;

#[derive(clap::Args)]
pub(crate) struct LaunchArgs {
    /// Number of processes on this machine, one per rank; `auto`: one per GPU, without GPUs one per core.
    #[arg(long, value_name = "N|auto", value_parser = num_processes, aliases = ["nproc-per-node", "nproc_per_node"])]
    #[arg(required_unless_present_any = ["hosts", "hostfile", "rdzv_endpoint"], conflicts_with_all = ["hosts", "hostfile"])]
    nproc: Option<usize>,
    /// Number of nodes. Start `launch` on each, with the same arguments and its own --node-rank.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "rdzv_endpoint")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(super) nnodes: u16,
    /// Rank of this node, from 0 [default: SLURM_NODEID].
    #[arg(long, value_name = "R", alias = "node_rank", requires = "rdzv_endpoint")]
    node_rank: Option<u16>,
    /// Rendezvous address: a port of node 0. Set ULYSSES_JOB_SECRET or ULYSSES_JOB_SECRET_FILE so that only processes of
    /// this job can join.
    #[arg(long, value_name = "HOST[:PORT]", alias = "rdzv_endpoint", conflicts_with_all = ["hosts", "hostfile"])]
    rdzv_endpoint: Option<String>,
    /// Seconds to wait for all nodes. Then --min-nodes are enough.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, requires = "rdzv_endpoint")]
    join_timeout: u64,
    /// Seconds without a heartbeat after which a node counts as lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "rdzv_endpoint")]
    #[arg(value_parser = clap::value_parser!(u64).range(3..))]
    node_timeout: u64,
    /// Hosts on which `mpirun` starts the ranks, and the ranks of each: `a:8,b:8`.
    #[arg(long, value_name = "HOST:N,…", conflicts_with = "hostfile")]
    hosts: Option<String>,
    /// The same from a file in DeepSpeed's format: lines such as `worker-1 slots=8`.
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Maximum number of restarts after a failure. `train` resumes from the newest valid checkpoint.
    #[arg(long, value_name = "K", default_value_t = 0, alias = "max_restarts")]
    pub(super) max_restarts: u32,
    /// Minimum number of nodes: for a restart after nodes are lost, and with --nnodes for a start without nodes that did not
    /// come within --join-timeout. The job then runs on the next smaller mesh that the batch allows [default: all nodes].
    #[arg(long, value_name = "N", requires = "max_restarts", value_parser = clap::value_parser!(u16).range(1..))]
    min_nodes: Option<u16>,
    /// Directory in host memory (tmpfs) for the copies of `checkpoint.memory_interval`. Each job creates a subdirectory and
    /// removes it when it ends.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub(super) memory_dir: PathBuf,
    /// Seconds between SIGTERM and SIGKILL when stopping processes.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub(super) grace: u64,
    /// Directory for the output of each rank, in addition to that of `launch`: DIR/rank_0.log, …
    #[arg(long, value_name = "DIR", alias = "log_dir")]
    pub(super) log_dir: Option<PathBuf>,
    /// Print the command of `mpirun` instead of starting it.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Program to start instead of `ulysses`.
    #[arg(long)]
    pub(super) program: Option<PathBuf>,
    /// Arguments of the program, after `--`, such as `train config.json`.
    #[arg(last = true, required = true, value_name = "ARGUMENTS")]
    pub(super) arguments: Vec<String>,
}

/// Parses the value of `--nproc`.
fn num_processes(text: &str) -> Result<usize, String> {
    if text == "auto" {
        return Ok(automatic());
    }
    let number = text.parse().ok().filter(|number| (1..=1024).contains(number));
    number.ok_or_else(|| "expected `auto` or a number from 1 to 1024".to_owned())
}

fn automatic() -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    gpu_count().ok().filter(|gpus| *gpus > 0).unwrap_or_else(cores)
}

impl LaunchArgs {
    /// Returns the number of processes on this machine; by default as with `auto`.
    pub(super) fn local_processes(&self) -> usize {
        self.nproc.unwrap_or_else(automatic)
    }

    /// Returns the hosts of `mpirun`, if any are given.
    pub(super) fn hosts(&self) -> Result<Option<Vec<Host>>, Failure> {
        let hosts = match (&self.hosts, &self.hostfile) {
            (Some(list), _) => parse_hosts(list).map(Some),
            (_, Some(path)) => read_hostfile(path).map(Some),
            _ => Ok(None),
        };
        hosts.map_err(anyhow::Error::msg).or_usage()
    }

    /// Checks that the flags are those for ranks that MPI connects, or those for others.
    pub(super) fn check_connection(&self, uses_mpi: bool) -> Result<(), Failure> {
        let has_hosts = self.hosts.is_some() || self.hostfile.is_some();
        let refused = match uses_mpi {
            true if self.rdzv_endpoint.is_some() => {
                "--rdzv-endpoint starts ranks that NCCL connects; for MPI use --hosts or --hostfile, on one machine only"
            }
            false if has_hosts => {
                "--hosts and --hostfile start ranks that MPI connects; for NCCL run `ulysses launch --nnodes N --node-rank \
                 R --rdzv-endpoint HOST:PORT` on every machine"
            }
            false if self.dry_run => "--dry-run shows the command of mpirun: use it with the backend mpi",
            _ => return Ok(()),
        };
        Err(Failure::Usage(anyhow!(refused)))
    }

    /// Returns the smallest number of nodes with which a job of `num_nodes` may continue.
    pub(super) fn min_nodes(&self, num_nodes: usize) -> Result<usize, Failure> {
        let min_nodes = self.min_nodes.map_or(num_nodes, usize::from);
        if min_nodes > num_nodes {
            return Err(Failure::Usage(anyhow!(
                "--min-nodes {min_nodes}: the job has {num_nodes} machine(s)"
            )));
        }
        Ok(min_nodes)
    }

    /// Returns where the launchers of all machines meet, if there are several.
    pub(super) fn meeting(&self) -> Result<Option<Meeting>, Failure> {
        let Some(endpoint) = &self.rdzv_endpoint else { return Ok(None) };
        let num_nodes = usize::from(self.nnodes);
        let from_slurm = || std::env::var("SLURM_NODEID").ok()?.trim().parse().ok();
        let node = match self.node_rank.or_else(from_slurm) {
            Some(node) => usize::from(node),
            None if num_nodes == 1 => 0,
            None => return Err(Failure::Usage(anyhow!("--nnodes {num_nodes} needs --node-rank"))),
        };
        if node >= num_nodes {
            return Err(Failure::Usage(anyhow!("--node-rank {node} must be less than --nnodes {num_nodes}")));
        }
        let endpoint = parse_endpoint(endpoint, node, num_nodes);
        Ok(Some(Meeting {
            endpoint: endpoint.map_err(anyhow::Error::msg).or_usage()?,
            join_timeout: Duration::from_secs(self.join_timeout),
            max_silence: Duration::from_secs(self.node_timeout),
        }))
    }
}

/// Parses `HOST`, `HOST:PORT` or `[IPV6]:PORT`, where this node meets the others.
fn parse_endpoint(text: &str, node: usize, num_nodes: usize) -> Result<NodeEndpoint, String> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let refused = || format!("--rdzv-endpoint {text}: expected HOST:PORT");
    let port = match port {
        Some(port) => port.parse().ok().filter(|port| *port > 0).ok_or_else(refused)?,
        None => DEFAULT_PORT,
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() {
        return Err(refused());
    }
    Ok(NodeEndpoint { host: host.to_owned(), port, node, num_nodes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_a_host_and_a_port() {
        let parse =
            |text| parse_endpoint(text, 0, 2).map(|NodeEndpoint { host, port, .. }| format!("{host} {port}"));
        assert_eq!(parse("n0:7").unwrap(), "n0 7");
        assert_eq!(parse("n0").unwrap(), "n0 29400");
        assert_eq!(parse("[::1]:7").unwrap(), "::1 7");
        assert_eq!(parse("fe80::1").unwrap(), "fe80::1 29400");
        for text in ["n0:0", "n0:x", ":7", "n0:70000", ""] {
            assert!(parse(text).unwrap_err().contains("expected HOST:PORT"), "{text}");
        }
    }
}
