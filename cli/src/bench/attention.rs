//! `ulysses bench attention`.

use super::case::{Case, Figure};
use super::gemm::{SQUARE, in_dtypes, memory_factor};
use super::report::{FLOPS, Report};
use super::{
    BenchRank, BenchRanks, Benchmark, DeviceArg, Failure, JobRanks, OrFail, dtype_name, dtype_parser,
};
use anyhow::{Result, anyhow, bail};
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::rc::Rc;
use ulysses::kernels::attention::{
    AttentionError, AttentionKernels, AttentionLayout, Gradients, Operands, Upstream, backward, delta,
    forward, grouped_heads,
};
use ulysses::tensor::TensorOptions;

#[derive(clap::Args)]
pub(super) struct Attention {
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
    /// Number of tokens that a token attends to, including itself [default: all before it].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    window: Option<u32>,
    /// CPU threads [default: all cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Dtype of the tensors; f32 is measured too, without --no-f32.
    #[arg(long, default_value = "f32", value_parser = dtype_parser())]
    dtype: DType,
    /// Measure nothing in f32: the baseline is a square GEMM in --dtype.
    #[arg(long)]
    no_f32: bool,
    /// Kernels of 16-bit attention on a GPU, as `ulysses.attention`; `wgmma` is an error where `auto` does not use them.
    #[arg(long, default_value = "auto", value_parser = ["auto", "fused", "wgmma", "tiled"])]
    kernels: String,
    /// Device of the tensors.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
}

impl Benchmark for Attention {
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure> {
        let mut ranks = BenchRanks::place(ranks, self.device, 1, self.threads_per_rank)?;
        let head_elems = f64::from(self.seq_len) * f64::from(self.num_heads) * f64::from(self.head_dim);
        // q, k, v, o and the gradient of each, with at most as many KV heads.
        ranks.check_tensors(8.0 * head_elems * memory_factor(self.dtype))?;
        let (num_heads, num_kv_heads) = (self.num_heads, self.num_kv_heads.unwrap_or(self.num_heads));
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(Failure::Usage(anyhow!(
                "--num-kv-heads {num_kv_heads} does not divide the {num_heads} query heads"
            )));
        }
        let q_to_kv = grouped_heads(num_heads.into(), num_kv_heads.into());
        let window = self.window.map(|window| window as usize);
        let layout = AttentionLayout::causal(1, self.seq_len, q_to_kv.clone()).or_usage()?;
        let layout = layout.masked(q_to_kv, window, None).or_usage()?;
        let Measured { figures, kernels } = ranks.run(repeats, |bench| self.measure(bench, &layout))?;
        Ok(Report {
            bench: "attention",
            settings: json!({
                "seq_len": self.seq_len, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
                "head_dim": self.head_dim, "window": self.window, "dtype": dtype_name(self.dtype), "kernels": kernels,
            }),
            method: "causal; FLOPs of visible pairs only; each pass alternating with a square GEMM on the same threads, \
                     in f32 unless --no-f32; median. delta: the row sums of o · dout that backward needs."
                .to_owned(),
            unit: FLOPS,
            figures,
            ranks,
        })
    }
}

struct Measured {
    figures: Vec<Figure>,
    /// Name of the kernels that computed them in `--dtype`.
    kernels: &'static str,
}

impl Attention {
    fn measure(&self, bench: &BenchRank<'_>, layout: &AttentionLayout) -> Result<Measured> {
        let requested = match &*self.kernels {
            "fused" => AttentionKernels::Fused,
            "wgmma" => AttentionKernels::Wgmma,
            "tiled" => AttentionKernels::Tiled,
            _ => AttentionKernels::Auto,
        };
        let mut used = requested;
        let cases = |dtype| {
            let kernels = if dtype == DType::F32 { AttentionKernels::Tiled } else { requested };
            let options = TensorOptions { device: bench.device.clone(), dtype };
            let passes = AttentionPasses::new(layout, self.head_dim.into(), &options, kernels)?;
            used = passes.kernels;
            if requested == AttentionKernels::Wgmma && dtype == self.dtype && used != requested {
                let dtype = dtype_name(dtype);
                bail!("--kernels wgmma: this device does not run them in {dtype}, see the warnings");
            }
            Ok(passes.cases().into())
        };
        let first = if self.no_f32 { self.dtype } else { DType::F32 };
        let figures = in_dtypes(bench, [first, self.dtype], cases)?;
        let kernels = match used {
            _ if bench.device.is_cpu() => "cpu",
            AttentionKernels::Auto | AttentionKernels::Fused => "fused",
            AttentionKernels::Wgmma => "wgmma",
            AttentionKernels::Tiled => "tiled",
        };
        Ok(Measured { figures, kernels })
    }
}

/// Attention with gradients on random tensors.
pub(super) struct AttentionPasses {
    layout: AttentionLayout,
    scale: f32,
    kernels: AttentionKernels,
    qkv: [Tensor; 3],
    o: Tensor,
    lse: Tensor,
    row_terms: Tensor,
    dout: Tensor,
    dqkv: [Tensor; 3],
}

impl AttentionPasses {
    /// Creates one sequence with the heads of the layout.
    pub(super) fn new(
        layout: &AttentionLayout,
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
        Ok(Self { layout: layout.clone(), scale, kernels, qkv, o, lse, row_terms, dout, dqkv })
    }

    /// Returns forward, backward and the row sums: two dot products of `head_dim` multiply-adds per visible pair
    /// forward, five backward.
    pub(super) fn cases(self) -> [Case<'static>; 3] {
        let (elems, seq_len) = (self.o.elem_count(), self.layout.q_positions().len());
        let pair_elems = self.layout.num_visible_pairs() as f64 * (elems / seq_len) as f64;
        let passes = Rc::new(self);
        [
            Case::on(&passes, "forward", 4.0 * pair_elems, Self::forward).against(SQUARE),
            Case::on(&passes, "backward", 10.0 * pair_elems, Self::backward).against(SQUARE),
            Case::on(&passes, "delta", 2.0 * elems as f64, |Self { o, dout, row_terms, .. }| {
                delta(o, dout, row_terms)
            }),
        ]
    }

    fn operands(&self) -> Operands<'_> {
        let [q, k, v] = &self.qkv;
        Operands { q, k, v, scale: self.scale, layout: &self.layout, kernels: self.kernels }
    }

    fn forward(&self) -> Result<(), AttentionError> {
        forward(&self.operands(), &self.o, &self.lse)
    }

    fn backward(&self) -> Result<(), AttentionError> {
        let upstream = Upstream { dout: &self.dout, lse: &self.lse, delta: &self.row_terms };
        let [dq, dk, dv] = &self.dqkv;
        backward(&self.operands(), &upstream, &Gradients { dq, dk, dv })
    }
}
