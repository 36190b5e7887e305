//! `ulysses bench gemm`, and the square GEMM that is the baseline of other benchmarks.

use super::case::{Case, Figure};
use super::report::{FLOPS, Report};
use super::{
    BenchRank, BenchRanks, Benchmark, DeviceArg, Failure, JobRanks, OrFail, dtype_name, dtype_parser,
};
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::rc::Rc;
use ulysses::kernels::linear;
use ulysses::model::{ModelConfig, shape};
use ulysses::nn::AttentionConfig;

/// Name of the square GEMM in reports.
pub(super) const SQUARE: &str = "square_gemm";

/// Returns a square GEMM that is large enough for the peak rate of the device.
pub(crate) fn square_gemm(dtype: DType, device: &Device) -> Result<Case<'static>> {
    let size = if device.is_cpu() { 1024 } else { 8192 };
    let matrix = || random(size, size, dtype, device);
    let (x, weight, y) = (matrix()?, matrix()?, matrix()?);
    let flops = 2.0 * (size as f64).powi(3);
    Ok(Case::new(SQUARE, flops, move || linear::forward(&x, &weight, &y, false)))
}

/// A matrix `[rows, cols]` of random numbers with a variance of 1 / `cols`, so that products keep their size: a GPU multiplies
/// equal numbers at a higher clock. Its first rows repeat, since drawing takes long.
fn random(rows: usize, cols: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let (drawn, std) = (rows.min(256), (cols as f32).sqrt().recip());
    let normal = Tensor::randn(0f32, std, (drawn, cols), &Device::Cpu)?.to_dtype(dtype)?;
    Ok(normal.repeat((rows.div_ceil(drawn), 1))?.narrow(0, 0, rows)?.contiguous()?.to_device(device)?)
}

/// Returns how much memory tensors in `dtype` and in f32, its reference, take, relative to those in f32 alone.
pub(super) fn memory_factor(dtype: DType) -> f64 {
    if dtype == DType::F32 { 1.0 } else { 1.5 }
}

/// Measures a square GEMM and the cases in a first dtype, and in another if it differs, compared with the first.
pub(super) fn in_dtypes(
    bench: &BenchRank<'_>,
    [first, other]: [DType; 2],
    mut cases: impl FnMut(DType) -> Result<Vec<Case<'static>>>,
) -> Result<Vec<Figure>> {
    let mut all = vec![square_gemm(first, &bench.device)?];
    all.extend(cases(first)?.into_iter().map(|case| case.in_dtype(first)));
    if other != first {
        let compared = |case: Case<'static>| {
            let in_first = case.name().to_owned();
            case.against(in_first).in_dtype(other)
        };
        all.extend(cases(other)?.into_iter().map(compared));
    }
    bench.take_turns(all)
}

#[derive(clap::Args)]
pub(super) struct Gemms {
    /// Preset (nano, tiny, small, base) or published model, such as llama3-8b, that gives the GEMM sizes.
    #[arg(long, default_value = "base")]
    model: String,
    /// Tokens per rank.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    tokens: u32,
    /// CPU threads [default: all cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Dtype of the matrices; f32 is always measured too.
    #[arg(long, default_value = "f32", value_parser = dtype_parser())]
    dtype: DType,
    /// Device of the matrices.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
}

impl Benchmark for Gemms {
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure> {
        let model = shape(&self.model).or_usage()?;
        let mut ranks = BenchRanks::place(ranks, self.device, 1, self.threads_per_rank)?;
        let tokens = self.tokens as usize;
        // Weight gradients are f32 whatever the dtype.
        let factor = memory_factor(self.dtype);
        let elems = |WeightShape { inputs, outputs, .. }: WeightShape| {
            let (weight, activations) = ((inputs * outputs) as f64, (tokens * (inputs + outputs)) as f64);
            factor * activations + (factor + factor.ceil()) * weight
        };
        ranks.check_tensors(weight_shapes(&model).map(elems).iter().sum())?;
        let figures = ranks.run(repeats, |bench| {
            let cases = |dtype| gemms(&model, tokens, dtype, &bench.device);
            in_dtypes(bench, [DType::F32, self.dtype], cases)
        })?;
        Ok(Report {
            bench: "gemm",
            settings: json!({ "model": self.model, "tokens": tokens, "dtype": dtype_name(self.dtype) }),
            method: "each GEMM of the model's weights with all tokens, forward and backward, alternating with a square \
                     f32 GEMM on the same threads; median"
                .to_owned(),
            unit: FLOPS,
            figures,
            ranks,
        })
    }
}

/// A weight of a model.
struct WeightShape {
    name: &'static str,
    inputs: usize,
    outputs: usize,
}

/// Returns the weights of a layer and the LM head.
fn weight_shapes(model: &ModelConfig) -> [WeightShape; 6] {
    let ModelConfig { hidden_size: d, intermediate_size: f, .. } = *model;
    let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = *model.attention();
    [
        WeightShape { name: "q_proj", inputs: d, outputs: num_heads * head_dim },
        WeightShape { name: "k_proj, v_proj", inputs: d, outputs: num_kv_heads * head_dim },
        WeightShape { name: "o_proj", inputs: num_heads * head_dim, outputs: d },
        WeightShape { name: "gate_proj, up_proj", inputs: d, outputs: f },
        WeightShape { name: "down_proj", inputs: f, outputs: d },
        WeightShape { name: "lm_head", inputs: d, outputs: model.vocab_size },
    ]
}

/// The operands of the GEMMs of a weight. Its gradient is f32.
struct Weight {
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    dweight: Tensor,
}

/// Returns the GEMM of the forward and the two of the backward pass for every weight of a layer and for the LM head.
pub(super) fn gemms(
    model: &ModelConfig,
    tokens: usize,
    dtype: DType,
    device: &Device,
) -> Result<Vec<Case<'static>>> {
    let mut cases = Vec::new();
    for WeightShape { name, inputs, outputs } in weight_shapes(model) {
        let random = |rows: usize, cols: usize| random(rows, cols, dtype, device);
        let operands = Rc::new(Weight {
            x: random(tokens, inputs)?,
            weight: random(outputs, inputs)?,
            y: random(tokens, outputs)?,
            dweight: Tensor::ones((outputs, inputs), DType::F32, device)?,
        });
        let flops = 2.0 * tokens as f64 * inputs as f64 * outputs as f64;
        let case =
            |pass: &str, run| Case::on(&operands, format!("{name} {pass}"), flops, run).against(SQUARE);
        cases.extend([
            case("forward", |Weight { x, weight, y, .. }| linear::forward(x, weight, y, false)),
            case("input gradient", |Weight { x, weight, y, .. }| linear::backward_input(y, weight, x, false)),
            case("weight gradient", |Weight { x, y, dweight, .. }| linear::backward_weight(y, x, dweight)),
        ]);
    }
    Ok(cases)
}
