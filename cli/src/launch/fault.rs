//! Which rank failed, and why.

use super::output::Said;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Why a process did not do its work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    /// `None` if `mpirun` does not say which.
    pub(super) rank: Option<usize>,
    how: How,
    /// The last line that it wrote to standard error.
    last_line: Option<String>,
    /// What the ranks have reported before, which the process may only have ended of.
    reported: Option<String>,
    /// The ranks that the others have waited for in vain to meet them.
    missing: Vec<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Exited(i32),
    Killed(i32),
}

impl Fault {
    pub(super) fn new(rank: Option<usize>, status: ExitStatus, last_line: Option<&str>) -> Self {
        let how = match status.signal() {
            Some(signal) => How::Killed(signal),
            None => How::Exited(status.code().unwrap_or(1)),
        };
        Self { rank, how, last_line: last_line.map(str::to_owned), reported: None, missing: Vec::new() }
    }

    /// The same, with the failure that the ranks have reported, and those that have not come to meet the others.
    pub(super) fn with_report(self, reported: Option<&str>, missing: Vec<usize>) -> Self {
        Self { reported: reported.map(str::to_owned), missing, ..self }
    }

    /// Whether arguments or config are at fault, so that another try would end the same.
    pub(super) fn is_usage(&self) -> bool {
        self.how == How::Exited(2)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank} ")?,
            None => write!(f, "mpirun ")?,
        }
        match self.how {
            How::Exited(code) => write!(f, "ended with exit code {code}")?,
            How::Killed(signal) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
                write!(f, "was killed by signal {signal} ({name})")?;
            }
        }
        if let Some(reported) = &self.reported {
            write!(f, "; the ranks report: {reported}")?;
        }
        if !self.missing.is_empty() {
            write!(f, "; rank(s) {:?} have not come to meet the others", self.missing)?;
        }
        self.last_line.as_ref().map_or(Ok(()), |line| write!(f, "; its last line: {line}"))
    }
}

/// What Open MPI's `mpirun` says of the rank that ended its job: `process rank 2 with PID 7 on node n exited on
/// signal 9`, or `Process name: [[7,1],2]` with `Exit code: 3`.
pub(super) fn of_mpirun(status: ExitStatus, said: &Said) -> Fault {
    let text = said.mpirun.join("\n");
    let number_after = |marker: &str| {
        let rest = text.split_once(marker)?.1.trim_start();
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<i32>().ok()
    };
    let killed = number_after("process rank ").zip(number_after("exited on signal "));
    let named = text.split_once("Process name: [[").and_then(|(_, rest)| rest.split_once("],"));
    let exited = named.and_then(|(_, rest)| rest.split(']').next()?.parse().ok());
    let exited = exited.zip(number_after("Exit code:"));
    let (rank, how) = match (killed, exited) {
        (Some((rank, signal)), _) => (rank, How::Killed(signal)),
        (None, Some((rank, code))) => (rank, How::Exited(code)),
        (None, None) => {
            return Fault::new(None, status, said.mpirun.last().map(String::as_str));
        }
    };
    let rank = usize::try_from(rank).ok();
    let last_line = rank.and_then(|rank| said.last_of(rank)).map(str::to_owned);
    Fault { rank, how, last_line, reported: None, missing: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mpirun_says(text: &str) -> Fault {
        let last = vec![(2, "panicked".to_owned())];
        let said = Said { last, mpirun: text.lines().map(str::to_owned).collect() };
        of_mpirun(ExitStatus::from_raw(137 << 8), &said)
    }

    #[test]
    fn mpiruns_reports_name_the_rank_and_the_cause() {
        let killed = mpirun_says(
            "-----\nmpirun noticed that process rank 2 with PID 41 on node n0 exited on signal 9 (Killed).\n-----",
        );
        assert_eq!(killed.to_string(), "rank 2 was killed by signal 9 (SIGKILL); its last line: panicked");
        let exited = mpirun_says(
            "mpirun detected that one or more processes exited with non-zero status, thus causing\n\
             the job to be terminated. The first process to do so was:\n\n  Process name: [[27107,1],3]\n  \
             Exit code:    2\n",
        );
        assert_eq!(exited.to_string(), "rank 3 ended with exit code 2");
        assert_eq!(
            exited.clone().with_report(None, vec![1, 2]).to_string(),
            "rank 3 ended with exit code 2; rank(s) [1, 2] have not come to meet the others"
        );
        assert!(exited.is_usage());
        let other = mpirun_says("There are not enough slots");
        assert_eq!(
            other.to_string(),
            "mpirun ended with exit code 137; its last line: There are not enough slots"
        );
    }
}
