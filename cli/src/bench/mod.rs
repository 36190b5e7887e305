//! `ulysses bench`: throughput next to a baseline from the same run, and the longest sequence that fits.
//!
//! Each repetition measures the baseline too, so that both see the same machine state. `docs/performance.md` describes
//! the method.
//!
//! A new benchmark is a struct of flags with [`Benchmark`], and an entry in [`Bench`]. Its body is a list of cases,
//! which [`BenchRank::take_turns`] measures. Repetitions, baselines, table and JSON are the same for all.

mod attention;
mod case;
mod checkpoint;
mod communication;
mod gemm;
mod linear_attention;
mod max_seq_len;
mod overlap;
mod profile;
mod report;
mod slow_link;
mod training;

pub(super) use case::{BenchRank, Case, Figure};
pub(super) use checkpoint::scratch_dir;
pub(super) use communication::collectives;
pub(super) use gemm::square_gemm;
pub(super) use report::{cores, cpu_name};
pub(super) use training::TrainingArgs;

use super::DeviceArg;
use super::ranks::BackendArgs;
use crate::failure::{Failure, OrFail};
use crate::mesh_flag::without_ring;
use crate::output::print;
use anyhow::anyhow;
use candle_core::DType;
use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use report::Report;
use ulysses::comm::{LaunchOptions, RankContext};
use ulysses::device::DeviceKind;
use ulysses::trainer::job::{JobRanks, launch_options, meminfo_bytes};

#[derive(clap::Args)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Measure checkpoint saves, compared with copies of the same files.
    Checkpoint(Repeated<checkpoint::Saves>),
    /// Measure the Ulysses exchange, compared with copies of the same bytes.
    AllToAll(Repeated<communication::AllToAll>),
    /// Measure every collective, compared with copies of the same bytes.
    Collectives(Repeated<communication::Collectives>),
    /// Measure how much of the exchange of head chunks hides behind attention, over a slowed link.
    Overlap(Repeated<overlap::Overlap>),
    /// Measure attention forward and backward, compared with a square GEMM.
    Attention(Repeated<attention::Attention>),
    /// Measure linear attention (the gated delta rule, and sums as in Mamba 2) forward and backward, compared with a square GEMM.
    LinearAttention(Repeated<linear_attention::LinearAttention>),
    /// Measure the GEMMs of a model, compared with a square GEMM.
    Gemm(Repeated<gemm::Gemms>),
    /// Measure training steps, compared with a square GEMM and optionally with a single rank.
    Train(Repeated<training::Steps>),
    /// Measure a machine profile for `ulysses plan --machine`.
    Profile(profile::Args),
    /// Find the longest sequence that trains on the CPU within a memory limit.
    MaxSeqLen(max_seq_len::Args),
}

pub(super) fn run(args: BenchArgs, ranks: &mut JobRanks) -> Result<(), Failure> {
    match args.bench {
        Bench::Checkpoint(args) => args.run(ranks),
        Bench::AllToAll(args) => args.run(ranks),
        Bench::Collectives(args) => args.run(ranks),
        Bench::Overlap(args) => args.run(ranks),
        Bench::Attention(args) => args.run(ranks),
        Bench::LinearAttention(args) => args.run(ranks),
        Bench::Gemm(args) => args.run(ranks),
        Bench::Train(args) => args.run(ranks),
        Bench::Profile(args) => profile::run(&args, ranks),
        Bench::MaxSeqLen(args) => max_seq_len::run(args),
    }
}

/// The flags of a benchmark, which place its ranks and choose its cases.
trait Benchmark: clap::Args {
    /// Measures each case `repeats` times, on ranks that are threads unless it joins other processes.
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure>;
}

/// The flags of a benchmark, then those that all have.
#[derive(clap::Args)]
struct Repeated<B: Benchmark> {
    #[command(flatten)]
    benchmark: B,
    /// Number of measured repetitions, after one warm-up.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeats: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl<B: Benchmark> Repeated<B> {
    fn run(&self, ranks: &mut JobRanks) -> Result<(), Failure> {
        let report = self.benchmark.report(self.repeats, ranks)?;
        if self.json { print(format_args!("{:#}\n", report.to_json())) } else { print(report) }
    }
}

/// Parses the dtype of the measured tensors.
fn dtype_parser() -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(["f32", "bf16", "fp16"]).map(|name| match &*name {
        "bf16" => DType::BF16,
        "fp16" => DType::F16,
        _ => DType::F32,
    })
}

/// Returns the name of a dtype in flags and reports.
fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "fp16",
        _ => "f32",
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

impl RankArgs {
    /// Joins the other processes, if ranks are processes. Uses the requested number of ranks, else the number of
    /// processes, else two.
    fn place<'a>(&self, requested: Option<u16>, ranks: &'a mut JobRanks) -> Result<BenchRanks<'a>, Failure> {
        self.backend.join(None, ranks)?;
        let count = requested.map(usize::from).or(ranks.num_processes()).unwrap_or(2);
        BenchRanks::place(ranks, self.device, count, self.threads_per_rank)
    }
}

/// The ranks of a benchmark.
pub(super) struct BenchRanks<'a> {
    pub(super) on: &'a mut JobRanks,
    pub(super) count: usize,
    pub(super) options: LaunchOptions,
}

impl<'a> BenchRanks<'a> {
    fn place(
        on: &'a mut JobRanks,
        device: DeviceArg,
        count: usize,
        threads_per_rank: Option<usize>,
    ) -> Result<Self, Failure> {
        on.place(device.kind(), count)?;
        let options = launch_options(threads_per_rank, on.local_ranks(count))?;
        Ok(Self { on, count, options })
    }

    /// Rejects tensors of `elems` f32 elements in total that exceed the host's memory.
    fn check_tensors(&self, elems: f64) -> Result<(), Failure> {
        const GIB: f64 = (1_u64 << 30) as f64;
        let bytes = elems * size_of::<f32>() as f64;
        match meminfo_bytes("MemTotal:") {
            Some(available) if self.on.placement().device() == DeviceKind::Cpu && bytes > available => {
                Err(Failure::Usage(anyhow!(
                    "not enough memory: this machine has {:.1} GiB, but the benchmark's tensors take {:.1} GiB; choose \
                     smaller ones",
                    available / GIB,
                    bytes / GIB
                )))
            }
            _ => Ok(()),
        }
    }

    /// Measures on all ranks.
    pub(super) fn run<T: Send>(
        &mut self,
        repeats: u32,
        measure: impl Fn(&BenchRank<'_>) -> anyhow::Result<T> + Sync,
    ) -> Result<T, Failure> {
        let measure = |rank: &RankContext, device| measure(&BenchRank { rank, device, repeats });
        Ok(self.on.run(self.count, &self.options, measure)?)
    }
}
