//! The output directory of a job, which its first process creates and locks.

use super::options::{JobError, OrJobError};
use super::prepared::PreparedJob;
use super::ranks::JobRanks;
use crate::checkpoint::OutputLock;
use crate::comm::host_name;
use crate::config::Config;
use crate::trainer::{CreatedDirs, check_event_files};
use std::io;
use std::path::{Path, PathBuf};

impl PreparedJob {
    /// Creates and locks the output directory in the first process, which gets the lock, and tells the others its path.
    /// Without `ulysses.output` it is `runs/NAME-N`, after the config file. `check` runs in all processes before anything
    /// is created; a rejected job leaves nothing behind. Collective.
    ///
    /// # Errors
    /// A failed check, a directory that cannot be created, or one that another job uses.
    pub(super) fn acquire_output(
        &mut self,
        ranks: &mut JobRanks,
        check: impl FnOnce() -> Result<(), JobError>,
    ) -> Result<Option<OutputLock>, JobError> {
        let is_first = ranks.is_first();
        let acquire = || is_first.then(|| LockedOutput::acquire(&self.file, &self.config)).transpose();
        let acquired = ranks.agree(check().and_then(|()| acquire()))?;
        let path = acquired.as_ref().map(|output| output.path.clone());
        self.options.output = Some(ranks.value_of_first(path.unwrap_or_default())?);
        Ok(acquired.map(|output| output.lock))
    }

    /// Returns whether the config asks for files in the output directory.
    pub(super) fn writes_output(&self) -> bool {
        let Config { checkpoint, ulysses, monitoring, .. } = &self.config;
        let has_event_files = monitoring.tensorboard.enabled || monitoring.csv_monitor.enabled;
        checkpoint.is_some() || ulysses.output.is_some() || has_event_files
    }
}

/// An output directory that no other job uses.
struct LockedOutput {
    path: PathBuf,
    lock: OutputLock,
}

impl LockedOutput {
    fn acquire(file: &Path, config: &Config) -> Result<Self, JobError> {
        let mut created = CreatedDirs::default();
        let path = create(file, config, &mut created)?;
        check_event_files(&config.monitoring, &path, &mut created).or_usage()?;
        // Last, because the lock file stays.
        let lock = OutputLock::acquire(&path, &holder()).or_run()?;
        created.keep();
        Ok(Self { path, lock })
    }
}

/// Creates the output directory without touching files in it: the ranks decide whether anything is left to do.
fn create(file: &Path, config: &Config, created: &mut CreatedDirs) -> Result<PathBuf, JobError> {
    let Some(output) = config.ulysses.output.as_ref().map(PathBuf::from) else {
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        return create_numbered(&name, created)
            .map_err(|error| JobError::run(format!("cannot create an output directory in runs: {error}")));
    };
    let refuse = |message: String| Err(JobError::run(message));
    if output.exists() && !output.is_dir() {
        let output = output.display();
        return refuse(format!("`ulysses.output` or --output {output}: expected a directory, found a file"));
    }
    match created.create(&output) {
        Ok(()) => Ok(output),
        Err(error) => refuse(format!("cannot create the output directory {}: {error}", output.display())),
    }
}

/// Creates `runs/NAME-N` with the first number that is free. Runs that start at the same time get different ones.
fn create_numbered(name: &str, created: &mut CreatedDirs) -> io::Result<PathBuf> {
    let runs = Path::new("runs");
    created.create(runs)?;
    let mut number = 1;
    loop {
        let output = runs.join(format!("{name}-{number}"));
        match created.create_new(&output) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            made => return made.map(|()| output),
        }
    }
}

/// Describes this job for the error of another one that wants the same directory: its command line.
fn holder() -> String {
    let host = host_name().unwrap_or_else(|| "this host".to_owned());
    let mut words = std::env::args_os();
    let program = words.next().map(PathBuf::from).unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_os_string();
    let words: Vec<_> =
        std::iter::once(program).chain(words).map(|word| word.to_string_lossy().into_owned()).collect();
    format!("`{}`, process {} on {host}", words.join(" "), std::process::id())
}
