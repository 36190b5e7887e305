//! `ulysses bench`: rates, each beside its baseline in the same run; and the longest row that fits.
//!
//! What is measured and its baseline take turns, so that both meet the same machine. `docs/performance.md` has the
//! method in full.

mod all_to_all;
mod attention;
mod checkpoint;
mod collectives;
mod gemm;
mod max_seq_len;
mod profile;
mod report;
mod train;
mod training;
mod turns;

pub(super) use checkpoint::Scratch;
pub(super) use collectives::figures as collective_figures;
pub(super) use gemm::Square;
pub(super) use report::{Figure, cores, processor};
pub(super) use turns::{Case, take_turns};

use super::ranks::{Ranks, RanksArgs};
use super::{DeviceArg, Failure, OrFail, dp_sp, print, settings};
use candle_core::DType;
use clap::{Subcommand, ValueEnum};
use report::Report;
use ulysses::comm::{LaunchOptions, RankContext, launch};
use ulysses::device::DeviceKind;
use ulysses::mesh::DeviceMesh;

#[derive(clap::Args)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Save checkpoints, beside plain copies of the same files.
    Checkpoint(checkpoint::Args),
    /// Exchange tokens for heads and back, beside plain copies of the same bytes.
    AllToAll(all_to_all::Args),
    /// Every collective, beside plain copies of the same bytes.
    Collectives(collectives::Args),
    /// Attention forward and backward, beside a square matrix product.
    Attention(attention::Args),
    /// The matrix products of a model, beside a square one.
    Gemm(gemm::Args),
    /// Training steps, beside a square matrix product and, if asked to, a single rank.
    Train(train::Args),
    /// What this machine does in a second, as a file for `ulysses plan --machine`.
    Profile(profile::Args),
    /// The longest row that trains within a memory limit, found by trying.
    MaxSeqLen(max_seq_len::Args),
}

pub(super) fn run(args: BenchArgs) -> Result<(), Failure> {
    match args.bench {
        Bench::Checkpoint(args) => checkpoint::run(args),
        Bench::AllToAll(args) => all_to_all::run(&args),
        Bench::Collectives(args) => collectives::run(&args),
        Bench::Attention(args) => attention::run(&args),
        Bench::Gemm(args) => gemm::run(&args),
        Bench::Train(args) => train::run(&args),
        Bench::Profile(args) => profile::run(&args),
        Bench::MaxSeqLen(args) => max_seq_len::run(args),
    }
}

/// How long to measure and how to print.
#[derive(clap::Args)]
struct Measuring {
    /// Measured repetitions; one more goes before them.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeats: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Measuring {
    fn print(&self, report: &Report) -> Result<(), Failure> {
        if self.json { print(format_args!("{:#}\n", report.to_json())) } else { print(report) }
    }
}

/// Numbers of what is measured.
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

    /// Tensors of f32 that take as much memory as those of these numbers and the same in f32 beside them.
    fn copies(self) -> f64 {
        match self {
            Self::F32 => 1.0,
            Self::Bf16 | Self::Fp16 => 1.5,
        }
    }

    /// Of a figure of `what` in these numbers.
    fn label(self, what: &str) -> String {
        if self == Self::F32 { what.to_owned() } else { format!("{what} {}", self.name()) }
    }
}

/// Which ranks measure together.
#[derive(clap::Args)]
struct Together {
    #[command(flatten)]
    backend: RanksArgs,
    /// Threads of each rank; a fair share of the cores without it.
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Where the tensors are.
    #[arg(long, default_value = "cpu")]
    device: DeviceArg,
}

/// Those ranks.
struct Gathered {
    on: Ranks,
    ranks: usize,
    options: LaunchOptions,
    device: DeviceKind,
}

impl Together {
    /// Meets the other processes, if ranks are processes: as many as were asked for, as there are, or else two.
    fn gather(&self, asked: Option<u16>) -> Result<Gathered, Failure> {
        let device = self.device.kind()?;
        self.backend.check_device(device)?;
        let on = self.backend.start()?;
        let ranks = on.count(asked.map(usize::from), 2)?;
        let options = settings::launch_options(self.threads_per_rank, on.local(ranks))?;
        Ok(Gathered { on, ranks, options, device })
    }
}

/// Runs `measure` on ranks that are threads. They all come to the same, so the first rank's result counts.
pub(super) fn on_ranks<T: Send>(
    world_size: usize,
    options: &LaunchOptions,
    measure: impl Fn(&RankContext) -> anyhow::Result<T> + Sync,
) -> Result<T, Failure> {
    let mut results = launch(world_size, options, |rank| measure(&rank)).or_run()?;
    Ok(results.swap_remove(0))
}

/// The mesh that a flag asks for.
fn mesh(notation: &str) -> Result<DeviceMesh, Failure> {
    let (dp_size, sp_size) = dp_sp(notation)?;
    DeviceMesh::dp_sp(dp_size, sp_size).or_usage()
}
