//! Which hosts of `mpirun` can still be reached, by the program with which it reaches them.

use super::hosts::Host;
use crate::launch::processes::wait_until;
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use ulysses::comm::host_name;

/// Time limit for all hosts together.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Variables with which users replace `ssh`, in Open MPI and in Hydra.
const AGENTS: [&str; 2] = ["OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC"];

/// How hosts answered before the first start. Those without an answer cannot be judged later: `mpirun` may reach them without
/// `ssh`, as under SLURM.
pub(super) struct Probe {
    answered: Vec<Host>,
    silent: Vec<Host>,
}

impl Probe {
    /// Probes the hosts before the first start.
    pub(super) fn new(hosts: &[Host]) -> Self {
        let answers = answers(hosts);
        let with = |wanted| {
            let hosts = hosts.iter().zip(&answers).filter(move |(_, answer)| **answer == Some(wanted));
            hosts.map(|(host, _)| host.clone()).collect()
        };
        Self { answered: with(true), silent: with(false) }
    }

    /// Returns the hosts that are lost before the first start: they do not answer, and another machine does.
    pub(super) fn lost_at_first(&self) -> Vec<Host> {
        let is_lost = |host: &&Host| !self.answered.is_empty() && !resolves_to_this_machine(&host.name);
        self.silent.iter().filter(is_lost).cloned().collect()
    }

    /// Returns those of `hosts` that are lost since: they answered at first, and no longer do.
    pub(super) fn lost_since(&self, hosts: &[Host]) -> Vec<Host> {
        let answers = hosts.iter().zip(answers(hosts));
        let is_lost = |(host, answer): &(&Host, _)| *answer == Some(false) && self.answered.contains(host);
        answers.filter(is_lost).map(|(host, _)| host.clone()).collect()
    }
}

/// Returns for each host whether a command runs on it; `None` for this machine, and without a program to reach others.
fn answers(hosts: &[Host]) -> Vec<Option<bool>> {
    let probes: Vec<Option<Child>> = hosts.iter().map(|host| probe(&host.name)).collect();
    let deadline = Instant::now() + TIMEOUT;
    let has_answered = |mut child| wait_until(deadline, &mut child).is_some_and(|status| status.success());
    probes.into_iter().map(|probe| probe.map(has_answered)).collect()
}

/// A name may take long to look up.
fn resolves_to_this_machine(host: &str) -> bool {
    let addresses = (host, 0).to_socket_addrs().into_iter().flatten();
    addresses.into_iter().any(|address| TcpListener::bind(address).is_ok())
}

/// Starts a command on a host; `None` if that is this machine, or the program is missing.
fn probe(host: &str) -> Option<Child> {
    if host == "localhost"
        || host_name().as_deref() == Some(host)
        || host.parse::<IpAddr>().is_ok() && resolves_to_this_machine(host)
    {
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
        let probe = Probe::new(&hosts);
        assert_eq!((probe.lost_since(&hosts), probe.lost_at_first()), (Vec::new(), Vec::new()));
        let probe = Probe { answered: vec![here, far.clone()], silent: vec![farther] };
        assert_eq!(probe.lost_since(&hosts), [far]);
    }

    #[test]
    fn addresses_of_this_machine_are_not_probed() {
        assert!(["localhost", "127.0.0.1", "127.0.0.2"].into_iter().all(|name| probe(name).is_none()));
    }
}
