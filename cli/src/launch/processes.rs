//! The processes of this machine, read from `/proc` (Linux only).

use rustix::process::{Pid, Signal, kill_process};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Interval of polling the processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum wait for the end of killed processes.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Environment variable by which the processes of a job are found, also orphans and those in other process groups. Its
/// value is the watchdog of the job, after those of the jobs that contain it.
const MARK: &str = "ULYSSES_LAUNCH";

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) id: Pid,
    pub(super) parent: u32,
    /// It has ended, but its parent has not reaped it.
    pub(super) is_zombie: bool,
}

/// Returns all processes.
pub(super) fn processes() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let stat = |entry: std::fs::DirEntry| {
        let id = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        parse(id, &std::fs::read_to_string(entry.path().join("stat")).ok()?)
    };
    entries.filter_map(|entry| stat(entry.ok()?)).collect()
}

/// Parses `12 (name) S 1 …`; the name may contain any characters.
fn parse(id: Pid, stat: &str) -> Option<Process> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let is_zombie = matches!(fields.next()?, "Z" | "X");
    Some(Process { id, parent: fields.next()?.parse().ok()?, is_zombie })
}

/// Marks a process as one of the watchdog's job. Its own processes inherit that.
pub(super) fn set_mark(command: &mut Command, watchdog: Pid) {
    let outer = std::env::var(MARK).map_or_else(|_| String::new(), |outer| format!("{outer} "));
    command.env(MARK, format!("{outer}{}", watchdog.as_raw_pid()));
}

/// Returns whether the environment of a process marks it as one of the watchdog's job.
fn has_mark(environment: &[u8], watchdog: Pid) -> bool {
    let (text, watchdog) = (String::from_utf8_lossy(environment), watchdog.as_raw_pid().to_string());
    let mut marks = text.split('\0').filter_map(|entry| entry.strip_prefix(MARK)?.strip_prefix('='));
    marks.any(|watchdogs| watchdogs.split(' ').any(|id| id == watchdog))
}

/// Returns the running processes of the watchdog's job. Ended ones have no environment.
fn marked(watchdog: Pid) -> Vec<Pid> {
    let is_marked = |process: &Process| {
        let environment = std::fs::read(format!("/proc/{}/environ", process.id.as_raw_pid()));
        has_mark(&environment.unwrap_or_default(), watchdog)
    };
    processes().into_iter().filter(is_marked).map(|process| process.id).collect()
}

/// Sends a signal to the processes of the watchdog's job.
pub(super) fn signal_marked(watchdog: Pid, signal: Signal) {
    send(&marked(watchdog), signal);
}

fn send(processes: &[Pid], signal: Signal) {
    // An error means that the process has just ended.
    processes.iter().for_each(|process| _ = kill_process(*process, signal));
}

/// Waits until the processes of the watchdog's job have ended, and kills those that are left after `grace`.
pub(super) fn kill_marked_after(watchdog: Pid, grace: Duration) {
    let deadline = Instant::now() + grace;
    loop {
        let (left, now) = (marked(watchdog), Instant::now());
        if left.is_empty() || now > deadline + KILL_TIMEOUT {
            return;
        }
        if now >= deadline {
            send(&left, Signal::KILL);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
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
        let process = Process { id, parent: 3, is_zombie: false };
        assert_eq!(parse(id, "12 (a) R 1 1 (b) S 3 9 9 0"), Some(process));
        assert_eq!(parse(id, "12 (sh) Z 3 9 9"), Some(Process { is_zombie: true, ..process }));
        assert_eq!(parse(id, "12 (sh"), None);
    }

    #[test]
    fn a_process_has_the_marks_of_all_jobs_that_contain_it() {
        let has = |environment: &str, id| has_mark(environment.as_bytes(), Pid::from_raw(id).unwrap());
        let nested = "HOME=/root\0ULYSSES_LAUNCH=12 345\0RANK=0\0";
        assert!(has(nested, 12) && has(nested, 345));
        assert!(!has(nested, 34) && !has("ULYSSES_LAUNCHED=12\0X=ULYSSES_LAUNCH=12", 12));
    }
}
