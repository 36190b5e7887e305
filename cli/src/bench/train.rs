//! `ulysses bench train`.

use super::gemm::{SQUARE, Square};
use super::report::{Figure, Report, Unit};
use super::training::{Training, TrainingArgs};
use super::turns::{Case, take_turns};
use super::{BackendArgs, Failure, MeasureArgs, OrFail, Process, Ranks};
use anyhow::{Result, anyhow};
use candle_core::Device;
use serde_json::json;
use ulysses::comm::RankContext;
use ulysses::estimate::model_flops;

/// Maximum number of alternations between mesh and single rank.
const ROUNDS: u32 = 3;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    training: TrainingArgs,
    /// Tokens per sequence, over all sp ranks.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    seq_len: u32,
    /// Compare with the same batch on a single rank with the same total number of threads.
    #[arg(long)]
    against_single: bool,
    #[command(flatten)]
    backend: BackendArgs,
    #[command(flatten)]
    measuring: MeasureArgs,
}

pub(super) fn run(args: &Args, process: &mut Option<Process>) -> Result<(), Failure> {
    let seq_len = args.seq_len as usize;
    let joined = args.backend.join(process)?;
    if args.against_single && joined.are_processes() {
        let message =
            "--against-single needs ranks that are threads: run the single rank as a command of its own";
        return Err(Failure::Usage(anyhow!(message)));
    }
    let on_mesh = args.training.prepare(seq_len)?;
    let mut on = args.training.place(joined, &on_mesh)?;
    let mut alone = Ranks::threads(on.placement().alone());
    let single = args.against_single.then(|| args.training.prepare_single(&on_mesh, seq_len)).transpose()?;
    let repeats = args.measuring.repeats;
    let rounds = if single.is_some() { ROUNDS.min(repeats) } else { 1 };
    let (mut times, mut times_of_single) = (Times::default(), Times::default());
    for round in 0..rounds {
        // The first rounds take the remainder.
        let repeats = repeats / rounds + u32::from(round < repeats % rounds);
        times.append(measure(&mut on, &on_mesh, repeats)?);
        if let Some(single) = &single {
            times_of_single.append(measure(&mut alone, single, repeats)?);
        }
    }
    let tokens = (on_mesh.config.train_batch_size * seq_len) as f64;
    let flops =
        model_flops(&on_mesh.config, &on_mesh.source.config, &on_mesh.mesh).or_run()?.with_labels(1.0);
    let step = |name: &str, seconds| {
        let figure = Figure::new(name, seconds, flops);
        let tokens_per_second = tokens / figure.seconds();
        figure.with("tokens_per_second", tokens_per_second)
    };
    let square = Figure::new(SQUARE, times.square, times.square_flops);
    let mut train = step("train_step", times.step).against(&square);
    let mut figures = vec![square];
    if single.is_some() {
        let single = step("single_rank_step", times_of_single.step);
        train = train.against(&single);
        figures.push(single);
    }
    figures.push(train);
    let mut settings = args.training.settings(&on_mesh);
    settings["seq_len"] = json!(seq_len);
    settings["rows_per_step"] = json!(on_mesh.config.train_batch_size);
    let method = "whole steps with AdamW and clipping, alternating with one square GEMM on all ranks at once; model FLOPs: \
                  forward and backward, visible pairs only, no recomputation; slowest rank, median";
    let report = Report::new("train", settings, method, Unit::Flops);
    let report = report.on(on_mesh.mesh.world_size(), &on_mesh.launch, on.placement());
    args.measuring.print(&Report { figures, ..report })
}

/// Seconds of every repetition.
#[derive(Default)]
struct Times {
    square: Vec<f64>,
    step: Vec<f64>,
    /// FLOPs of the square GEMMs of all ranks.
    square_flops: f64,
}

impl Times {
    fn append(&mut self, other: Self) {
        self.square.extend(other.square);
        self.step.extend(other.step);
        self.square_flops = other.square_flops;
    }
}

fn measure(on: &mut Ranks<'_>, training: &Training, repeats: u32) -> Result<Times, Failure> {
    let measure = |rank: &RankContext, device| measure_rank(training, rank, &device, repeats);
    on.run(training.mesh.world_size(), &training.launch, measure)
}

fn measure_rank(training: &Training, rank: &RankContext, device: &Device, repeats: u32) -> Result<Times> {
    let (mut engine, mut loader) = training.start(rank, device)?;
    let square = Square::new(training.config.precision.dtype(), device)?;
    let step = Case::new(|| {
        engine.train_batch(|| loader.next_micro_batch())?;
        Ok(())
    });
    let seconds = take_turns(&*rank.group, device, repeats, vec![square.case(), step])?;
    let [of_square, of_step] = seconds.try_into().map_err(|_| anyhow!("two cases have two times"))?;
    let square_flops = rank.world_size as f64 * square.flops();
    Ok(Times { square: of_square, step: of_step, square_flops })
}
