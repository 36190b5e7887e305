//! The FLOPs profile of a step (`flops_profiler`).

use super::writable::check_writable;
use crate::output::log_line;
use crate::progress::above_progress;
use anyhow::Context;
use std::fmt::{self, Display, Formatter};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use ulysses::config::FlopsProfilerConfig;
use ulysses::device::dry::MatmulOp;
use ulysses::engine::{Engine, PartTimes, StepTimes};
use ulysses::estimate::RankStep;
use ulysses::estimate::event::Pass;
use ulysses::monitor::{Metrics, escaped};
use ulysses::trainer::JobError;
use ulysses::trainer::job::PreparedJob;
use ulysses::trainer::{Observer, ObserverError, StepEnd};

/// Checks in advance that the profile's file can be written.
pub(super) fn check(profiler: &FlopsProfilerConfig) -> Result<(), JobError> {
    let Some(path) = profiler.output_file.as_deref().map(Path::new).filter(|_| profiler.enabled) else {
        return Ok(());
    };
    check_writable(path).with_context(|| cannot_write(path)).map_err(JobError::usage)
}

/// Profiles the step that `flops_profiler` names. An observer of rank 0.
pub(super) struct Profiler<'a> {
    run: &'a PreparedJob,
}

impl<'a> Profiler<'a> {
    /// Prints a note if the step to profile is not in `steps` (exclusive start, inclusive end).
    pub(super) fn new(run: &'a PreparedJob, steps: &Range<u64>) -> Self {
        let profiler = &run.config.monitoring.flops_profiler;
        let (step, Range { start, end }) = (profiler.profile_step, steps);
        if profiler.enabled && !(start + 1..=*end).contains(&step) {
            log_line(format_args!(
                "note: no profile will be written: `flops_profiler.profile_step` is {step}, but this run trains steps {} to {end}",
                start + 1
            ));
        }
        Self { run }
    }
}

impl Observer for Profiler<'_> {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        let PreparedJob { config, model, mesh, .. } = self.run;
        let profiler = &config.monitoring.flops_profiler;
        if !profiler.enabled || step.metrics.step != profiler.profile_step {
            return Ok(());
        }
        let config = config.clone().with_seq_len(step.seq_len);
        let planned = RankStep::of(&config, &model.config, mesh, 0)?;
        let profile = Profile { run: self.run, metrics: &step.metrics, times: &step.times, planned };
        Ok(profile.write(profiler.output_file.as_deref().map(Path::new))?)
    }
}

fn cannot_write(path: &Path) -> String {
    format!("`flops_profiler.output_file`: cannot write {}", path.display())
}

/// Rank 0's planned FLOPs and measured times of a step. FLOPs of the LM head are those of the share of all
/// ranks' tokens that have a label.
struct Profile<'a> {
    run: &'a PreparedJob,
    metrics: &'a Metrics,
    times: &'a StepTimes,
    planned: RankStep,
}

impl Profile<'_> {
    /// Writes it to the file, or prints it.
    fn write(&self, file: Option<&Path>) -> anyhow::Result<()> {
        let Some(path) = file else {
            // A closed standard error does not stop the run.
            let text = self.to_string();
            let _ = above_progress(|| std::io::stderr().write_all(escaped(&text).as_bytes()));
            return Ok(());
        };
        ulysses::regular_file::write(path, self.to_string()).with_context(|| cannot_write(path))
    }

    fn flops(&self, ops: &[MatmulOp], pass: Pass) -> f64 {
        let flops = self.planned.flops.iter();
        let share = |op| if op == MatmulOp::LmHead { self.metrics.label_share() } else { 1.0 };
        let flops = flops.filter(|((op, of_pass), _)| ops.contains(op) && *of_pass == pass);
        flops.map(|((op, _), flops)| share(*op) * flops).sum()
    }

    fn row(f: &mut Formatter<'_>, name: &str, flops: f64, seconds: f64) -> fmt::Result {
        let (giga, rate) = (flops / 1e9, flops / seconds / 1e9);
        writeln!(f, "  {name:<28}{giga:>12.3}{:>12.2}{rate:>12.1}", 1e3 * seconds)
    }

    /// Writes a forward and a backward row for each layer and for the LM head.
    fn parts(&self, f: &mut Formatter<'_>) -> fmt::Result {
        const LAYER: &[MatmulOp] = &[MatmulOp::Linear, MatmulOp::Attention];
        let num_layers = self.run.model.config.num_layers();
        writeln!(
            f,
            "  per layer, without overlapped gathers and reductions; FLOPs are split evenly over the layers"
        )?;
        for (index, PartTimes { forward, backward }) in self.times.parts.iter().enumerate() {
            let (name, ops, share) = match index {
                index if index < num_layers => (format!("layer {index}"), LAYER, 1.0 / num_layers as f64),
                _ => ("LM head and loss".to_owned(), &[MatmulOp::LmHead][..], 1.0),
            };
            let backward_flops = self.flops(ops, Pass::Backward) + self.flops(ops, Pass::Recompute);
            Self::row(f, &format!("{name}, forward"), share * self.flops(ops, Pass::Forward), *forward)?;
            Self::row(f, &format!("{name}, backward"), share * backward_flops, *backward)?;
        }
        Ok(())
    }
}

impl Display for Profile<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        const ALL: &[MatmulOp] = &[MatmulOp::Linear, MatmulOp::Attention, MatmulOp::LmHead];
        let config = &self.run.config;
        let Metrics { step, step_seconds, tokens_per_second, .. } = self.metrics;
        writeln!(
            f,
            "FLOPs profile of step {step}, rank 0 of {} ({})",
            config.world_size(),
            config.mesh.shape()
        )?;
        writeln!(
            f,
            "  parameters                  {:>12.3} M",
            self.run.model.config.num_parameters() as f64 / 1e6
        )?;
        writeln!(f, "  sequences per micro batch   {:>12}", config.micro_batch_size)?;
        writeln!(f, "  micro batches per step      {:>12}", config.gradient_accumulation_steps)?;
        writeln!(f, "  step                        {:>12.2} ms", 1e3 * step_seconds)?;
        writeln!(f, "  sequences per second        {:>12.2}", config.train_batch_size as f64 / step_seconds)?;
        writeln!(f, "  tokens per second           {tokens_per_second:>12.0}")?;
        writeln!(f, "  {:<28}{:>12}{:>12}{:>12}", "", "GFLOP", "ms", "GFLOP/s")?;
        let time = &self.metrics.time;
        let backward = self.flops(ALL, Pass::Backward) + self.flops(ALL, Pass::Recompute);
        Self::row(f, "forward", self.flops(ALL, Pass::Forward), time.forward_seconds)?;
        Self::row(f, "backward and recomputation", backward, time.backward_seconds)?;
        writeln!(f, "  {:<40}{:>12.2}", "optimizer step", 1e3 * time.update_seconds)?;
        if config.monitoring.flops_profiler.detailed {
            self.parts(f)?;
        }
        Ok(())
    }
}
