//! `ulysses bench attention`.

use super::gemm::{SQUARE, Square};
use super::report::{Figure, Report, Unit};
use super::turns::{Case, take_turns};
use super::{DeviceArg, Failure, Measuring, OrFail, on_ranks, settings};
use anyhow::{Result, anyhow};
use candle_core::{DType, Tensor};
use serde_json::json;
use ulysses::comm::RankContext;
use ulysses::device::DeviceKind;
use ulysses::ops::attention::{Geometry, Gradients, Operands, Upstream, backward, delta, forward};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Tokens.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    seq_len: u32,
    /// Query heads, as many as key and value heads.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    num_heads: u16,
    /// Elements of a head.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    head_dim: u16,
    /// Threads; all cores without it.
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Where the tensors are.
    #[arg(long, default_value = "cpu")]
    device: DeviceArg,
    #[command(flatten)]
    measuring: Measuring,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let device = args.device.kind()?;
    let options = settings::launch_options(args.threads_per_rank, 1)?;
    let head_elems = f64::from(args.seq_len) * f64::from(args.num_heads) * f64::from(args.head_dim);
    // q, k, v, o and the gradient of each.
    settings::check_tensors(device, 8.0 * head_elems)?;
    let heads = (0..usize::from(args.num_heads)).collect::<Vec<_>>();
    let geometry = Geometry::causal(1, args.seq_len, heads).or_usage()?;
    let measured = on_ranks(1, &options, |rank| measure(rank, device, args, &geometry))?;
    let ([square, forward, delta, backward], square_flops) = measured;
    // Two products of head_dim multiply-adds for every visible pair forward, five backward.
    let products = geometry.num_visible_pairs() as f64 * f64::from(args.num_heads) * f64::from(args.head_dim);
    let square = Figure::new(SQUARE, square, square_flops);
    let forward = Figure::new("forward", forward, 4.0 * products).against(&square);
    let backward = Figure::new("backward", backward, 10.0 * products).against(&square);
    let delta = Figure::new("delta", delta, 2.0 * head_elems);
    let settings = json!({
        "seq_len": args.seq_len, "num_heads": args.num_heads, "head_dim": args.head_dim,
        "device": args.device.name(),
    });
    let method = "f32, causal; FLOPs of visible pairs only; each pass in turn with a square product on the same \
                  threads; median. delta is the sum over rows that backward needs.";
    let report = Report::new("attention", settings, method, Unit::Flops).on(1, &options);
    args.measuring.print(&Report { figures: vec![square, forward, backward, delta], ..report })
}

/// Seconds of the square product, forward, delta and backward; FLOPs of the product.
fn measure(
    rank: &RankContext,
    device: DeviceKind,
    args: &Args,
    geometry: &Geometry,
) -> Result<([Vec<f64>; 4], f64)> {
    let device = device.open(rank.rank)?;
    let (seq_len, num_heads, head_dim) =
        (args.seq_len as usize, usize::from(args.num_heads), usize::from(args.head_dim));
    let random = || Tensor::randn(0f32, 1.0, (1, seq_len, num_heads, head_dim), &device);
    let (q, k, v, dout) = (random()?, random()?, random()?, random()?);
    let (o, dq, dk, dv) = (q.zeros_like()?, q.zeros_like()?, k.zeros_like()?, v.zeros_like()?);
    let lse = Tensor::zeros((1, num_heads, seq_len), q.dtype(), &device)?;
    let row_terms = lse.zeros_like()?;
    let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
    let operands = Operands { q: &q, k: &k, v: &v, scale, geometry };
    let upstream = Upstream { dout: &dout, lse: &lse, delta: &row_terms };
    let gradients = Gradients { dq: &dq, dk: &dk, dv: &dv };
    let square = Square::new(DType::F32, &device)?;
    let cases = vec![
        square.case(),
        Case::new(|| Ok(forward(&operands, &o, &lse)?)),
        Case::new(|| Ok(delta(&o, &dout, &row_terms)?)),
        Case::new(|| Ok(backward(&operands, &upstream, &gradients)?)),
    ];
    let seconds = take_turns(&*rank.group, &device, args.measuring.repeats, cases)?;
    let seconds = seconds.try_into().map_err(|_| anyhow!("four cases have four times"))?;
    Ok((seconds, square.flops()))
}
