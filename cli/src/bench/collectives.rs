//! `ulysses bench collectives`.

use super::report::{Figure, Report, Unit};
use super::turns::{Case, take_turns};
use super::{Failure, MeasureArgs, Process, RankArgs, RankSetup, Ranks, settings};
use anyhow::{Result, anyhow};
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use ulysses::comm::{LaunchOptions, ProcessGroupExt, RankContext, ReduceOp};
use ulysses::kernels::{elementwise, strided_copy};

/// Maximum number of ranks in one process; more is a typing error.
const MAX_RANKS: i64 = 64;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Number of ranks [default: 2, or all processes of a job].
    #[arg(long, value_parser = clap::value_parser!(u16).range(2..=MAX_RANKS))]
    ranks: Option<u16>,
    #[command(flatten)]
    rank_args: RankArgs,
    /// Size of the whole tensor in MiB: the input of an all-reduce, or the output of an all-gather.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    mib: u16,
    #[command(flatten)]
    measuring: MeasureArgs,
}

/// Returns names and `busbw` factors of nccl-tests (doc/PERFORMANCE.md): the share of the whole tensor that crosses a
/// rank's link.
fn collectives(ranks: f64) -> [(&'static str, f64); 5] {
    let others = (ranks - 1.0) / ranks;
    [
        ("all_reduce", 2.0 * others),
        ("reduce_scatter", others),
        ("all_gather", others),
        ("all_to_all", others),
        ("broadcast", 1.0),
    ]
}

pub(super) fn run(args: &Args, process: &mut Option<Process>) -> Result<(), Failure> {
    let RankSetup { mut on, ranks, options } = args.rank_args.start(args.ranks, process)?;
    if ranks < 2 {
        let message = format!("{ranks} rank: a collective needs at least 2; start more processes");
        return Err(Failure::Usage(anyhow!(message)));
    }
    let figures = figures(&mut on, ranks, &options, args.mib, args.measuring.repeats)?;
    let settings = json!({ "mib": args.mib });
    let method = "f32; each collective alternating with a copy of the whole tensor by all ranks at once; the rate is \
                  the busbw of nccl-tests, algbw the whole tensor's bytes per second, both per rank; slowest rank, \
                  median";
    let report =
        Report::new("collectives", settings, method, Unit::Bytes).on(ranks, &options, on.placement());
    args.measuring.print(&Report { figures, ..report })
}

/// Measures a copy and every collective, on a tensor of `mib` MiB.
pub(crate) fn figures(
    on: &mut Ranks<'_>,
    ranks: usize,
    options: &LaunchOptions,
    mib: u16,
    repeats: u32,
) -> Result<Vec<Figure>, Failure> {
    figures_of((usize::from(mib) << 20) / size_of::<f32>(), on, ranks, options, repeats)
}

/// Measures the same on a tensor of `elems` elements, rounded up to a multiple of the ranks.
pub(super) fn figures_of(
    elems: usize,
    on: &mut Ranks<'_>,
    ranks: usize,
    options: &LaunchOptions,
    repeats: u32,
) -> Result<Vec<Figure>, Failure> {
    let elems = elems.next_multiple_of(ranks);
    settings::check_tensors(on.placement().device, 3.0 * (on.local(ranks) * elems) as f64)?;
    let bytes = (elems * size_of::<f32>()) as f64;
    let seconds = on.run(ranks, options, |rank, device| measure(rank, &device, elems, repeats))?;
    let mut seconds = seconds.into_iter();
    let copy = Figure::new("copy", seconds.next().unwrap_or_default(), bytes);
    let figure = |((name, factor), seconds): ((&str, f64), Vec<f64>)| {
        let figure = Figure::new(name, seconds, factor * bytes);
        let algorithm = bytes / figure.seconds() * 1e-9;
        figure.with("algbw_gb_per_s", algorithm).against(&copy)
    };
    let collectives: Vec<Figure> = collectives(ranks as f64).into_iter().zip(seconds).map(figure).collect();
    Ok([vec![copy], collectives].concat())
}

fn measure(rank: &RankContext, device: &Device, elems: usize, repeats: u32) -> Result<Vec<Vec<f64>>> {
    let group = &*rank.group;
    let per_rank = elems / rank.world_size;
    let ones = |elems: usize| Tensor::ones(elems, DType::F32, device);
    let (whole, other, part) = (ones(elems)?, ones(elems)?, ones(per_rank)?);
    let counts = vec![per_rank; rank.world_size];
    let cases = vec![
        Case::new(|| Ok(strided_copy::copy(&whole, &other)?)),
        // In place: without a reset the sums would overflow.
        Case::new(|| Ok(group.all_reduce(&other, ReduceOp::Sum)?))
            .after(|| Ok(elementwise::fill(&other, 1.0)?)),
        Case::new(|| Ok(group.reduce_scatter(&whole, &part, ReduceOp::Sum)?)),
        Case::new(|| Ok(group.all_gather(&part, &other)?)),
        Case::new(|| Ok(group.all_to_all(&whole, &other, &counts, &counts)?)),
        Case::new(|| Ok(group.broadcast(&whole, 0)?)),
    ];
    take_turns(group, device, repeats, cases)
}
