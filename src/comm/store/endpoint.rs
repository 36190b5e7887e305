//! The endpoint of a job's store, from the launcher's variables.

use super::NO_RANK;
use super::secret::JobSecret;
use crate::comm::discovery::first_host;
use crate::comm::{Launcher, ProcessInfo};
use std::fmt;
use std::net::IpAddr;

/// The default of `MASTER_PORT`, as for torchrun.
const DEFAULT_PORT: u16 = 29_500;
/// Set, to any value, if the launcher itself hosts the store.
pub(super) const HOSTED: &str = "ULYSSES_STORE_HOSTED";

/// The kind of a store's members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum Member {
    Rank,
    /// A node's launcher.
    Node,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rank => "rank",
            Self::Node => "node",
        })
    }
}

/// The address at which the ranks of a job find its store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct StoreEndpoint {
    /// Host name of the store, as the other ranks know it.
    pub(in crate::comm) host: String,
    /// `ULYSSES_MASTER_PORT`, or `MASTER_PORT` + 1, since the launcher's own store may use `MASTER_PORT`.
    pub(in crate::comm) port: u16,
    /// The IP address that the host listens on, if set.
    pub(in crate::comm) bind: Option<IpAddr>,
    pub(in crate::comm) world_size: usize,
    /// Whether all ranks are known to be on one machine.
    pub(in crate::comm) is_one_node: bool,
    /// Whether the launcher, not rank 0, hosts the store.
    pub(in crate::comm) is_hosted: bool,
    pub(in crate::comm) members: Member,
    pub(in crate::comm) secret: JobSecret,
}

impl StoreEndpoint {
    /// Reads the endpoint from variables, which `lookup` returns; `None` if they name none.
    ///
    /// # Errors
    /// A message that names the invalid variable.
    pub(in crate::comm) fn read(
        info: &ProcessInfo,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, String> {
        let ProcessInfo { world_size, local_world_size, launcher, .. } = *info;
        let by_slurm = || match launcher {
            Launcher::Slurm => lookup("SLURM_STEP_NODELIST").as_deref().and_then(first_host),
            _ => None,
        };
        let Some(host) = lookup("MASTER_ADDR").or_else(by_slurm) else { return Ok(None) };
        let port = |name: &str| {
            let parse = |text: String| {
                let parsed = text.trim().parse::<u16>().ok().filter(|port| *port > 0);
                parsed.ok_or_else(|| format!("{name} is `{text}`, expected a port from 1 to 65535"))
            };
            lookup(name).map(parse).transpose()
        };
        let port = match port("ULYSSES_MASTER_PORT")? {
            Some(port) => port,
            None => port("MASTER_PORT")?.unwrap_or(DEFAULT_PORT).checked_add(1).ok_or(
                "MASTER_PORT is 65535, and the default store port is the next one: set ULYSSES_MASTER_PORT",
            )?,
        };
        Ok(Some(Self {
            host,
            port,
            bind: bind_address(&lookup)?,
            world_size,
            is_one_node: local_world_size == Some(world_size),
            is_hosted: lookup(HOSTED).is_some(),
            members: Member::Rank,
            secret: JobSecret::read(launcher, &lookup)?,
        }))
    }

    /// Rank of the host, or [`NO_RANK`] if it is the launcher.
    pub(in crate::comm) fn host_rank(&self) -> usize {
        if self.is_hosted { NO_RANK } else { 0 }
    }

    /// Name of the host in messages.
    pub(super) fn host_name(&self) -> String {
        if self.is_hosted { "the launcher".to_owned() } else { format!("{} 0", self.members) }
    }
}

/// Reads the IP address to listen on, if one is set.
///
/// # Errors
/// A message, if it is not an IP address.
pub(super) fn bind_address(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<IpAddr>, String> {
    let parse = |text: String| {
        text.trim().parse().map_err(|_| {
            format!("ULYSSES_MASTER_BIND is `{text}`, expected an IP address of rank 0's machine")
        })
    };
    lookup("ULYSSES_MASTER_BIND").map(parse).transpose()
}

impl fmt::Display for StoreEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}
