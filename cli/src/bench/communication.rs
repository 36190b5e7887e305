//! `ulysses bench all-to-all` and `ulysses bench collectives`.

use super::case::{Case, Figure};
use super::report::{BYTES, Report};
use super::{BenchRank, BenchRanks, Benchmark, Failure, JobRanks, RankArgs};
use anyhow::{Result, anyhow};
use candle_core::{DType, Tensor};
use serde_json::json;
use ulysses::comm::{ProcessGroupExt, ReduceOp};
use ulysses::kernels::attention::grouped_heads;
use ulysses::kernels::{Workspace, elementwise, strided_copy};
use ulysses::sequence_parallel::{AttentionShape, Exchange, ExchangePlan, HeadSharded, SeqSharded};
use ulysses::tensor::TensorOptions;

const HEAD_DIM: usize = 64;
const NUM_HEADS: usize = 16;

/// Maximum number of ranks in one process; more is a typing error.
const MAX_RANKS: i64 = 64;

#[derive(clap::Args)]
pub(super) struct AllToAll {
    /// Number of ranks, at most 16 (one head each) [default: 2, or all processes of a job].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=NUM_HEADS as i64))]
    ranks: Option<u16>,
    #[command(flatten)]
    rank_args: RankArgs,
    /// Size of each rank's tensor in MiB.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=16384))]
    mib: u16,
}

impl Benchmark for AllToAll {
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure> {
        let mut ranks = self.rank_args.place(self.ranks, ranks)?;
        let count = ranks.count;
        if count > NUM_HEADS {
            return Err(Failure::Usage(anyhow!(
                "{count} ranks: expected at most {NUM_HEADS}, one head each"
            )));
        }
        let bytes = usize::from(self.mib) << 20;
        // Two inputs, the copy, and one output of each exchange.
        ranks.check_tensors(5.0 * (count * (bytes / size_of::<f32>())) as f64)?;
        let seq_len_local = bytes / (NUM_HEADS * HEAD_DIM * size_of::<f32>());
        let figures = ranks.run(repeats, |bench| exchanges(bench, seq_len_local))?;
        Ok(Report {
            bench: "all-to-all",
            settings: json!({ "mib_per_rank": self.mib }),
            method: "f32, 16 heads of 64; exchange of one tensor in both directions, alternating with a copy of it by \
                     all ranks at once; bytes of all ranks, including local parts; slowest rank, median"
                .to_owned(),
            unit: BYTES,
            figures,
            ranks,
        })
    }
}

/// Measures a copy of a rank's tensor and both exchanges of it.
fn exchanges(bench: &BenchRank<'_>, seq_len_local: usize) -> Result<Vec<Figure>> {
    let BenchRank { rank, device, .. } = bench;
    let shape = AttentionShape {
        batch: 1,
        seq_len: seq_len_local.saturating_mul(rank.world_size),
        num_heads: NUM_HEADS,
        num_kv_heads: NUM_HEADS,
        head_dim: HEAD_DIM,
        value_head_dim: HEAD_DIM,
    };
    let options = TensorOptions { device: device.clone(), dtype: DType::F32 };
    let workspace = Workspace::with_options(options);
    let plan = ExchangePlan::new(shape, &grouped_heads(NUM_HEADS, NUM_HEADS), rank.world_size, rank.rank)?;
    let exchange = Exchange::new(plan, rank.group.clone());
    let tokens = Tensor::ones((1, seq_len_local, NUM_HEADS, HEAD_DIM), DType::F32, device)?;
    let copied = tokens.zeros_like()?;
    let tokens = SeqSharded(tokens);
    let heads = exchange.out_seq_to_head(&tokens, &workspace)?.wait()?;
    let bytes = (rank.world_size * copied.elem_count() * size_of::<f32>()) as f64;
    let to_heads = || {
        let HeadSharded(heads) = exchange.out_seq_to_head(&tokens, &workspace)?.wait()?;
        workspace.recycle(heads);
        anyhow::Ok(())
    };
    let to_tokens = || {
        let SeqSharded(tokens) = exchange.out_head_to_seq(&heads, &workspace)?.wait()?;
        workspace.recycle(tokens);
        anyhow::Ok(())
    };
    bench.take_turns(vec![
        Case::new("copy", bytes, || strided_copy::copy(&tokens.0, &copied)),
        Case::new("seq_to_head", bytes, to_heads).against("copy"),
        Case::new("head_to_seq", bytes, to_tokens).against("copy"),
    ])
}

#[derive(clap::Args)]
pub(super) struct Collectives {
    /// Number of ranks [default: 2, or all processes of a job].
    #[arg(long, value_parser = clap::value_parser!(u16).range(2..=MAX_RANKS))]
    ranks: Option<u16>,
    #[command(flatten)]
    rank_args: RankArgs,
    /// Size of the whole tensor in MiB: the input of an all-reduce, or the output of an all-gather.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    mib: u16,
}

impl Benchmark for Collectives {
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure> {
        let mut ranks = self.rank_args.place(self.ranks, ranks)?;
        if ranks.count < 2 {
            return Err(Failure::Usage(anyhow!(
                "{} rank: a collective needs at least 2; start more processes",
                ranks.count
            )));
        }
        let figures = collectives(&mut ranks, usize::from(self.mib) << 18, repeats)?;
        Ok(Report {
            bench: "collectives",
            settings: json!({ "mib": self.mib }),
            method: "f32; each collective alternating with a copy of the whole tensor by all ranks at once; the rate is \
                     the busbw of nccl-tests, algbw the whole tensor's bytes per second, both per rank; slowest rank, \
                     median"
                .to_owned(),
            unit: BYTES,
            figures,
            ranks,
        })
    }
}

/// Measures a copy and every collective, on a tensor of `elems` f32 elements, rounded up to a multiple of the ranks.
pub(crate) fn collectives(
    ranks: &mut BenchRanks<'_>,
    elems: usize,
    repeats: u32,
) -> Result<Vec<Figure>, Failure> {
    let per_rank = elems.div_ceil(ranks.count);
    ranks.check_tensors(3.0 * (ranks.on.local_ranks(ranks.count) * per_rank * ranks.count) as f64)?;
    ranks.run(repeats, |bench| collectives_on_rank(bench, per_rank))
}

fn collectives_on_rank(bench: &BenchRank<'_>, per_rank: usize) -> Result<Vec<Figure>> {
    let (group, world_size) = (bench.group(), bench.rank.world_size);
    let ones = |elems: usize| Tensor::ones(elems, DType::F32, &bench.device);
    let (whole, other, part) = (ones(per_rank * world_size)?, ones(per_rank * world_size)?, ones(per_rank)?);
    let counts = vec![per_rank; world_size];
    let bytes = (whole.elem_count() * size_of::<f32>()) as f64;
    // `busbw` of nccl-tests (doc/PERFORMANCE.md): the share of the whole tensor that crosses a rank's link.
    let others = bytes * (world_size as f64 - 1.0) / world_size as f64;
    let mut figures = bench.take_turns(vec![
        Case::new("copy", bytes, || strided_copy::copy(&whole, &other)),
        // In place: without a reset the sums would overflow.
        Case::new("all_reduce", 2.0 * others, || group.all_reduce(&other, ReduceOp::Sum))
            .after(|| Ok(elementwise::fill(&other, 1.0)?))
            .against("copy"),
        Case::new("reduce_scatter", others, || group.reduce_scatter(&whole, &part, ReduceOp::Sum))
            .against("copy"),
        Case::new("all_gather", others, || group.all_gather(&part, &other)).against("copy"),
        Case::new("all_to_all", others, || group.all_to_all(&whole, &other, &counts, &counts))
            .against("copy"),
        Case::new("broadcast", bytes, || group.broadcast(&whole, 0)).against("copy"),
    ])?;
    for figure in &mut figures[1..] {
        figure.values.push(("algbw_gb_per_s", bytes / figure.seconds() * 1e-9));
    }
    Ok(figures)
}
