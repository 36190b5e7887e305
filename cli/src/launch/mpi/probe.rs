//! Which hosts of `mpirun` can still be reached, by the program with which it reaches them.

use super::hosts::Host;
use std::net::{IpAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for all hosts together.
const TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Variables with which users replace `ssh`, in Open MPI and in Hydra.
const AGENTS: [&str; 2] = ["OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC"];

/// The hosts that answered before the first start. Others cannot be judged: `mpirun` may reach them without `ssh`, as
/// under SLURM, and a launcher may not reach its own machine by it.
pub(super) struct Probe {
    answered: Vec<Host>,
}

impl Probe {
    pub(super) fn new(hosts: &[Host]) -> Self {
        Self { answered: split(hosts).0 }
    }

    /// Splits hosts into those that are left, and the lost ones: they answered at first, and no longer do.
    pub(super) fn split(&self, hosts: &[Host]) -> (Vec<Host>, Vec<Host>) {
        let (_, silent) = split(hosts);
        let is_lost = |host: &Host| silent.contains(host) && self.answered.contains(host);
        hosts.iter().cloned().partition(|host| !is_lost(host))
    }
}

/// Splits hosts into those on which a command runs, and the lost ones. This machine is always reached.
fn split(hosts: &[Host]) -> (Vec<Host>, Vec<Host>) {
    let mut probes: Vec<Option<Child>> = hosts.iter().map(|host| probe(&host.name)).collect();
    let deadline = Instant::now() + TIMEOUT;
    let mut has_answered = |index: usize| {
        let Some(child) = &mut probes[index] else { return true };
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
                _ => {
                    let _ = child.kill().and_then(|()| child.wait());
                    return false;
                }
            }
        }
    };
    let (mut left, mut lost) = (Vec::new(), Vec::new());
    for (index, host) in hosts.iter().enumerate() {
        let group = if has_answered(index) { &mut left } else { &mut lost };
        group.push(host.clone());
    }
    (left, lost)
}

/// Starts a command on a host; `None` if that is this machine, or the program is missing.
fn probe(host: &str) -> Option<Child> {
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_own_address = host.parse::<IpAddr>().is_ok_and(|ip| TcpListener::bind((ip, 0)).is_ok());
    if [own.trim(), "localhost"].contains(&host) || is_own_address {
        return None;
    }
    let agent = AGENTS.iter().find_map(|name| std::env::var(name).ok());
    let mut words = agent.as_deref().unwrap_or("ssh -o BatchMode=yes -o ConnectTimeout=5").split_whitespace();
    let mut command = Command::new(words.next()?);
    command.args(words).args([host, "true"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> Host {
        Host { name: name.to_owned(), slots: 2 }
    }

    #[test]
    fn a_host_that_never_answered_is_not_lost() {
        // Names of the reserved domain `.invalid` never resolve, so no `ssh` reaches them.
        let [here, far, farther] = ["127.0.0.1", "far.invalid", "farther.invalid"].map(host);
        let hosts = [here.clone(), far.clone(), farther.clone()];
        let (left, lost) = Probe::new(&hosts).split(&hosts);
        assert_eq!((left, lost), (hosts.to_vec(), Vec::new()));
        let probe = Probe { answered: vec![here.clone(), far.clone()] };
        assert_eq!(probe.split(&hosts), (vec![here, farther], vec![far]));
    }

    #[test]
    fn addresses_of_this_machine_are_not_probed() {
        assert!(["localhost", "127.0.0.1", "127.0.0.2"].into_iter().all(|name| probe(name).is_none()));
    }
}
