//! [`JobOptions`]: what the config of a job does not say; and [`JobLog`].

use super::error::JobError;
use super::sources::OpenTokenizer;
use crate::comm::ProcessFlags;
use crate::config::{Backend, Settings};
use crate::data::Tokenizer;
use crate::kernels::device::DeviceKind;
use std::path::PathBuf;

/// Settings of a job that are not in its config.
#[derive(Debug, Clone)]
pub struct JobOptions {
    /// Changes of values in the config file.
    pub settings: Settings,
    /// The kind of device; `None`: GPUs if the build and the machine have them, else the CPU.
    pub device: Option<DeviceKind>,
    /// The backend, instead of the config's or the launcher's.
    pub backend: Option<Backend>,
    /// This process's rank in a job without a launcher.
    pub process: ProcessFlags,
    /// The checkpoint to resume, as a path for [`Resume::new`](crate::trainer::Resume::new); `Some(None)` is the newest in the output directory.
    pub resume: Option<Option<PathBuf>>,
    /// As in [`TrainerOptions::reset_data`](crate::trainer::TrainerOptions::reset_data).
    pub reset_data: bool,
    /// As in [`TrainerOptions::memory_dir`](crate::trainer::TrainerOptions::memory_dir).
    pub memory_dir: Option<PathBuf>,
    /// Opens the tokenizer; by default in this process.
    pub open_tokenizer: OpenTokenizer,
}

impl Default for JobOptions {
    fn default() -> Self {
        Self {
            settings: Settings::default(),
            device: None,
            backend: None,
            process: ProcessFlags::default(),
            resume: None,
            reset_data: false,
            memory_dir: None,
            open_tokenizer: |path, date| match path {
                Some(path) => Tokenizer::from_file_with_date(path, date).map_err(JobError::usage),
                None => Ok(Tokenizer::bytes()),
            },
        }
    }
}

/// Where the lines of a process go. In a job of several processes one of them reports to the user.
#[derive(Debug, Clone, Copy)]
pub struct JobLog {
    /// Receives the lines of the job. By default they are `tracing` events.
    pub line: fn(&str),
    /// Told whether another process reports from now on, so that this one stays silent. By default it does nothing.
    pub mute: fn(bool),
}

impl Default for JobLog {
    fn default() -> Self {
        Self { line: |line| tracing::info!("{line}"), mute: |_| () }
    }
}
