//! Which hosts of `mpirun` can still be reached, by the program with which it reaches them.

use super::hosts::Host;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for all hosts together.
const TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Variables with which users replace `ssh`, in Open MPI and in Hydra.
const AGENTS: [&str; 2] = ["OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC"];

/// Splits hosts into those on which a command runs, and the lost ones. This machine is always reached.
pub(super) fn reachable(hosts: &[Host]) -> (Vec<Host>, Vec<Host>) {
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
    if [own.trim(), "localhost", "127.0.0.1"].contains(&host) {
        return None;
    }
    let agent = AGENTS.iter().find_map(|name| std::env::var(name).ok());
    let mut words = agent.as_deref().unwrap_or("ssh -o BatchMode=yes -o ConnectTimeout=5").split_whitespace();
    let mut command = Command::new(words.next()?);
    command.args(words).args([host, "true"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
}
