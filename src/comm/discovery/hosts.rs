//! The host of this process, and of all ranks where a variable states them.

use super::DiscoveryError;

/// Variable with the host of every rank, separated by commas in rank order, instead of the real ones: for tests of
/// several nodes on one machine.
pub const HOSTS_VARIABLE: &str = "ULYSSES_HOSTS";

/// Returns the name of this machine or container, if the system has one.
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let name = name.ok().or_else(|| std::env::var("HOSTNAME").ok());
    name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Returns the hosts of all ranks that [`HOSTS_VARIABLE`] states, from the variables that `lookup` returns.
///
/// # Errors
/// [`DiscoveryError::HostCount`] if they are not `world_size` names, if that is known.
pub fn stated_hosts(
    world_size: Option<usize>,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<Option<Vec<String>>, DiscoveryError> {
    let Some(text) = lookup(HOSTS_VARIABLE) else { return Ok(None) };
    let hosts: Vec<String> = text.split(',').map(|host| host.trim().to_owned()).collect();
    match world_size {
        Some(ranks) if ranks != hosts.len() => Err(DiscoveryError::HostCount { hosts: hosts.len(), ranks }),
        _ => Ok(Some(hosts)),
    }
}
