//! What rank 0 tells of every step.

use super::Run;
use anyhow::Context;
use std::path::PathBuf;
use ulysses::monitor::{EvalMetrics, Metrics, MetricsWriter, Progress, RunTotals};

/// Rank 0's metrics file, progress lines and totals.
pub(super) struct Reporter {
    path: PathBuf,
    writer: MetricsWriter,
    progress: Progress,
    pub(super) totals: RunTotals,
}

impl Reporter {
    /// A run that has done `first_step` steps before goes on with the metrics that there are.
    pub(super) fn new(run: &Run, first_step: u64, last_step: u64) -> anyhow::Result<Self> {
        let path = run.output.join("metrics.jsonl");
        let writer = MetricsWriter::resume(&path, first_step).with_context(|| path.display().to_string())?;
        let progress = Progress::new(first_step..last_step, run.config.steps_per_print);
        Ok(Self { path, writer, progress, totals: RunTotals::default() })
    }

    pub(super) fn record(&mut self, metrics: &Metrics) -> anyhow::Result<()> {
        self.totals.record(metrics);
        self.progress.report(metrics);
        self.writer.write(metrics).with_context(|| format!("cannot write {}", self.path.display()))
    }

    pub(super) fn record_evaluation(&mut self, metrics: &EvalMetrics) -> anyhow::Result<()> {
        self.progress.report_evaluation(metrics);
        self.writer.write(metrics).with_context(|| format!("cannot write {}", self.path.display()))
    }
}
