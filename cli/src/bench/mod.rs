//! `ulysses bench`: throughput next to a baseline from the same run, and the longest sequence that fits.
//!
//! Each repetition measures the baseline too, so that both see the same machine state. `docs/performance.md` describes
//! the method.

mod all_to_all;
mod attention;
mod checkpoint;
mod collectives;
mod gemm;
mod max_seq_len;
mod overlap;
mod profile;
mod report;
mod slow_link;
mod train;
mod training;
mod turns;

pub(super) use checkpoint::Scratch;
pub(super) use collectives::figures as collective_figures;
pub(super) use gemm::Square;
pub(super) use report::{Figure, cores, cpu_name};
pub(super) use training::TrainingArgs;
pub(super) use turns::{Case, take_turns};

use super::placement::Placement;
use super::process::Process;
use super::ranks::{BackendArgs, Joined, Ranks};
use super::{DeviceArg, Failure, OrFail, dp_sp, print, settings};
use candle_core::DType;
use clap::{Subcommand, ValueEnum};
use report::Report;
use ulysses::comm::LaunchOptions;

#[derive(clap::Args)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Measure checkpoint saves, compared with copies of the same files.
    Checkpoint(checkpoint::Args),
    /// Measure the Ulysses exchange, compared with copies of the same bytes.
    AllToAll(all_to_all::Args),
    /// Measure every collective, compared with copies of the same bytes.
    Collectives(collectives::Args),
    /// Measure how much of the exchange of head chunks hides behind attention, over a slowed link.
    Overlap(overlap::Args),
    /// Measure attention forward and backward, compared with a square GEMM.
    Attention(attention::Args),
    /// Measure the GEMMs of a model, compared with a square GEMM.
    Gemm(gemm::Args),
    /// Measure training steps, compared with a square GEMM and optionally with a single rank.
    Train(train::Args),
    /// Measure a machine profile for `ulysses plan --machine`.
    Profile(profile::Args),
    /// Find the longest sequence that trains on the CPU within a memory limit.
    MaxSeqLen(max_seq_len::Args),
}

pub(super) fn run(args: BenchArgs, process: &mut Option<Process>) -> Result<(), Failure> {
    match args.bench {
        Bench::Checkpoint(args) => checkpoint::run(args),
        Bench::AllToAll(args) => all_to_all::run(&args, process),
        Bench::Collectives(args) => collectives::run(&args, process),
        Bench::Overlap(args) => overlap::run(&args, process),
        Bench::Attention(args) => attention::run(&args),
        Bench::Gemm(args) => gemm::run(&args),
        Bench::Train(args) => train::run(&args, process),
        Bench::Profile(args) => profile::run(&args),
        Bench::MaxSeqLen(args) => max_seq_len::run(args),
    }
}

/// Repetitions and output format.
#[derive(clap::Args)]
struct MeasureArgs {
    /// Number of measured repetitions, after one warm-up.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeats: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl MeasureArgs {
    fn print(&self, report: &Report) -> Result<(), Failure> {
        if self.json { print(format_args!("{:#}\n", report.to_json())) } else { print(report) }
    }
}

/// Dtype of the measured tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
    Fp16,
}

impl DtypeArg {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::Fp16 => DType::F16,
        }
    }

    fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::Fp16,
            _ => Self::F32,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        }
    }

    /// Memory of tensors in this dtype plus the f32 reference, relative to f32 tensors.
    fn memory_factor(self) -> f64 {
        match self {
            Self::F32 => 1.0,
            Self::Bf16 | Self::Fp16 => 1.5,
        }
    }

    /// Returns the name of a figure in this dtype.
    fn label(self, what: &str) -> String {
        if self == Self::F32 { what.to_owned() } else { format!("{what} {}", self.name()) }
    }
}

/// Flags that select the ranks of a benchmark.
#[derive(clap::Args)]
struct RankArgs {
    #[command(flatten)]
    backend: BackendArgs,
    /// CPU threads per rank [default: an equal share of the cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Device of the tensors.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
}

/// The ranks of a benchmark.
struct RankSetup<'a> {
    on: Ranks<'a>,
    ranks: usize,
    options: LaunchOptions,
}

impl RankArgs {
    /// Joins the other processes, if ranks are processes. Uses the requested number of ranks, else the number of
    /// processes, else two.
    fn start<'a>(
        &self,
        requested: Option<u16>,
        process: &'a mut Option<Process>,
    ) -> Result<RankSetup<'a>, Failure> {
        let joined = self.backend.join(process)?;
        let ranks = joined.count(requested.map(usize::from), 2);
        let on = joined.place(self.device, ranks)?;
        let options = settings::launch_options(self.threads_per_rank, on.local(ranks))?;
        Ok(RankSetup { on, ranks, options })
    }
}
