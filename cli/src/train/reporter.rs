//! What rank 0 tells of every step.

use super::Run;
use super::feed::Phase;
use super::monitors::Monitors;
use super::output;
use super::profile::{self, Profile};
use crate::{causes, note};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};
use ulysses::config::OnSaveError;
use ulysses::engine::StepTimes;
use ulysses::engine::plan::{RankStep, model_flops};
use ulysses::monitor::{
    EvalMetrics, Metrics, MetricsWriter, Progress, RunTotals, breakdown, is_out_of_space,
};

/// Rank 0's metrics file, progress lines and totals.
pub(super) struct Reporter<'a> {
    run: &'a Run,
    path: PathBuf,
    writer: MetricsWriter,
    progress: Progress,
    monitors: Monitors,
    /// Of all ranks together, where it is known.
    peak_flops: Option<f64>,
    step_flops: StepFlops,
    /// Lines that found no room on the disk and wait in memory.
    waiting: Option<anyhow::Error>,
    pub(super) reported: Reported,
}

/// What the run comes to in the end.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Reported {
    pub(super) totals: RunTotals,
    /// `run.json`, as it was when the run began.
    pub(super) record: Value,
}

impl<'a> Reporter<'a> {
    /// The run called `run_id`, which has done `steps.start` steps before and goes on with the metrics that there are,
    /// up to step `steps.end`.
    pub(super) fn new(
        run: &'a Run,
        run_id: &str,
        steps: Range<u64>,
        peak_flops: Option<f64>,
    ) -> anyhow::Result<Self> {
        let record = output::begin(run, run_id, steps.start)?;
        let path = run.output.join("metrics.jsonl");
        let writer = MetricsWriter::resume(&path, steps.start).with_context(|| path.display().to_string())?;
        profile::remark(&run.config.monitoring.flops_profiler, &steps);
        let progress = Progress::new(steps, run.config.steps_per_print);
        let monitors = Monitors::new(&run.config, &run.output)?;
        let reported = Reported { totals: RunTotals::default(), record };
        Ok(Self {
            run,
            path,
            writer,
            progress,
            monitors,
            peak_flops,
            step_flops: StepFlops::default(),
            waiting: None,
            reported,
        })
    }

    /// A step, whose data is that of `phase`.
    pub(super) fn record(
        &mut self,
        metrics: Metrics,
        times: &StepTimes,
        phase: &Phase,
    ) -> anyhow::Result<()> {
        let seq_len = phase.data.seq_len();
        let Run { config, llama, mesh, .. } = self.run;
        let flops = self.step_flops.of_length(seq_len, || {
            let config = config.clone().with_seq_len(seq_len);
            model_flops(&config, llama, mesh).ok()
        });
        let rate = flops.map(|flops| flops / metrics.step_seconds);
        let gemm_share = rate.zip(self.peak_flops).map(|(rate, peak)| rate / peak);
        let metrics = Metrics { model_flops_per_second: rate, gemm_share, ..metrics };
        self.reported.totals.record(&metrics);
        self.progress.report(&metrics);
        if self.run.config.monitoring.wall_clock_breakdown && self.progress.is_due(metrics.step) {
            self.progress.print(&breakdown(&metrics));
        }
        self.profile(&metrics, times, seq_len)?;
        let recorded = self.monitors.record(&metrics);
        self.write(&metrics, recorded)
    }

    /// Tells of the step that `flops_profiler` names.
    fn profile(&self, metrics: &Metrics, times: &StepTimes, seq_len: usize) -> anyhow::Result<()> {
        let Run { config, llama, mesh, .. } = self.run;
        let profiler = &config.monitoring.flops_profiler;
        if !profiler.enabled || metrics.step != profiler.profile_step {
            return Ok(());
        }
        let config = config.clone().with_seq_len(seq_len);
        let planned = RankStep::of(&config, llama, mesh, 0)?;
        let profile = Profile { run: self.run, metrics, times, planned };
        profile.write(profiler.output_file.as_deref().map(Path::new))
    }

    pub(super) fn record_evaluation(&mut self, metrics: &EvalMetrics) -> anyhow::Result<()> {
        self.progress.report_evaluation(metrics);
        let recorded = self.monitors.record_evaluation(metrics);
        self.write(metrics, recorded)
    }

    fn write(&mut self, metrics: &impl serde::Serialize, others: anyhow::Result<()>) -> anyhow::Result<()> {
        let written = self.writer.write(metrics);
        let written = written.with_context(|| format!("cannot write {}", self.path.display()));
        self.notice(others.and(written))
    }

    /// Lets what finds no room wait, and says so once.
    fn notice(&mut self, written: anyhow::Result<()>) -> anyhow::Result<()> {
        match written {
            Ok(()) if self.waiting.take().is_some() => note("there is room again: the metrics are complete"),
            Ok(()) => {}
            Err(error) if is_out_of_space_anywhere(&error) => {
                if self.waiting.is_none() {
                    note(format_args!("{}; the metrics wait in memory until there is room", causes(&error)));
                }
                self.waiting = Some(error);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// After a step: metrics may go on waiting where a checkpoint that is being written takes the room, and gives it
    /// back when it fails (`is_saving`), or where the config asks to train on.
    ///
    /// # Errors
    /// Any other failure to write.
    pub(super) fn after_step(&mut self, is_saving: bool) -> anyhow::Result<()> {
        let config = self.run.config.checkpoint.as_ref();
        let goes_on = config.is_some_and(|config| config.on_error == OnSaveError::Continue);
        if is_saving || goes_on { Ok(()) } else { self.complete() }
    }

    /// Writes the lines that found no room before.
    ///
    /// # Errors
    /// When there still is none.
    pub(super) fn complete(&mut self) -> anyhow::Result<()> {
        if self.waiting.is_some() {
            let others = self.monitors.flush();
            let written = self.writer.flush();
            let written = written.with_context(|| format!("cannot write {}", self.path.display()));
            self.notice(others.and(written))?;
        }
        self.waiting.take().map_or(Ok(()), Err)
    }
}

fn is_out_of_space_anywhere(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(is_out_of_space)
}

/// Operations of a step on all ranks, where it can be planned: of rows of the length that was asked for last.
#[derive(Default)]
struct StepFlops {
    known: Option<(usize, Option<f64>)>,
}

impl StepFlops {
    /// What is planned is planned once, and so is what cannot be.
    fn of_length(&mut self, seq_len: usize, plan: impl FnOnce() -> Option<f64>) -> Option<f64> {
        match self.known {
            Some((known, flops)) if known == seq_len => flops,
            _ => {
                let flops = plan();
                self.known = Some((seq_len, flops));
                flops
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_planned_once_whether_or_not_it_can_be() {
        let (mut flops, mut planned) = (StepFlops::default(), Vec::new());
        for (seq_len, answer) in [(64, None), (64, None), (128, Some(2.0)), (128, Some(3.0)), (64, None)] {
            let told = flops.of_length(seq_len, || {
                planned.push(seq_len);
                answer
            });
            assert_eq!(told, (seq_len == 128).then_some(2.0));
        }
        assert_eq!(planned, [64, 128, 64]);
    }
}
