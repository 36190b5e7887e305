//! [`JobError`]: the error of a job, and whether its settings are the cause.

use crate::data::DataError;

type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// An error of a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The settings do not allow the job: config, model, device, processes, or the checkpoint to resume. The exit code of
    /// the command is 2.
    #[error(transparent)]
    Usage(BoxedError),
    /// The data cannot be trained on, or a rank failed. The exit code of the command is 1.
    #[error(transparent)]
    Run(BoxedError),
}

impl JobError {
    /// Creates [`JobError::Usage`], from a message, for example.
    pub fn usage(error: impl Into<BoxedError>) -> Self {
        Self::Usage(error.into())
    }

    /// Creates [`JobError::Run`].
    pub fn run(error: impl Into<BoxedError>) -> Self {
        Self::Run(error.into())
    }

    /// Returns whether the settings are the cause.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Usage(_))
    }
}

/// Unusable data is no mistake in the settings.
impl From<DataError> for JobError {
    fn from(error: DataError) -> Self {
        Self::run(error)
    }
}

/// Classifies an error.
pub(super) trait OrJobError<T> {
    fn or_usage(self) -> Result<T, JobError>;
    fn or_run(self) -> Result<T, JobError>;
}

impl<T, E: Into<BoxedError>> OrJobError<T> for Result<T, E> {
    fn or_usage(self) -> Result<T, JobError> {
        self.map_err(JobError::usage)
    }

    fn or_run(self) -> Result<T, JobError> {
        self.map_err(JobError::run)
    }
}
