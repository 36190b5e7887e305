//! What rank 0 tells of every step.

use super::Run;
use anyhow::Context;
use std::path::PathBuf;
use ulysses::monitor::{Metrics, MetricsWriter, Progress, RunTotals};

/// Rank 0's metrics file, progress lines and totals.
pub(super) struct Reporter {
    path: PathBuf,
    writer: MetricsWriter,
    progress: Progress,
    pub(super) totals: RunTotals,
}

impl Reporter {
    pub(super) fn new(run: &Run) -> anyhow::Result<Self> {
        let path = run.output.join("metrics.jsonl");
        let writer = MetricsWriter::create(&path).with_context(|| path.display().to_string())?;
        let progress = Progress::new(run.steps, run.config.steps_per_print);
        Ok(Self { path, writer, progress, totals: RunTotals::default() })
    }

    pub(super) fn record(&mut self, metrics: &Metrics) -> anyhow::Result<()> {
        self.totals.record(metrics);
        self.progress.report(metrics);
        self.writer.write(metrics).with_context(|| format!("cannot write {}", self.path.display()))
    }
}
