//! `ulysses bench all-to-all`.

use super::report::{Figure, Report, Unit};
use super::turns::{Case, take_turns};
use super::{Failure, MeasureArgs, Process, RankArgs, RankSetup, settings};
use anyhow::{Result, anyhow};
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use ulysses::comm::RankContext;
use ulysses::kernels::{Workspace, strided_copy};
use ulysses::sequence_parallel::{AttentionShape, Exchange, ExchangePlan, HeadSharded, SeqSharded};
use ulysses::tensor::TensorOptions;

const HEAD_DIM: usize = 64;
const NUM_HEADS: usize = 16;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Number of ranks, at most 16 (one head each) [default: 2, or all processes of a job].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=NUM_HEADS as i64))]
    ranks: Option<u16>,
    #[command(flatten)]
    rank_args: RankArgs,
    /// Size of each rank's tensor in MiB.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=16384))]
    mib: u16,
    #[command(flatten)]
    measuring: MeasureArgs,
}

pub(super) fn run(args: &Args, process: &mut Option<Process>) -> Result<(), Failure> {
    let RankSetup { mut on, ranks, options } = args.rank_args.start(args.ranks, process)?;
    if ranks > NUM_HEADS {
        return Err(Failure::Usage(anyhow!("{ranks} ranks: expected at most {NUM_HEADS}, one head each")));
    }
    let bytes = usize::from(args.mib) << 20;
    let seq_len_local = bytes / (NUM_HEADS * HEAD_DIM * size_of::<f32>());
    let shape = AttentionShape {
        batch: 1,
        seq_len: seq_len_local.saturating_mul(ranks),
        num_heads: NUM_HEADS,
        num_kv_heads: NUM_HEADS,
        head_dim: HEAD_DIM,
    };
    // Two inputs, the copy, and one output of each exchange.
    settings::check_tensors(on.placement().device, 5.0 * (ranks * (bytes / size_of::<f32>())) as f64)?;
    let seconds =
        on.run(ranks, &options, |rank, device| measure(rank, &device, shape, args.measuring.repeats))?;
    let work = (bytes * ranks) as f64;
    let [copy, to_heads, to_tokens] = seconds;
    let copy = Figure::new("copy", copy, work);
    let to_heads = Figure::new("seq_to_head", to_heads, work).against(&copy);
    let to_tokens = Figure::new("head_to_seq", to_tokens, work).against(&copy);
    let figures = vec![copy, to_heads, to_tokens];
    let settings = json!({ "mib_per_rank": args.mib });
    let method = "f32, 16 heads of 64; exchange of one tensor in both directions, alternating with a copy of it by all \
                  ranks at once; bytes of all ranks, including local parts; slowest rank, median";
    let report = Report::new("all-to-all", settings, method, Unit::Bytes).on(ranks, &options, on.placement());
    args.measuring.print(&Report { figures, ..report })
}

fn q_to_kv() -> Vec<usize> {
    (0..NUM_HEADS).collect()
}

/// Returns the seconds of the copy and of both exchanges.
fn measure(
    rank: &RankContext,
    device: &Device,
    shape: AttentionShape,
    repeats: u32,
) -> Result<[Vec<f64>; 3]> {
    let group = rank.group.clone();
    let options = TensorOptions { device: device.clone(), dtype: DType::F32 };
    let workspace = Workspace::with_options(options);
    let plan = ExchangePlan::new(shape, &q_to_kv(), rank.world_size, rank.rank)?;
    let exchange = Exchange::new(plan, group.clone());
    let seq_len_local = shape.seq_len / rank.world_size;
    let tokens = Tensor::ones((1, seq_len_local, NUM_HEADS, HEAD_DIM), DType::F32, device)?;
    let copied = tokens.zeros_like()?;
    let heads = exchange.out_seq_to_head(&SeqSharded(tokens.clone()), &workspace)?.wait()?;
    let cases = vec![
        Case::new(|| Ok(strided_copy::copy(&tokens, &copied)?)),
        Case::new(|| {
            let HeadSharded(heads) =
                exchange.out_seq_to_head(&SeqSharded(tokens.clone()), &workspace)?.wait()?;
            workspace.recycle(heads);
            Ok(())
        }),
        Case::new(|| {
            let SeqSharded(tokens) = exchange.out_head_to_seq(&heads, &workspace)?.wait()?;
            workspace.recycle(tokens);
            Ok(())
        }),
    ];
    let seconds = take_turns(&*group, device, repeats, cases)?;
    seconds.try_into().map_err(|_| anyhow!("three cases have three times"))
}
