//! Which hosts of `mpirun` can still be reached, by the program with which it reaches them.

use super::hosts::Host;
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use ulysses::comm::host_name;

/// Time limit for all hosts together.
const TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Variables with which users replace `ssh`, in Open MPI and in Hydra.
const AGENTS: [&str; 2] = ["OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC"];

/// The hosts that answered before the first start. Others cannot be judged later: `mpirun` may reach them without `ssh`, as
/// under SLURM.
pub(super) struct Probe {
    answered: Vec<Host>,
}

impl Probe {
    /// Probes the hosts before the first start. Also returns those that are lost: they do not answer, and another machine does.
    pub(super) fn new(hosts: &[Host]) -> (Self, Vec<Host>) {
        let answers = answers(hosts);
        let with = |wanted| {
            let answered = hosts.iter().zip(&answers).filter(move |(_, answer)| **answer == Some(wanted));
            answered.map(|(host, _)| host.clone())
        };
        let answered: Vec<Host> = with(true).collect();
        let is_lost = |host: &Host| !answered.is_empty() && !resolves_to_this_machine(&host.name);
        let lost = with(false).filter(is_lost).collect();
        (Self { answered }, lost)
    }

    /// Splits hosts into those that are left, and the lost ones: they answered at first, and no longer do.
    pub(super) fn split(&self, hosts: &[Host]) -> (Vec<Host>, Vec<Host>) {
        let answers = hosts.iter().zip(answers(hosts));
        let (left, lost): (Vec<_>, Vec<_>) =
            answers.partition(|(host, answer)| *answer != Some(false) || !self.answered.contains(host));
        let hosts = |of: Vec<(&Host, _)>| of.into_iter().map(|(host, _)| host.clone()).collect();
        (hosts(left), hosts(lost))
    }
}

/// Returns for each host whether a command runs on it; `None` for this machine, and without a program to reach others.
fn answers(hosts: &[Host]) -> Vec<Option<bool>> {
    let probes: Vec<Option<Child>> = hosts.iter().map(|host| probe(&host.name)).collect();
    let deadline = Instant::now() + TIMEOUT;
    let has_answered = |mut child: Child| loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
            _ => {
                let _ = child.kill().and_then(|()| child.wait());
                return false;
            }
        }
    };
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
        let (probe, lost_at_first) = Probe::new(&hosts);
        assert_eq!((probe.split(&hosts), lost_at_first), ((hosts.to_vec(), Vec::new()), Vec::new()));
        let probe = Probe { answered: vec![here.clone(), far.clone()] };
        assert_eq!(probe.split(&hosts), (vec![here, farther], vec![far]));
    }

    #[test]
    fn addresses_of_this_machine_are_not_probed() {
        assert!(["localhost", "127.0.0.1", "127.0.0.2"].into_iter().all(|name| probe(name).is_none()));
    }
}
