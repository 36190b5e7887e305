//! `ulysses bench profile`: machine rates for `ulysses plan --machine`.

use super::attention::Operation;
use super::collectives::{figures, figures_of};
use super::gemm::{Square, WeightGemms};
use super::report::{Figure, cores, cpu_name};
use super::turns::{Case, median, take_turns};
use super::{DeviceArg, Failure, Joined, OrFail, Ranks, print, settings};
use crate::log_line;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use std::path::{Path, PathBuf};
use ulysses::comm::{LaunchOptions, RankContext};
use ulysses::config::{LinkRates, Links, MachineProfile, Rates, RatesByFormat};
use ulysses::device::DeviceKind;
use ulysses::kernels::attention::{AttentionKernels, AttentionLayout, grouped_heads};
use ulysses::kernels::optimizer::adamw::{self, AdamParams};
use ulysses::kernels::{rms_norm, strided_copy, swiglu};
use ulysses::model::{LlamaConfig, shape};
use ulysses::offload::{OffloadError, OffloadStore, StoreLabel};
use ulysses::tensor::TensorOptions;

/// Elements of a collective that is bound by latency.
const LATENCY_ELEMS: usize = 8;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Number of ranks (threads) that run at once: as many as will share a machine.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
    /// Preset (nano, tiny, small, base) or published model, such as llama3-8b, that gives the GEMM sizes.
    #[arg(long, default_value = "base")]
    model: String,
    /// Tokens per rank.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    tokens: u32,
    /// Size of collectives, optimizer update and file transfers in MiB.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    mib: u16,
    /// CPU threads per rank [default: an equal share of the cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Device of the tensors.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
    /// Directory for the offload file [default: the system's temporary directory].
    #[arg(long)]
    offload_path: Option<PathBuf>,
    /// Number of measured repetitions, after one warm-up; medians are reported.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeats: u32,
    /// Output file [default: standard output].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The sizes to measure with.
struct Bench<'a> {
    args: &'a Args,
    model: LlamaConfig,
    layout: AttentionLayout,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let model = shape(&args.model).or_usage()?;
    let ranks = usize::from(args.ranks);
    let options = settings::launch_options(args.threads_per_rank, ranks)?;
    let tensors = args.tokens as usize * 8 * (2 * model.intermediate_size + 2 * model.hidden_size);
    let mut on = Joined::threads().place(args.device, ranks)?;
    let device = on.placement().device;
    settings::check_tensors(device, (ranks * (tensors + 8 * (usize::from(args.mib) << 18))) as f64)?;
    let heads = grouped_heads(model.num_heads, model.num_kv_heads);
    let layout = AttentionLayout::causal(1, args.tokens, heads).or_usage()?;
    let bench = Bench { args, model, layout };
    let mut rates_of =
        |dtype| on.run(ranks, &options, |rank, device| bench.rates(rank, &device, dtype)).map(Some);
    let rates = RatesByFormat { f32: rates_of(DType::F32)?, bf16: rates_of(DType::BF16)?, fp16: None };
    let profile = MachineProfile {
        name: on.placement().gpu_name().unwrap_or_else(cpu_name),
        origin: bench.origin(&options),
        ranks_per_node: ranks,
        rates,
        update_bytes_per_second: on.run(ranks, &options, |rank, device| bench.update(rank, &device))?,
        file_bytes_per_second: bench.file(&mut on, ranks, &options)?,
        // Not measured yet: see docs/gpu.md.
        host_bytes_per_second: None,
        // Threads transfer their data themselves while they wait.
        overlaps_communication: false,
        links: Links { intra_node: bench.link(&mut on, ranks, &options)?, inter_node: None },
    };
    let text = format!("{:#}\n", profile.to_json());
    let Some(path) = &args.output else { return print(text) };
    ulysses::regular_file::write(path, text)
        .with_context(|| format!("--output: cannot write {}", path.display()))
        .or_run()?;
    log_line(format_args!("profile     {}", path.display()));
    Ok(())
}

impl Bench<'_> {
    fn origin(&self, options: &LaunchOptions) -> String {
        let Args { ranks, model, tokens, repeats, .. } = self.args;
        format!(
            "measured by ulysses bench profile {}: {ranks} rank(s) of {} thread(s) at once on {} core(s), GEMMs of \
             {model} with {tokens} tokens, medians of {repeats}",
            env!("CARGO_PKG_VERSION"),
            options.threads_per_rank,
            cores()
        )
    }

    /// Measures the compute rates of a rank while all ranks run. Collective.
    fn rates(&self, rank: &RankContext, device: &Device, dtype: DType) -> Result<Rates> {
        let (square, tokens) = (Square::new(dtype, device)?, self.args.tokens as usize);
        let gemms = WeightGemms::all(&self.model, tokens, dtype, device)?;
        let options = TensorOptions { device: device.clone(), dtype };
        let attention = Operation::new(&self.layout, self.model.head_dim, &options, AttentionKernels::Auto)?;
        let elementwise = Elementwise::new(&self.model, tokens, dtype, device)?;
        let LlamaConfig { num_heads, head_dim, .. } = self.model;
        let pair_elems = self.layout.num_visible_pairs() as f64 * (num_heads * head_dim) as f64;
        let mut cases = vec![square.case(), attention.forward(), attention.backward()];
        let mut work = vec![square.flops(), 4.0 * pair_elems, 8.0 * pair_elems];
        let gemm_cases = gemms.iter().flat_map(|gemm| gemm.cases().map(|(_, case)| (case, gemm.flops())));
        for (case, amount) in gemm_cases.chain(elementwise.cases()) {
            cases.push(case);
            work.push(amount);
        }
        let seconds = take_turns(&*rank.group, device, self.args.repeats, cases)?;
        let first_elementwise = 3 + 3 * gemms.len();
        let rate = |cases: std::ops::Range<usize>| {
            let seconds: f64 = seconds[cases.clone()].iter().map(|seconds| median(seconds)).sum();
            work[cases].iter().sum::<f64>() / seconds
        };
        Ok(Rates {
            peak_flops_per_second: rate(0..1),
            attention_forward_flops_per_second: rate(1..2),
            attention_backward_flops_per_second: rate(2..3),
            product_flops_per_second: rate(3..first_elementwise),
            elementwise_bytes_per_second: rate(first_elementwise..work.len()),
        })
    }

    /// Measures the bytes per second that AdamW reads and writes. Collective.
    fn update(&self, rank: &RankContext, device: &Device) -> Result<f64> {
        let elems = usize::from(self.args.mib) << 18;
        let ones = || Tensor::ones(elems, DType::F32, device);
        let (parameters, gradients, mean, squares) = (ones()?, ones()?, ones()?, ones()?);
        let params = AdamParams {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: true,
            bias_correction: true,
            step: 1,
            grad_scale: 1.0,
        };
        let update = Case::new(|| Ok(adamw::step(&parameters, &gradients, &mean, &squares, &params)?));
        let seconds = take_turns(&*rank.group, device, self.args.repeats, vec![update])?;
        // Four tensors are read, three written.
        Ok((7 * elems * size_of::<f32>()) as f64 / median(&seconds[0]))
    }

    /// Measures the bytes per second of offload to a file and back. `None` on GPUs, which offload to host memory.
    fn file(
        &self,
        on: &mut Ranks<'_>,
        ranks: usize,
        options: &LaunchOptions,
    ) -> Result<Option<f64>, Failure> {
        if on.placement().device != DeviceKind::Cpu {
            return Ok(None);
        }
        let label = StoreLabel { holds: "the benchmark", key: "--offload-path" };
        let directory = self.args.offload_path.as_deref();
        // Fails before ranks start.
        OffloadStore::in_file(label, directory).or_usage()?;
        on.run(ranks, options, |rank, _| self.file_of(rank, label, directory)).map(Some)
    }

    fn file_of(&self, rank: &RankContext, label: StoreLabel, directory: Option<&Path>) -> Result<f64> {
        let file = OffloadStore::in_file(label, directory)?;
        let bytes = usize::from(self.args.mib) << 20;
        let back = Tensor::ones(bytes / size_of::<f32>(), DType::F32, &Device::Cpu)?;
        let there_and_back = Case::new(|| {
            // The store needs sole ownership of the tensor.
            let there = back.copy()?;
            let place = file.reserve(bytes);
            file.write(&place, there)?;
            file.settle()?;
            file.read(&place, || Ok::<_, OffloadError>(back.clone()))?;
            Ok(())
        });
        let seconds = take_turns(&*rank.group, &Device::Cpu, self.args.repeats, vec![there_and_back])?;
        Ok(2.0 * bytes as f64 / median(&seconds[0]))
    }

    fn link(
        &self,
        on: &mut Ranks<'_>,
        ranks: usize,
        options: &LaunchOptions,
    ) -> Result<Option<LinkRates>, Failure> {
        if ranks == 1 {
            return Ok(None);
        }
        let Args { mib, repeats, .. } = *self.args;
        let (small, large) = (
            figures_of(LATENCY_ELEMS, on, ranks, options, repeats)?,
            figures(on, ranks, options, mib, repeats)?,
        );
        link_rates(&small, &large).map(Some).or_run()
    }
}

/// Derives link rates from small (latency) and large (bandwidth) collectives.
fn link_rates(small: &[Figure], large: &[Figure]) -> Result<LinkRates> {
    let is_collective = |figure: &&Figure| figure.name() != "copy";
    let latencies: Vec<f64> = small.iter().filter(is_collective).map(Figure::seconds).collect();
    let rate = |name: &str| {
        let figure = large.iter().find(|figure| figure.name() == name);
        let rate = figure.map(Figure::rate).filter(|rate| rate.is_finite() && *rate > 0.0);
        Ok::<_, anyhow::Error>(1e9 * rate.with_context(|| format!("the rate of {name} was not measured"))?)
    };
    Ok(LinkRates {
        latency_seconds: Some(median(&latencies))
            .filter(|seconds| seconds.is_finite())
            .context("the latency was not measured")?,
        all_to_all_bytes_per_second: rate("all_to_all")?,
        all_reduce_bytes_per_second: rate("all_reduce")?,
        reduce_scatter_bytes_per_second: rate("reduce_scatter")?,
        all_gather_bytes_per_second: rate("all_gather")?,
    })
}

/// Memory-bound operations of a layer: copy, norms and SwiGLU with their gradients.
struct Elementwise {
    x: [Tensor; 3],
    weight: Tensor,
    rstd: Tensor,
    wide: [Tensor; 5],
}

impl Elementwise {
    fn new(model: &LlamaConfig, tokens: usize, dtype: DType, device: &Device) -> Result<Self> {
        let ones = |width: usize| Tensor::ones((tokens, width), dtype, device);
        let narrow = || ones(model.hidden_size);
        let wide = || ones(model.intermediate_size);
        Ok(Self {
            x: [narrow()?, narrow()?, narrow()?],
            weight: Tensor::ones(model.hidden_size, dtype, device)?,
            rstd: Tensor::ones(tokens, DType::F32, device)?,
            wide: [wide()?, wide()?, wide()?, wide()?, wide()?],
        })
    }

    /// Returns the operations with the bytes that each reads and writes.
    fn cases(&self) -> [(Case<'_>, f64); 5] {
        let Self { x: [x, y, dx], weight, rstd, wide: [gate, up, product, dgate, dup] } = self;
        let bytes = |tensor: &Tensor, times: usize| {
            (times * tensor.elem_count() * tensor.dtype().size_in_bytes()) as f64
        };
        [
            (Case::new(|| Ok(strided_copy::copy(x, y)?)), bytes(x, 2)),
            (Case::new(|| Ok(rms_norm::forward(x, weight, 1e-5, y, rstd)?)), bytes(x, 2)),
            (Case::new(|| Ok(rms_norm::backward(y, x, weight, rstd, dx, false, None)?)), bytes(x, 3)),
            (Case::new(|| Ok(swiglu::forward(gate, up, product)?)), bytes(gate, 3)),
            (Case::new(|| Ok(swiglu::backward(product, gate, up, dgate, dup)?)), bytes(gate, 5)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLLECTIVES: [&str; 4] = ["all_to_all", "all_reduce", "reduce_scatter", "all_gather"];

    fn figures(seconds: f64) -> Vec<Figure> {
        COLLECTIVES.map(|name| Figure::new(name, vec![seconds], 2e6)).into()
    }

    #[test]
    fn a_missing_figure_is_an_error_with_its_name() {
        let link = link_rates(&figures(1e-6), &figures(1e-3)).unwrap();
        assert_eq!(link.latency_seconds, 1e-6);
        assert!((link.all_gather_bytes_per_second / 2e9 - 1.0).abs() < 1e-12, "{link:?}");
        for (index, missing) in COLLECTIVES.into_iter().enumerate() {
            let mut large = figures(1e-3);
            large.remove(index);
            let error = link_rates(&figures(1e-6), &large).unwrap_err().to_string();
            assert_eq!(error, format!("the rate of {missing} was not measured"));
            large.insert(index, Figure::new(missing, vec![0.0], 2e6));
            link_rates(&figures(1e-6), &large).unwrap_err();
        }
        assert_eq!(link_rates(&[], &figures(1e-3)).unwrap_err().to_string(), "the latency was not measured");
    }
}
