//! `ulysses bench attention`.

use super::gemm::{SQUARE, Square};
use super::report::{Figure, Report, Unit};
use super::turns::{Case, take_turns};
use super::{DeviceArg, Failure, Measuring, OrFail, on_ranks, settings};
use anyhow::{Result, anyhow};
use candle_core::{DType, Device, Tensor};
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
    let operation = Operation::new(geometry, usize::from(args.head_dim), DType::F32, &device)?;
    let square = Square::new(DType::F32, &device)?;
    let cases = vec![square.case(), operation.forward(), operation.delta(), operation.backward()];
    let seconds = take_turns(&*rank.group, &device, args.measuring.repeats, cases)?;
    let seconds = seconds.try_into().map_err(|_| anyhow!("four cases have four times"))?;
    Ok((seconds, square.flops()))
}

/// Attention of random tensors, with its gradients.
pub(super) struct Operation<'a> {
    geometry: &'a Geometry,
    scale: f32,
    qkv: [Tensor; 3],
    o: Tensor,
    lse: Tensor,
    row_terms: Tensor,
    dout: Tensor,
    dqkv: [Tensor; 3],
}

impl<'a> Operation<'a> {
    /// Of one row whose queries, keys and values have as many heads.
    pub(super) fn new(
        geometry: &'a Geometry,
        head_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let (seq_len, num_heads) = (geometry.q_positions().len(), geometry.q_to_kv().len());
        let random = || {
            let numbers = Tensor::randn(0f32, 1.0, (1, seq_len, num_heads, head_dim), device)?;
            numbers.to_dtype(dtype)
        };
        let (qkv, dout) = ([random()?, random()?, random()?], random()?);
        let lse = Tensor::zeros((1, num_heads, seq_len), DType::F32, device)?;
        Ok(Self {
            geometry,
            scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            o: dout.zeros_like()?,
            dqkv: [dout.zeros_like()?, dout.zeros_like()?, dout.zeros_like()?],
            row_terms: lse.zeros_like()?,
            lse,
            qkv,
            dout,
        })
    }

    fn operands(&self) -> Operands<'_> {
        let [q, k, v] = &self.qkv;
        Operands { q, k, v, scale: self.scale, geometry: self.geometry }
    }

    pub(super) fn forward(&self) -> Case<'_> {
        Case::new(|| Ok(forward(&self.operands(), &self.o, &self.lse)?))
    }

    fn delta(&self) -> Case<'_> {
        Case::new(|| Ok(delta(&self.o, &self.dout, &self.row_terms)?))
    }

    pub(super) fn backward(&self) -> Case<'_> {
        Case::new(|| {
            let upstream = Upstream { dout: &self.dout, lse: &self.lse, delta: &self.row_terms };
            let [dq, dk, dv] = &self.dqkv;
            Ok(backward(&self.operands(), &upstream, &Gradients { dq, dk, dv })?)
        })
    }
}
