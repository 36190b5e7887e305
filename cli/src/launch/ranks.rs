//! The processes of a job that `launch` starts itself, with torchrun's variables.

use super::output::Source;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

/// The ranks of one node.
pub(super) struct NodeRanks {
    /// The first of them.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) world_size: usize,
    /// The number of the node, among the nodes of this start.
    pub(super) node: usize,
    pub(super) num_nodes: usize,
    /// The port at which PyTorch programs meet.
    pub(super) master_port: u16,
    pub(super) restarts: u32,
    pub(super) max_restarts: u32,
}

impl NodeRanks {
    /// Returns the command of each rank. `environment` leads to the store of the ranks.
    pub(super) fn commands(
        &self,
        program: &Path,
        arguments: &[String],
        environment: &[(&'static str, String)],
    ) -> Vec<(Source, Command)> {
        let of_job = [
            ("WORLD_SIZE", self.world_size),
            ("LOCAL_WORLD_SIZE", self.count),
            ("GROUP_RANK", self.node),
            ("GROUP_WORLD_SIZE", self.num_nodes),
            ("MASTER_PORT", usize::from(self.master_port)),
            ("TORCHELASTIC_RESTART_COUNT", self.restarts as usize),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts as usize),
        ];
        let of_rank = |local: usize| {
            let mut command = Command::new(program);
            command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
            command.envs(of_job.map(|(name, value)| (name, value.to_string())));
            let rank = self.first + local;
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", local.to_string());
            (Source::Rank(rank), command)
        };
        (0..self.count).map(of_rank).collect()
    }
}

/// Returns a port that nothing on this machine uses.
pub(super) fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("0.0.0.0", 0))?.local_addr()?.port())
}
