//! The failure of a rank.

use super::output::StderrTail;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// A failed process and its cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankFailure {
    /// `None` if `mpirun` does not name the rank.
    pub(super) rank: Option<usize>,
    /// Its host, in a job on several machines.
    pub(super) host: Option<String>,
    exit: Exit,
    /// Last line of its standard error.
    last_line: Option<String>,
    /// Failure that the ranks reported before, which may be the root cause.
    pub(super) reported: Option<String>,
    /// Ranks that did not join the job.
    pub(super) missing: Vec<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    Code(i32),
    Signal(i32),
}

impl RankFailure {
    pub(super) fn new(rank: Option<usize>, status: ExitStatus, last_line: Option<String>) -> Self {
        let exit = match status.signal() {
            Some(signal) => Exit::Signal(signal),
            None => Exit::Code(status.code().unwrap_or(1)),
        };
        Self { rank, host: None, exit, last_line, reported: None, missing: Vec::new() }
    }

    /// Returns whether arguments or config are invalid, so that a restart would fail again.
    pub(super) fn is_usage(&self) -> bool {
        self.exit == Exit::Code(2)
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank} ")?,
            None => write!(f, "mpirun ")?,
        }
        if let Some(host) = &self.host {
            write!(f, "on {host} ")?;
        }
        match self.exit {
            Exit::Code(code) => write!(f, "ended with exit code {code}")?,
            Exit::Signal(signal) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
                write!(f, "was killed by signal {signal} ({name})")?;
            }
        }
        if let Some(reported) = &self.reported {
            write!(f, "; reported failure: {reported}")?;
        }
        if !self.missing.is_empty() {
            write!(f, "; rank(s) {:?} did not join the job", self.missing)?;
        }
        self.last_line.as_ref().map_or(Ok(()), |line| write!(f, "; last line: {line}"))
    }
}

/// Parses Open MPI's message about the rank that ended its job: `process rank 2 with PID 7 on node n exited on
/// signal 9`, or `Process name: [[7,1],2]` with `Exit code: 3`.
pub(super) fn parse_mpirun(status: ExitStatus, stderr: &StderrTail) -> RankFailure {
    let text = stderr.mpirun.join("\n");
    let number_after = |marker: &str| {
        let rest = text.split_once(marker)?.1.trim_start();
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<i32>().ok()
    };
    let killed = number_after("process rank ").zip(number_after("exited on signal "));
    let named = text.split_once("Process name: [[").and_then(|(_, rest)| rest.split_once("],"));
    let exited = named.and_then(|(_, rest)| rest.split(']').next()?.parse().ok());
    let exited = exited.zip(number_after("Exit code:"));
    let (rank, exit) = match (killed, exited) {
        (Some((rank, signal)), _) => (rank, Exit::Signal(signal)),
        (None, Some((rank, code))) => (rank, Exit::Code(code)),
        (None, None) => {
            // Not one that frames the message.
            let has_text = |line: &&String| line.contains(char::is_alphanumeric);
            let last = stderr.mpirun.iter().rev().find(has_text);
            return RankFailure::new(None, status, last.cloned());
        }
    };
    let rank = usize::try_from(rank).ok();
    let last_line = rank.and_then(|rank| stderr.last_lines.get(&rank)).cloned();
    RankFailure { rank, host: None, exit, last_line, reported: None, missing: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mpirun_says(text: &str) -> RankFailure {
        let last_lines = [(2, "panicked".to_owned())].into();
        let stderr = StderrTail { last_lines, mpirun: text.lines().map(str::to_owned).collect() };
        parse_mpirun(ExitStatus::from_raw(137 << 8), &stderr)
    }

    #[test]
    fn mpirun_messages_give_the_rank_and_the_cause() {
        let killed = mpirun_says(
            "-----\nmpirun noticed that process rank 2 with PID 41 on node n0 exited on signal 9 (Killed).\n-----",
        );
        assert_eq!(killed.to_string(), "rank 2 was killed by signal 9 (SIGKILL); last line: panicked");
        let exited = mpirun_says(
            "mpirun detected that one or more processes exited with non-zero status, thus causing\n\
             the job to be terminated. The first process to do so was:\n\n  Process name: [[27107,1],3]\n  \
             Exit code:    2\n",
        );
        assert_eq!(exited.to_string(), "rank 3 ended with exit code 2");
        assert_eq!(
            RankFailure { missing: vec![1, 2], ..exited.clone() }.to_string(),
            "rank 3 ended with exit code 2; rank(s) [1, 2] did not join the job"
        );
        assert!(exited.is_usage());
        let on_host = RankFailure { host: Some("n1".to_owned()), ..exited };
        assert_eq!(on_host.to_string(), "rank 3 on n1 ended with exit code 2");
        let other = mpirun_says("There are not enough slots\n--------");
        assert_eq!(
            other.to_string(),
            "mpirun ended with exit code 137; last line: There are not enough slots"
        );
    }
}
