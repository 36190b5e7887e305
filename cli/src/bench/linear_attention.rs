//! `ulysses bench linear-attention`.

use super::case::Case;
use super::gemm::{SQUARE, in_dtypes, memory_factor};
use super::report::{FLOPS, Report};
use super::{BenchRanks, Benchmark, DeviceArg, Failure, JobRanks, OrFail, dtype_name, dtype_parser};
use anyhow::{Result, anyhow};
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::rc::Rc;
use ulysses::kernels::linear_attention::{
    Gradients, LinearAttentionLayout, Operands, Rule, backward, forward,
};
use ulysses::kernels::{Documents, OpError, Workspace};
use ulysses::tensor::TensorOptions;

/// The defaults are the heads of a linear layer of Qwen3.5, a quarter of them.
#[derive(clap::Args)]
pub(super) struct LinearAttention {
    /// Tokens per sequence.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    seq_len: u32,
    /// Number of value heads.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    num_value_heads: u16,
    /// Number of key heads; must divide --num-value-heads.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    num_key_heads: u16,
    /// Elements of a key and of a value.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=1024))]
    head_dim: u16,
    /// CPU threads [default: all cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Dtype of queries, keys and values; f32 is always measured too.
    #[arg(long, default_value = "f32", value_parser = dtype_parser())]
    dtype: DType,
    /// Device of the tensors.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
}

impl Benchmark for LinearAttention {
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure> {
        let mut ranks = BenchRanks::place(ranks, self.device, 1, self.threads_per_rank)?;
        let head_elems = f64::from(self.seq_len) * f64::from(self.num_value_heads) * f64::from(self.head_dim);
        // q, k, v, o and the gradient of each, with at most as many key heads.
        ranks.check_tensors(8.0 * head_elems * memory_factor(self.dtype))?;
        let (values, keys) = (usize::from(self.num_value_heads), usize::from(self.num_key_heads));
        if !values.is_multiple_of(keys) {
            return Err(Failure::Usage(anyhow!(
                "--num-key-heads {keys} does not divide the {values} value heads"
            )));
        }
        let documents = Documents::new(vec![vec![0, self.seq_len]]).or_usage()?;
        let v_to_k: Vec<usize> = (0..values).map(|head| head / (values / keys)).collect();
        let layout = LinearAttentionLayout::new(documents, v_to_k);
        let figures = ranks.run(repeats, |bench| {
            let cases = |dtype| {
                let options = TensorOptions { device: bench.device.clone(), dtype };
                Ok(Passes::new(&layout, keys, self.head_dim.into(), &options)?.cases().into())
            };
            in_dtypes(bench, [DType::F32, self.dtype], cases)
        })?;
        Ok(Report {
            bench: "linear-attention",
            settings: json!({
                "seq_len": self.seq_len, "num_value_heads": values, "num_key_heads": keys,
                "head_dim": self.head_dim, "dtype": dtype_name(self.dtype),
            }),
            method: "gated delta rule, with a decay per head and per channel (Kimi Linear), and sums (Mamba 2) of one document; \
                     FLOPs of its matmuls in chunks, counted twice in the backward pass; \
                     each pass alternating with a square f32 GEMM on the same threads; median"
                .to_owned(),
            unit: FLOPS,
            figures,
            ranks,
        })
    }
}

/// Both passes on random tensors.
struct Passes {
    layout: LinearAttentionLayout,
    workspace: Workspace,
    /// q, k, v, g and beta.
    inputs: [Tensor; 5],
    gradients: [Tensor; 5],
    /// Decays per channel, and their gradient.
    channel_decays: [Tensor; 2],
    /// The skip connection of sums.
    skip: Tensor,
    states: Tensor,
    o: Tensor,
    dout: Tensor,
    head_dim: usize,
}

impl Passes {
    fn new(
        layout: &LinearAttentionLayout,
        keys: usize,
        head_dim: usize,
        options: &TensorOptions,
    ) -> Result<Self> {
        let TensorOptions { device, dtype } = options;
        let (seq_len, values) = (layout.documents().seq_len(), layout.v_to_k().len());
        let random = |shape: &[usize], dtype: DType| {
            Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
        };
        let heads = |heads: usize| random(&[1, seq_len, heads, head_dim], *dtype);
        let gates = || random(&[1, seq_len, values], DType::F32);
        let decays = |gates: Tensor| gates.abs()?.affine(-0.05, 0.0);
        let (g, beta) = (decays(gates()?)?, gates()?.affine(0.1, 0.5)?.clamp(0f32, 1f32)?);
        let of_channels = decays(random(&[1, seq_len, keys, head_dim], DType::F32)?)?;
        let channel_decays = [of_channels.clone(), of_channels.zeros_like()?];
        let inputs = [heads(keys)?, heads(keys)?, heads(values)?, g, beta];
        let [q, k, v, g, beta] = &inputs;
        let gradients =
            [q.zeros_like()?, k.zeros_like()?, v.zeros_like()?, g.zeros_like()?, beta.zeros_like()?];
        let (o, dout, skip) = (v.zeros_like()?, heads(values)?, random(&[values], *dtype)?);
        let workspace = Workspace::with_options(options.clone());
        let states = workspace.alloc_f32(&layout.states_shape(head_dim, head_dim))?;
        let layout = layout.clone();
        Ok(Self { layout, workspace, inputs, gradients, channel_decays, skip, states, o, dout, head_dim })
    }

    fn cases(self) -> [Case<'static>; 6] {
        let [of_delta, of_sums] =
            [Rule::Delta, Rule::Sum { skip: () }].map(|rule| self.layout.flops([self.head_dim; 2], rule));
        let passes = Rc::new(self);
        let case = |name: &str, flops, run| Case::on(&passes, name, flops, run).against(SQUARE);
        [
            case("forward", of_delta, |passes: &Self| passes.forward(Rule::Delta)),
            case("backward", 2.0 * of_delta, |passes| passes.backward(Rule::Delta)),
            case("per channel forward", of_delta, |passes| passes.forward(Rule::ChannelDelta)),
            case("per channel backward", 2.0 * of_delta, |passes| passes.backward(Rule::ChannelDelta)),
            case("sums forward", of_sums, |passes| passes.forward(passes.sums())),
            case("sums backward", 2.0 * of_sums, |passes| passes.backward(passes.sums())),
        ]
    }

    fn sums(&self) -> Rule<&Tensor> {
        Rule::Sum { skip: &self.skip }
    }

    fn operands<'a>(&'a self, rule: Rule<&'a Tensor>) -> Operands<'a> {
        let [q, k, v, g, beta] = &self.inputs;
        let g = if rule.has_channel_decays() { &self.channel_decays[0] } else { g };
        Operands { q, k, v, g, beta, rule, layout: &self.layout }
    }

    fn forward(&self, rule: Rule<&Tensor>) -> Result<(), OpError> {
        forward(&self.operands(rule), &self.o, &self.states, &self.workspace)
    }

    fn backward(&self, rule: Rule<&Tensor>) -> Result<(), OpError> {
        let [dq, dk, dv, dg, dbeta] = &self.gradients;
        let dg = if rule.has_channel_decays() { &self.channel_decays[1] } else { dg };
        let gradients = Gradients { dq, dk, dv, dg, dbeta, dskip: None };
        backward(&self.operands(rule), &self.states, &self.dout, &gradients, &self.workspace)
    }
}
