//! The options of a job besides its config, [`JobOptions`] and [`JobLog`], and its error, [`JobError`].

use crate::comm::ProcessFlags;
use crate::config::{Backend, ChatDate, Overrides, Settings};
use crate::data::{DataError, Tokenizer};
use crate::kernels::device::DeviceKind;
use crate::monitor::Tracer;
use crate::trainer::options::log_event;
use std::path::{Path, PathBuf};

/// Opens a tokenizer file, or for `None` the tokenizer of bytes.
pub type OpenTokenizer = fn(Option<&Path>, ChatDate) -> Result<Tokenizer, JobError>;

/// What a job adds to its config file: changes of it, and settings that it has no key for.
#[derive(Debug, Clone)]
pub struct JobOptions {
    /// Changes of values in the config file.
    pub settings: Settings,
    /// Values that replace those of the file when it is resolved.
    pub overrides: Overrides,
    /// The flag `--mesh`, which replaces the mesh of `overrides`. It may depend on the number of ranks that a launcher has
    /// started.
    pub mesh: Option<String>,
    /// The kind of device; `None`: GPUs if the build and the machine have them, else the CPU.
    pub device: Option<DeviceKind>,
    /// The backend, instead of the config's or the launcher's: the flag `--backend`.
    pub backend: Option<Backend>,
    /// This process's rank in a job without a launcher.
    pub process: ProcessFlags,
    /// The checkpoint to resume, as a path for [`Resume::new`](crate::trainer::Resume::new); `Some(None)` is the newest in
    /// the output directory.
    pub resume: Option<Option<PathBuf>>,
    /// As in [`TrainerOptions::reset_data`](crate::trainer::TrainerOptions::reset_data).
    pub reset_data: bool,
    /// As in [`TrainerOptions::memory_dir`](crate::trainer::TrainerOptions::memory_dir).
    pub memory_dir: Option<PathBuf>,
    /// Whether the files of `tensorboard` and `csv_monitor` are written, as they are by default; false for a job with
    /// [`MetricsFiles`](crate::trainer::MetricsFiles), which write them too.
    pub writes_event_files: bool,
    /// Receives a timeline of all ranks, for [`JobReport::trace`](super::JobReport::trace).
    pub tracer: Option<Tracer>,
    /// Opens the tokenizer; by default in this process.
    pub open_tokenizer: OpenTokenizer,
    /// Receives the lines of the job.
    pub log: JobLog,
}

impl Default for JobOptions {
    fn default() -> Self {
        Self {
            settings: Settings::default(),
            overrides: Overrides::default(),
            mesh: None,
            device: None,
            backend: None,
            process: ProcessFlags::default(),
            resume: None,
            reset_data: false,
            memory_dir: None,
            writes_event_files: true,
            tracer: None,
            open_tokenizer: |path, date| match path {
                Some(path) => Tokenizer::from_file_with_date(path, date).map_err(JobError::usage),
                None => Ok(Tokenizer::bytes()),
            },
            log: JobLog::default(),
        }
    }
}

/// Where the lines of a process go. In a job of several processes one of them reports to the user.
#[derive(Debug, Clone, Copy)]
pub struct JobLog {
    /// Receives the lines of the job, in the process that reports. A line that begins with `warning: ` is a warning. By
    /// default they are `tracing` events.
    pub line: fn(&str),
    /// Told whether another process reports from now on, also failures, so that this one stays silent. By default it does
    /// nothing.
    pub mute: fn(bool),
}

impl Default for JobLog {
    fn default() -> Self {
        Self { line: log_event, mute: |_| () }
    }
}

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
