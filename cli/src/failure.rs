//! A failed command, and its exit code.

use ulysses::trainer::JobError;

/// A failed command, with its exit code.
pub(crate) enum Failure {
    /// Bad arguments, config, model description or batch file: exit code 2.
    Usage(anyhow::Error),
    /// A failed run or check: exit code 1.
    Run(anyhow::Error),
    /// A run that a signal stopped after a step: exit code 75, `EX_TEMPFAIL` of sysexits.h.
    Stopped {
        /// The last completed step.
        step: u64,
        /// Whether that step is saved in a checkpoint.
        is_saved: bool,
    },
    /// A job that a signal stopped, with the exit code of its processes.
    Ended {
        /// The exit code.
        exit_code: u8,
    },
}

impl From<JobError> for Failure {
    fn from(error: JobError) -> Self {
        if error.is_usage() { Self::Usage(error.into()) } else { Self::Run(error.into()) }
    }
}

/// Assigns an exit code to an error.
pub(crate) trait OrFail<T> {
    /// Turns an error into [`Failure::Usage`].
    fn or_usage(self) -> Result<T, Failure>;
    /// Turns an error into [`Failure::Run`].
    fn or_run(self) -> Result<T, Failure>;
}

impl<T, E: Into<anyhow::Error>> OrFail<T> for Result<T, E> {
    fn or_usage(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Usage(error.into()))
    }

    fn or_run(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Run(error.into()))
    }
}

/// Joins an error and its causes into one line, without causes that the line contains already.
pub(crate) fn causes(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}
