//! `ulysses bench gemm`, and the square GEMM that is the baseline of other benchmarks.

use super::report::{Figure, Report, Unit};
use super::turns::{Case, take_turns};
use super::{DeviceArg, DtypeArg, Failure, MeasureArgs, OrFail, Placement, Ranks, settings};
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use ulysses::comm::RankContext;
use ulysses::kernels::linear;
use ulysses::model::{LlamaConfig, shape};

/// Name of the square GEMM in reports.
pub(super) const SQUARE: &str = "square_gemm";

#[derive(clap::Args)]
pub(super) struct Args {
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
    #[arg(long, default_value = "f32")]
    dtype: DtypeArg,
    /// Device of the matrices.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
    #[command(flatten)]
    measuring: MeasureArgs,
}

/// A square GEMM that is large enough for the peak rate of the device.
pub(crate) struct Square {
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    size: usize,
}

impl Square {
    pub(crate) fn new(dtype: DType, device: &Device) -> Result<Self> {
        let size = if device.is_cpu() { 1024 } else { 8192 };
        let matrix = || random(size, size, dtype, device);
        Ok(Self { x: matrix()?, weight: matrix()?, y: matrix()?, size })
    }

    pub(crate) fn flops(&self) -> f64 {
        2.0 * (self.size as f64).powi(3)
    }

    pub(crate) fn case(&self) -> Case<'_> {
        Case::new(|| Ok(linear::forward(&self.x, &self.weight, &self.y, false)?))
    }
}

/// A matrix `[rows, cols]` of random numbers with a variance of 1 / `cols`, so that products keep their size: a GPU multiplies
/// equal numbers at a higher clock. Its first rows repeat, since drawing takes long.
fn random(rows: usize, cols: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let (drawn, std) = (rows.min(256), (cols as f32).sqrt().recip());
    let normal = Tensor::randn(0f32, std, (drawn, cols), &Device::Cpu)?.to_dtype(dtype)?;
    Ok(normal.repeat((rows.div_ceil(drawn), 1))?.narrow(0, 0, rows)?.contiguous()?.to_device(device)?)
}

/// A weight's name, inputs and outputs.
type Shape = (&'static str, usize, usize);

/// The GEMMs of a weight.
pub(super) struct WeightGemms {
    name: &'static str,
    flops: f64,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    dweight: Tensor,
}

impl WeightGemms {
    /// Returns those of all weights of a layer and of the LM head. Weight gradients are f32.
    pub(super) fn all(
        model: &LlamaConfig,
        tokens: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Vec<Self>> {
        shapes(model).into_iter().map(|shape| Self::new(tokens, shape, dtype, device)).collect()
    }

    fn new(tokens: usize, (name, inputs, outputs): Shape, dtype: DType, device: &Device) -> Result<Self> {
        let random = |rows: usize, cols: usize| random(rows, cols, dtype, device);
        Ok(Self {
            name,
            flops: 2.0 * tokens as f64 * inputs as f64 * outputs as f64,
            x: random(tokens, inputs)?,
            weight: random(outputs, inputs)?,
            y: random(tokens, outputs)?,
            dweight: Tensor::ones((outputs, inputs), DType::F32, device)?,
        })
    }

    /// Returns the FLOPs of each GEMM.
    pub(super) fn flops(&self) -> f64 {
        self.flops
    }

    /// Returns one GEMM of the forward and two of the backward pass.
    pub(super) fn cases(&self) -> [(&'static str, Case<'_>); 3] {
        let Self { x, weight, y, dweight, .. } = self;
        [
            ("forward", Case::new(|| Ok(linear::forward(x, weight, y, false)?))),
            ("input gradient", Case::new(|| Ok(linear::backward_input(y, weight, x, false)?))),
            ("weight gradient", Case::new(|| Ok(linear::backward_weight(y, x, dweight)?))),
        ]
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let model = shape(&args.model).or_usage()?;
    let placement = Placement::of_one(args.device)?;
    let options = settings::launch_options(args.threads_per_rank, 1)?;
    let tokens = args.tokens as usize;
    let shapes = shapes(&model);
    // Weight gradients are f32 whatever the dtype.
    let factor = args.dtype.memory_factor();
    let elems = |(_, inputs, outputs): &Shape| {
        let (weight, activations) = ((inputs * outputs) as f64, (tokens * (inputs + outputs)) as f64);
        factor * activations + (factor + factor.ceil()) * weight
    };
    settings::check_tensors(placement.device, shapes.iter().map(elems).sum())?;
    let mut on = Ranks::threads(placement);
    let figures = on.run(1, &options, |rank, device| measure(rank, &device, args, &model))?;
    let settings = json!({
        "model": args.model, "tokens": tokens, "dtype": args.dtype.name(),
    });
    let method = "each GEMM of the model's weights with all tokens, forward and backward, alternating with a square \
                  f32 GEMM on the same threads; median";
    let report = Report {
        figures,
        ..Report::new("gemm", settings, method, Unit::Flops).on(1, &options, on.placement())
    };
    args.measuring.print(&report)
}

/// Measures the square GEMM and those of the model; other dtypes are compared with f32.
fn measure(rank: &RankContext, device: &Device, args: &Args, model: &LlamaConfig) -> Result<Vec<Figure>> {
    let square = Square::new(DType::F32, device)?;
    let all = |dtype: DtypeArg| WeightGemms::all(model, args.tokens as usize, dtype.dtype(), device);
    let gemms = all(DtypeArg::F32)?;
    let others = if args.dtype == DtypeArg::F32 { Vec::new() } else { all(args.dtype)? };
    let mut cases = vec![square.case()];
    cases.extend(gemms.iter().chain(&others).flat_map(WeightGemms::cases).map(|(_, case)| case));
    let mut seconds = take_turns(&*rank.group, device, args.measuring.repeats, cases)?.into_iter();
    let square = Figure::new(SQUARE, seconds.next().unwrap_or_default(), square.flops());
    let mut figures = |gemms: &[WeightGemms], dtype: DtypeArg| -> Vec<Figure> {
        let names = gemms.iter().flat_map(|gemm| gemm.cases().map(|(pass, _)| (gemm, pass)));
        let measured = names.zip(&mut seconds).map(|((gemm, pass), seconds)| {
            let name = dtype.label(&format!("{} {pass}", gemm.name));
            Figure::new(name, seconds, gemm.flops).against(&square)
        });
        measured.collect()
    };
    let in_f32 = figures(&gemms, DtypeArg::F32);
    let others =
        figures(&others, args.dtype).into_iter().zip(&in_f32).map(|(other, in_f32)| other.against(in_f32));
    let others: Vec<Figure> = others.collect();
    Ok([vec![square], in_f32, others].concat())
}

/// Returns the shapes of the weights of a layer and of the LM head.
fn shapes(model: &LlamaConfig) -> [Shape; 6] {
    let LlamaConfig { hidden_size: d, intermediate_size: f, num_heads, num_kv_heads, head_dim, .. } = *model;
    [
        ("q_proj", d, num_heads * head_dim),
        ("k_proj, v_proj", d, num_kv_heads * head_dim),
        ("o_proj", num_heads * head_dim, d),
        ("gate_proj, up_proj", d, f),
        ("down_proj", f, d),
        ("lm_head", d, model.vocab_size),
    ]
}
