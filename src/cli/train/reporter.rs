//! What rank 0 tells of every step.

use super::Run;
use anyhow::Context;
use std::path::PathBuf;
use ulysses::monitor::{Metrics, MetricsWriter, Progress};

/// What rank 0 brings back besides its summary.
#[derive(Default)]
pub(super) struct Curve {
    pub(super) first_loss: f64,
    pub(super) last_loss: f64,
    pub(super) tokens: u64,
    pub(super) seconds: f64,
}

/// Rank 0's metrics file, progress lines and totals.
pub(super) struct Reporter {
    path: PathBuf,
    writer: MetricsWriter,
    progress: Progress,
    pub(super) curve: Curve,
}

impl Reporter {
    pub(super) fn new(run: &Run) -> anyhow::Result<Self> {
        let path = run.output.join("metrics.jsonl");
        let writer = MetricsWriter::create(&path).with_context(|| path.display().to_string())?;
        let progress = Progress::new(run.steps, run.config.steps_per_print);
        Ok(Self { path, writer, progress, curve: Curve::default() })
    }

    pub(super) fn record(&mut self, metrics: &Metrics) -> anyhow::Result<()> {
        if metrics.step == 1 {
            self.curve.first_loss = metrics.loss;
        }
        self.curve.last_loss = metrics.loss;
        self.curve.tokens += metrics.tokens;
        self.curve.seconds += metrics.step_seconds;
        self.progress.report(metrics);
        self.writer.write(metrics).with_context(|| format!("cannot write {}", self.path.display()))
    }
}
