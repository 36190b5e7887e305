//! `ulysses bench attention`.

use super::gemm::{SQUARE, Square};
use super::report::{Figure, Report, Unit};
use super::turns::{Case, take_turns};
use super::{DeviceArg, DtypeArg, Failure, MeasureArgs, OrFail, Placement, Ranks, settings};
use anyhow::{Result, anyhow, bail};
use candle_core::{DType, Device, Tensor};
use clap::ValueEnum;
use serde_json::json;
use ulysses::comm::RankContext;
use ulysses::kernels::attention::{
    AttentionKernels, AttentionLayout, Gradients, Operands, Upstream, backward, delta, forward, grouped_heads,
};
use ulysses::tensor::TensorOptions;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Tokens per sequence.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    seq_len: u32,
    /// Number of query heads.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    num_heads: u16,
    /// Number of KV heads; must divide --num-heads [default: --num-heads].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    num_kv_heads: Option<u16>,
    /// Head dimension.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    head_dim: u16,
    /// CPU threads [default: all cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Dtype of the tensors; f32 is measured too, without --no-f32.
    #[arg(long, default_value = "f32")]
    dtype: DtypeArg,
    /// Measure nothing in f32: the baseline is a square GEMM in --dtype.
    #[arg(long)]
    no_f32: bool,
    /// Kernels of 16-bit attention on a GPU, as `ulysses.attention`; `wgmma` is an error where `auto` does not use them.
    #[arg(long, default_value = "auto")]
    kernels: KernelsArg,
    /// Device of the tensors.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
    #[command(flatten)]
    measuring: MeasureArgs,
}

/// The kernels of attention on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KernelsArg {
    Auto,
    Fused,
    Wgmma,
    Tiled,
}

impl From<KernelsArg> for AttentionKernels {
    fn from(kernels: KernelsArg) -> Self {
        match kernels {
            KernelsArg::Auto => Self::Auto,
            KernelsArg::Fused => Self::Fused,
            KernelsArg::Wgmma => Self::Wgmma,
            KernelsArg::Tiled => Self::Tiled,
        }
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let placement = Placement::of_one(args.device)?;
    let options = settings::launch_options(args.threads_per_rank, 1)?;
    let head_elems = f64::from(args.seq_len) * f64::from(args.num_heads) * f64::from(args.head_dim);
    // q, k, v, o and the gradient of each, with at most as many KV heads.
    settings::check_tensors(placement.device, 8.0 * head_elems * args.dtype.memory_factor())?;
    let (num_heads, num_kv_heads) = (args.num_heads, args.num_kv_heads.unwrap_or(args.num_heads));
    if !num_heads.is_multiple_of(num_kv_heads) {
        let message = format!("--num-kv-heads {num_kv_heads} does not divide the {num_heads} query heads");
        return Err(Failure::Usage(anyhow!(message)));
    }
    let q_to_kv = grouped_heads(num_heads.into(), num_kv_heads.into());
    let layout = AttentionLayout::causal(1, args.seq_len, q_to_kv).or_usage()?;
    let mut on = Ranks::threads(placement);
    let (figures, kernels) = on.run(1, &options, |rank, device| measure(rank, &device, args, &layout))?;
    let settings = json!({
        "seq_len": args.seq_len, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": args.head_dim,
        "dtype": args.dtype.name(), "kernels": kernels,
    });
    let method = "causal; FLOPs of visible pairs only; each pass alternating with a square GEMM on the same threads, in \
                  f32 unless --no-f32; median. delta: the row sums of o · dout that backward needs.";
    let report = Report::new("attention", settings, method, Unit::Flops).on(1, &options, on.placement());
    args.measuring.print(&Report { figures, ..report })
}

/// Measures the square GEMM and the passes; other dtypes are compared with f32. Returns the name of the kernels that
/// computed them in `args.dtype`, too.
fn measure(
    rank: &RankContext,
    device: &Device,
    args: &Args,
    layout: &AttentionLayout,
) -> Result<(Vec<Figure>, &'static str)> {
    let operation = |dtype: DtypeArg| {
        let kernels = if dtype == DtypeArg::F32 { KernelsArg::Tiled } else { args.kernels };
        let options = TensorOptions { device: device.clone(), dtype: dtype.dtype() };
        Operation::new(layout, args.head_dim.into(), &options, kernels.into())
    };
    let baseline = if args.no_f32 { args.dtype } else { DtypeArg::F32 };
    let mut dtypes = vec![baseline];
    dtypes.extend((args.dtype != baseline).then_some(args.dtype));
    let operations = dtypes.iter().map(|dtype| operation(*dtype)).collect::<Result<Vec<_>>>()?;
    let kernels = operations[operations.len() - 1].kernels;
    if args.kernels == KernelsArg::Wgmma && kernels != AttentionKernels::Wgmma {
        bail!("--kernels wgmma: this device does not run them in {}, see the warnings", args.dtype.name());
    }
    let square = Square::new(baseline.dtype(), device)?;
    let mut cases = vec![square.case()];
    cases.extend(operations.iter().flat_map(Operation::cases));
    let mut seconds = take_turns(&*rank.group, device, args.measuring.repeats, cases)?.into_iter();
    let square = Figure::new(SQUARE, seconds.next().unwrap_or_default(), square.flops());
    // Two dot products of head_dim multiply-adds per visible pair forward, five backward.
    let heads = f64::from(args.num_heads) * f64::from(args.head_dim);
    let (pair_elems, elems) = (layout.num_visible_pairs() as f64 * heads, f64::from(args.seq_len) * heads);
    let mut figures = |dtype: DtypeArg| -> Vec<Figure> {
        let passes = [("forward", 4.0 * pair_elems), ("backward", 10.0 * pair_elems), ("delta", 2.0 * elems)];
        let figures = passes.into_iter().zip(&mut seconds).map(|((pass, flops), seconds)| {
            let figure = Figure::new(dtype.label(pass), seconds, flops);
            if pass == "delta" { figure } else { figure.against(&square) }
        });
        figures.collect()
    };
    let mut all = vec![square.clone()];
    all.extend(figures(baseline));
    if let [_, dtype] = dtypes[..] {
        let others = figures(dtype).into_iter().zip(&all[1..]).map(|(other, in_f32)| other.against(in_f32));
        let others: Vec<Figure> = others.collect();
        all.extend(others);
    }
    Ok((all, name(kernels, device)))
}

fn name(kernels: AttentionKernels, device: &Device) -> &'static str {
    match kernels {
        _ if device.is_cpu() => "cpu",
        AttentionKernels::Auto | AttentionKernels::Fused => "fused",
        AttentionKernels::Wgmma => "wgmma",
        AttentionKernels::Tiled => "tiled",
    }
}

/// Attention with gradients on random tensors.
pub(super) struct Operation<'a> {
    layout: &'a AttentionLayout,
    scale: f32,
    kernels: AttentionKernels,
    qkv: [Tensor; 3],
    o: Tensor,
    lse: Tensor,
    row_terms: Tensor,
    dout: Tensor,
    dqkv: [Tensor; 3],
}

impl<'a> Operation<'a> {
    /// Creates one sequence with the heads of the layout.
    pub(super) fn new(
        layout: &'a AttentionLayout,
        head_dim: usize,
        TensorOptions { device, dtype }: &TensorOptions,
        kernels: AttentionKernels,
    ) -> Result<Self> {
        let (dtype, kernels) = (*dtype, kernels.on(device, *dtype)?.for_head_dim(head_dim));
        let (seq_len, num_heads) = (layout.q_positions().len(), layout.q_to_kv().len());
        let num_kv_heads = layout.q_to_kv().iter().max().map_or(0, |last| last + 1);
        // Drawn on the CPU, since a GPU may have no cuRAND. Long sequences repeat what takes long to draw.
        let random = |heads: usize| {
            let drawn = seq_len.min(2048);
            let normal =
                Tensor::randn(0f32, 1.0, (1, drawn, heads, head_dim), &Device::Cpu)?.to_dtype(dtype)?;
            let repeated = normal.repeat((1, seq_len.div_ceil(drawn), 1, 1))?;
            repeated.narrow(1, 0, seq_len)?.contiguous()?.to_device(device)
        };
        let qkv = [random(num_heads)?, random(num_kv_heads)?, random(num_kv_heads)?];
        let [dq, dk, dv] = &qkv;
        let dqkv = [dq.zeros_like()?, dk.zeros_like()?, dv.zeros_like()?];
        let dout = random(num_heads)?;
        let lse = Tensor::zeros((1, num_heads, seq_len), DType::F32, device)?;
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        let (o, row_terms) = (dout.zeros_like()?, lse.zeros_like()?);
        Ok(Self { layout, scale, kernels, qkv, o, lse, row_terms, dout, dqkv })
    }

    fn operands(&self) -> Operands<'_> {
        let [q, k, v] = &self.qkv;
        Operands { q, k, v, scale: self.scale, layout: self.layout, kernels: self.kernels }
    }

    pub(super) fn forward(&self) -> Case<'_> {
        Case::new(|| Ok(forward(&self.operands(), &self.o, &self.lse)?))
    }

    fn cases(&self) -> [Case<'_>; 3] {
        [self.forward(), self.backward(), self.delta()]
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
