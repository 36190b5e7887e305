//! The processes of this machine, read from `/proc` (Linux only).

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::time::{Duration, Instant};

/// Interval of polling the processes.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum wait for the end of killed processes.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) id: u32,
    pub(super) parent: u32,
    pub(super) group: u32,
    /// It has ended, but its parent has not reaped it.
    pub(super) is_zombie: bool,
}

/// Returns all processes.
pub(super) fn processes() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let stat = |entry: std::fs::DirEntry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        parse(id, &std::fs::read_to_string(entry.path().join("stat")).ok()?)
    };
    entries.filter_map(|entry| stat(entry.ok()?)).collect()
}

/// Parses `12 (name) S 1 12 …`; the name may contain any characters.
fn parse(id: u32, stat: &str) -> Option<Process> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let is_zombie = matches!(fields.next()?, "Z" | "X");
    Some(Process { id, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()?, is_zombie })
}

/// Returns the running processes of a process group and their descendants in other groups, such as the ranks of `mpirun`.
pub(super) fn tree(all: &[Process], group: Pid) -> Vec<u32> {
    let group = group.as_raw_pid() as u32;
    let running: Vec<Process> = all.iter().filter(|process| !process.is_zombie).copied().collect();
    let is_in_group = |process: &&Process| process.group == group;
    let mut tree: Vec<u32> = running.iter().filter(is_in_group).map(|process| process.id).collect();
    let mut next = 0;
    while let Some(&parent) = tree.get(next) {
        let is_new = |process: &&Process| process.parent == parent && !tree.contains(&process.id);
        let children: Vec<u32> = running.iter().filter(is_new).map(|process| process.id).collect();
        tree.extend(children);
        next += 1;
    }
    tree
}

/// Ends the processes with the variable `mark` (`NAME=value`) in their environment: SIGTERM, and SIGKILL after `grace`. It finds
/// orphans too.
pub(super) fn end_marked(mark: &str, grace: Duration) {
    let is_marked = |process: &Process| {
        let environment = std::fs::read(format!("/proc/{}/environ", process.id)).unwrap_or_default();
        !process.is_zombie && environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
    };
    let deadline = Instant::now() + grace;
    let mut signal = Some(Signal::TERM);
    loop {
        let left: Vec<Process> = processes().into_iter().filter(is_marked).collect();
        if left.is_empty() || Instant::now() > deadline + KILL_TIMEOUT {
            return;
        }
        if Instant::now() > deadline {
            signal = Some(Signal::KILL);
        }
        if let Some(signal) = signal.take() {
            left.iter().for_each(|process| send(process.id, signal));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn send(id: u32, signal: Signal) {
    // An error means that the process has just ended.
    let _ = i32::try_from(id).ok().and_then(Pid::from_raw).map(|id| kill_process(id, signal));
}

/// Kills the other processes of a tree, then a process group.
pub(super) fn kill_tree(tree: &[u32], group: Pid) {
    tree.iter().filter(|id| **id != std::process::id()).for_each(|id| send(*id, Signal::KILL));
    let _ = kill_process_group(group, Signal::KILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_names_may_contain_any_characters() {
        let process = Process { id: 12, parent: 3, group: 9, is_zombie: false };
        assert_eq!(parse(12, "12 (a) R 1 1 (b) S 3 9 9 0"), Some(process));
        assert_eq!(parse(12, "12 (sh) Z 3 9 9"), Some(Process { is_zombie: true, ..process }));
        assert_eq!(parse(12, "12 (sh"), None);
    }

    #[test]
    fn a_tree_is_a_group_and_its_running_descendants() {
        let process = |id, parent, group| Process { id, parent, group, is_zombie: false };
        let ended = Process { is_zombie: true, ..process(7, 2, 2) };
        let all =
            [process(1, 0, 1), process(2, 1, 2), process(5, 4, 5), process(4, 3, 4), process(3, 2, 2), ended];
        assert_eq!(tree(&all, Pid::from_raw(2).unwrap()), [2, 3, 4, 5]);
    }
}
