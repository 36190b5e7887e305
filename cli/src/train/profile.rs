//! The profile of a step that `flops_profiler` asks for.

use super::Run;
use crate::{Failure, OrFail, note};
use anyhow::Context;
use std::fmt::{self, Display, Formatter};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use ulysses::config::FlopsProfilerConfig;
use ulysses::engine::plan::RankStep;
use ulysses::engine::schedule::{Pass, Piece};
use ulysses::engine::{PartTimes, StepTimes};
use ulysses::monitor::{Metrics, above_progress, escaped};

/// Whether the file that the profile goes to can be written, before there is anything to write.
pub(super) fn check(profiler: &FlopsProfilerConfig) -> Result<(), Failure> {
    let Some(path) = profiler.output_file.as_deref().map(Path::new).filter(|_| profiler.enabled) else {
        return Ok(());
    };
    super::output::check_writable(path).with_context(|| cannot_write(path)).or_usage()
}

/// Tells who waits for the profile of a step that is not among the steps that a run does after `steps.start`, up to
/// `steps.end`.
pub(super) fn remark(profiler: &FlopsProfilerConfig, steps: &Range<u64>) {
    let (step, Range { start, end }) = (profiler.profile_step, steps);
    if profiler.enabled && !(start + 1..=*end).contains(&step) {
        note(format_args!(
            "note: there will be no profile: `flops_profiler.profile_step` is {step}, and the steps to do are {} to {end}",
            start + 1
        ));
    }
}

fn cannot_write(path: &Path) -> String {
    format!("`flops_profiler.output_file`: cannot write {}", path.display())
}

/// Rank 0's arithmetic by the schedule of the step, beside the time that it took.
pub(super) struct Profile<'a> {
    pub(super) run: &'a Run,
    pub(super) metrics: &'a Metrics,
    pub(super) times: &'a StepTimes,
    pub(super) planned: RankStep,
}

impl Profile<'_> {
    /// Writes it to the file, or prints it.
    pub(super) fn write(&self, file: Option<&Path>) -> anyhow::Result<()> {
        let Some(path) = file else {
            // The run goes on when nobody reads what it prints any more.
            let text = self.to_string();
            let _ = above_progress(|| write!(std::io::stderr(), "{}", escaped(&text)));
            return Ok(());
        };
        std::fs::write(path, self.to_string()).with_context(|| cannot_write(path))
    }

    fn flops(&self, pieces: &[Piece], pass: Pass) -> f64 {
        let flops = self.planned.flops.iter();
        flops.filter(|((piece, of_pass), _)| pieces.contains(piece) && *of_pass == pass).map(|(_, n)| n).sum()
    }

    fn row(f: &mut Formatter<'_>, name: &str, flops: f64, seconds: f64) -> fmt::Result {
        let (giga, rate) = (flops / 1e9, flops / seconds / 1e9);
        writeln!(f, "  {name:<28}{giga:>12.3}{:>12.2}{rate:>12.1}", 1e3 * seconds)
    }

    /// A forward and a backward row for each layer, and for the head.
    fn parts(&self, f: &mut Formatter<'_>) -> fmt::Result {
        const LAYER: &[Piece] = &[Piece::Projections, Piece::Attention, Piece::Mlp];
        let num_layers = self.run.llama.num_layers;
        writeln!(
            f,
            "  without gathers and reductions, which run along; a layer's share of the FLOPs is even"
        )?;
        for (index, PartTimes { forward, backward }) in self.times.parts.iter().enumerate() {
            let (name, pieces, share) = match index {
                index if index < num_layers => (format!("layer {index}"), LAYER, 1.0 / num_layers as f64),
                _ => ("LM head and loss".to_owned(), &[Piece::Head][..], 1.0),
            };
            let backward_flops = self.flops(pieces, Pass::Backward) + self.flops(pieces, Pass::Recompute);
            Self::row(f, &format!("{name}, forward"), share * self.flops(pieces, Pass::Forward), *forward)?;
            Self::row(f, &format!("{name}, backward"), share * backward_flops, *backward)?;
        }
        Ok(())
    }
}

impl Display for Profile<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        const ALL: &[Piece] = &[Piece::Projections, Piece::Attention, Piece::Mlp, Piece::Head];
        let config = &self.run.config;
        let Metrics { step, step_seconds, tokens_per_second, .. } = self.metrics;
        let (dp, sp) = (config.mesh.dp_size, config.mesh.sp_size);
        writeln!(f, "flops profile of step {step}, rank 0 of {} (dp {dp} × sp {sp})", dp * sp)?;
        writeln!(
            f,
            "  parameters                  {:>12.3} M",
            self.run.llama.num_parameters() as f64 / 1e6
        )?;
        writeln!(f, "  rows per rank and pass      {:>12}", config.micro_batch_size)?;
        writeln!(f, "  passes per step             {:>12}", config.gradient_accumulation_steps)?;
        writeln!(f, "  step                        {:>12.2} ms", 1e3 * step_seconds)?;
        writeln!(f, "  samples per second          {:>12.2}", config.train_batch_size as f64 / step_seconds)?;
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
