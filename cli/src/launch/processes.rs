//! Finds, signals and kills the processes of a job, which it reads from `/proc` (Linux), and waits for the end of a child.

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Interval of polling a child.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Interval of scanning all processes.
const SCAN_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum wait for the end of killed processes.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Environment variable by which the processes of a job are found, also orphans and those in other process groups. Its
/// value is the mark of the job, after those of the jobs that contain it.
const MARK: &str = "ULYSSES_LAUNCH";

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) id: Pid,
    pub(super) parent: u32,
    /// Its process group; 0 for threads of the kernel.
    group: i32,
    /// It has ended, but its parent has not reaped it.
    pub(super) is_zombie: bool,
}

/// Returns all processes; none on a system without `/proc`.
pub(super) fn processes() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let stat = |entry: std::fs::DirEntry| {
        let id = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        parse(id, &std::fs::read_to_string(entry.path().join("stat")).ok()?)
    };
    entries.filter_map(|entry| stat(entry.ok()?)).collect()
}

/// Parses `12 (name) S 1 12 …`; the name may contain any characters.
fn parse(id: Pid, stat: &str) -> Option<Process> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let is_zombie = matches!(fields.next()?, "Z" | "X");
    Some(Process { id, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()?, is_zombie })
}

/// Returns a text that no other process has made, also not in another container or on another machine.
pub(super) fn unique_text() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}-{:x}", std::process::id(), now.as_nanos())
}

/// The processes of a job on this machine, without its watchdog.
pub(super) struct JobProcesses {
    /// The process group that the watchdog leads.
    pub(super) group: Pid,
    /// Unique text in the environment of the processes.
    pub(super) mark: String,
}

/// Some of a job's processes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scope {
    /// Those of its group, also if they have replaced their environment.
    Group,
    /// These and all that have its mark.
    All,
}

impl JobProcesses {
    /// Marks a process as one of the job. Its own processes inherit that.
    pub(super) fn set_mark(&self, command: &mut Command) {
        let outer = std::env::var(MARK).map_or_else(|_| String::new(), |outer| format!("{outer} "));
        command.env(MARK, format!("{outer}{}", self.mark));
    }

    /// Returns those that run; `None` on a system without `/proc`.
    fn running(&self, scope: Scope) -> Option<Vec<Pid>> {
        let all = processes();
        let is_own = |process: &&Process| match scope {
            _ if process.is_zombie || process.id == self.group => false,
            _ if process.group == self.group.as_raw_pid() => true,
            Scope::Group => false,
            Scope::All => {
                let environment = std::fs::read(format!("/proc/{}/environ", process.id.as_raw_pid()));
                has_mark(&environment.unwrap_or_default(), &self.mark)
            }
        };
        let own = all.iter().filter(is_own).map(|process| process.id).collect();
        (!all.is_empty()).then_some(own)
    }

    /// Sends a signal. Without `/proc` the whole group gets it, also the watchdog.
    pub(super) fn signal(&self, scope: Scope, signal: Signal) {
        // An error means that the process or the group has just ended.
        match self.running(scope) {
            Some(running) => running.iter().for_each(|process| _ = kill_process(*process, signal)),
            None => _ = kill_process_group(self.group, signal),
        }
    }

    /// Waits for their end, and kills those that are left after `grace`, with those that they start meanwhile.
    pub(super) fn kill_after(&self, scope: Scope, grace: Duration) {
        let deadline = Instant::now() + grace;
        while Instant::now() <= deadline + KILL_TIMEOUT {
            if self.running(scope).is_some_and(|running| running.is_empty()) {
                return;
            }
            if Instant::now() >= deadline {
                self.signal(scope, Signal::KILL);
            }
            std::thread::sleep(SCAN_INTERVAL);
        }
    }
}

/// Returns whether an environment has the mark of a job.
fn has_mark(environment: &[u8], mark: &str) -> bool {
    let entries = environment.split(|byte| *byte == 0);
    let mut values = entries.filter_map(|entry| entry.strip_prefix(MARK.as_bytes())?.strip_prefix(b"="));
    values.any(|marks| marks.split(|byte| *byte == b' ').any(|other| other == mark.as_bytes()))
}

/// Waits for the end of a process. Kills it at the deadline, and then returns `None`.
pub(super) fn wait_until(deadline: Instant, child: &mut Child) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
            _ => {
                let _ = child.kill().and_then(|()| child.wait());
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_names_may_contain_any_characters() {
        let id = Pid::from_raw(12).unwrap();
        let process = Process { id, parent: 3, group: 9, is_zombie: false };
        assert_eq!(parse(id, "12 (a) R 1 1 (b) S 3 9 9 0"), Some(process));
        assert_eq!(parse(id, "12 (sh) Z 3 9 9"), Some(Process { is_zombie: true, ..process }));
        assert_eq!(parse(id, "12 (sh"), None);
    }

    #[test]
    fn a_process_has_the_marks_of_all_jobs_that_contain_it() {
        let has = |environment: &str, mark| has_mark(environment.as_bytes(), mark);
        let nested = "HOME=/root\0ULYSSES_LAUNCH=12-a 345-b\0RANK=0\0";
        assert!(has(nested, "12-a") && has(nested, "345-b"));
        assert!(!has(nested, "345-a") && !has(nested, "12"), "another job of a process with this number");
        assert!(!has("ULYSSES_LAUNCHED=12-a\0X=ULYSSES_LAUNCH=12-a", "12-a"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_of_the_group_is_found_without_a_mark() {
        use std::os::unix::process::CommandExt;
        let start = |group: i32| {
            let mut command = Command::new("sleep");
            command.arg("1000").env_clear().process_group(group).spawn().unwrap()
        };
        let id = |child: &Child| Pid::from_raw(child.id() as i32).unwrap();
        let mut leader = start(0);
        let mut member = start(leader.id() as i32);
        let job = JobProcesses { group: id(&leader), mark: unique_text() };
        let found = [Scope::Group, Scope::All].map(|scope| job.running(scope));
        job.signal(Scope::All, Signal::KILL);
        let is_left = leader.try_wait().unwrap().is_none();
        leader.kill().unwrap();
        member.wait().unwrap();
        leader.wait().unwrap();
        assert!(is_left, "the watchdog is no process of the job");
        assert_eq!(found, [Some(vec![id(&member)]), Some(vec![id(&member)])]);
    }
}
