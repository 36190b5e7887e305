//! `metrics.jsonl`: one JSON object per step.

use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// What is recorded of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metrics {
    /// Number of the step, from 1.
    pub step: u64,
    /// Loss of the global batch.
    pub loss: f64,
    /// Learning rate that was used.
    pub lr: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Valid tokens of the global batch.
    pub tokens: u64,
    /// `tokens / step_seconds`.
    pub tokens_per_second: f64,
    /// Wall time of the step, data included.
    pub step_seconds: f64,
    /// Factor on the loss in mixed precision; 1 in f32.
    pub loss_scale: f64,
    /// Nothing was updated.
    pub skipped: bool,
    /// Bytes that the reporting rank sent, over all groups.
    pub comm_bytes: u64,
    /// Bytes that the reporting rank's thread holds after the step; 0 unless the program's allocator
    /// counts ([`memory`](crate::memory)).
    pub memory_bytes: u64,
}

/// Appends metrics to a file.
#[derive(Debug)]
pub struct MetricsWriter {
    file: BufWriter<File>,
}

impl MetricsWriter {
    /// Creates the file, or empties it.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self { file: BufWriter::new(File::create(path)?) })
    }

    /// Writes one line, so that a reader sees every step as it ends.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn write(&mut self, metrics: &Metrics) -> std::io::Result<()> {
        serde_json::to_writer(&mut self.file, metrics)?;
        self.file.write_all(b"\n")?;
        self.file.flush()
    }
}
