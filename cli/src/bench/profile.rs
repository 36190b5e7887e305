//! `ulysses bench profile`: machine rates for `ulysses plan --machine`.

use super::attention::AttentionPasses;
use super::case::{Case, Figure, median};
use super::communication::collectives;
use super::gemm::{gemms, square_gemm};
use super::report::{cores, cpu_name};
use super::{BenchRank, BenchRanks, DeviceArg, Failure, JobRanks, OrFail, print};
use crate::output::log_line;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use std::path::PathBuf;
use std::rc::Rc;
use ulysses::comm::LaunchOptions;
use ulysses::config::{LinkRates, Links, MachineProfile, Rates, RatesByFormat};
use ulysses::device::DeviceKind;
use ulysses::kernels::attention::{AttentionKernels, AttentionLayout};
use ulysses::kernels::glu::{self, Activation::Silu};
use ulysses::kernels::optimizer::{ElementStep, Step, adamw::AdamParams};
use ulysses::kernels::{rms_norm, strided_copy};
use ulysses::model::{ModelConfig, shape};
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

pub(super) fn run(args: &Args, ranks: &mut JobRanks) -> Result<(), Failure> {
    let model = shape(&args.model).or_usage()?;
    let count = usize::from(args.ranks);
    let mut ranks = BenchRanks::place(ranks, args.device, count, args.threads_per_rank)?;
    let tensors = args.tokens as usize * 8 * (2 * model.intermediate_size + 2 * model.hidden_size);
    ranks.check_tensors((count * (tensors + 8 * args.elems())) as f64)?;
    let heads = model.attention().q_to_kv();
    let layout = AttentionLayout::causal(1, args.tokens, heads).or_usage()?;
    let mut measured =
        |dtype| ranks.run(args.repeats, |bench| args.rates(bench, &model, &layout, dtype)).map(Some);
    let rates = RatesByFormat { f32: measured(DType::F32)?, bf16: measured(DType::BF16)?, fp16: None };
    let profile = MachineProfile {
        name: ranks.on.placement().gpu_name().unwrap_or_else(cpu_name),
        origin: args.origin(&ranks.options),
        ranks_per_node: count,
        rates,
        update_bytes_per_second: ranks.run(args.repeats, |bench| args.update(bench))?,
        file_bytes_per_second: args.file(&mut ranks)?,
        // Not measured yet: see docs/gpu.md.
        host_bytes_per_second: None,
        // Threads transfer their data themselves while they wait.
        overlaps_communication: false,
        links: Links { intra_node: args.link(&mut ranks)?, inter_node: None },
    };
    let text = format!("{:#}\n", profile.to_json());
    let Some(path) = &args.output else { return print(text) };
    ulysses::regular_file::write(path, text)
        .with_context(|| format!("--output: cannot write {}", path.display()))
        .or_run()?;
    log_line(format_args!("profile     {}", path.display()));
    Ok(())
}

impl Args {
    /// Number of f32 elements in `--mib`.
    fn elems(&self) -> usize {
        usize::from(self.mib) << 18
    }

    fn origin(&self, options: &LaunchOptions) -> String {
        let Self { ranks, model, tokens, repeats, .. } = self;
        format!(
            "measured by ulysses bench profile {}: {ranks} rank(s) of {} thread(s) at once on {} core(s), GEMMs of \
             {model} with {tokens} tokens, medians of {repeats}",
            env!("CARGO_PKG_VERSION"),
            options.threads_per_rank,
            cores()
        )
    }

    /// Measures the compute rates of a rank while all ranks run. Collective.
    fn rates(
        &self,
        bench: &BenchRank<'_>,
        model: &ModelConfig,
        layout: &AttentionLayout,
        dtype: DType,
    ) -> Result<Rates> {
        let (tokens, options) = (self.tokens as usize, TensorOptions { device: bench.device.clone(), dtype });
        let attention =
            AttentionPasses::new(layout, model.attention().head_dim, &options, AttentionKernels::Auto)?;
        let [forward, backward, _] = attention.cases();
        let groups = [
            vec![square_gemm(dtype, &bench.device)?],
            vec![forward],
            // A plan counts four products per pair backward, not the scores that are computed again.
            vec![backward.times(0.8)],
            gemms(model, tokens, dtype, &bench.device)?,
            elementwise(model, tokens, &options)?,
        ];
        let lens = groups.each_ref().map(Vec::len);
        let figures = bench.take_turns(groups.into_iter().flatten().collect())?;
        let mut figures = figures.into_iter();
        let [peak, forward, backward, products, elementwise] =
            lens.map(|len| per_second(&figures.by_ref().take(len).collect::<Vec<_>>()));
        Ok(Rates {
            peak_flops_per_second: peak,
            attention_forward_flops_per_second: forward,
            attention_backward_flops_per_second: backward,
            product_flops_per_second: products,
            elementwise_bytes_per_second: elementwise,
        })
    }

    /// Measures the bytes per second that AdamW reads and writes. Collective.
    fn update(&self, bench: &BenchRank<'_>) -> Result<f64> {
        let ones = || Tensor::ones(self.elems(), DType::F32, &bench.device);
        let (parameters, gradients, state) = (ones()?, ones()?, [ones()?, ones()?]);
        let params = AdamParams {
            step: Step { number: 1, lr: 1e-3, grad_scale: 1.0 },
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: true,
            bias_correction: true,
        };
        // Four tensors are read, three written.
        let bytes = (7 * self.elems() * size_of::<f32>()) as f64;
        let update = || params.apply(&parameters, &gradients, &state);
        Ok(per_second(&bench.take_turns(vec![Case::new("update", bytes, update)])?))
    }

    /// Measures the bytes per second of offload to a file and back. `None` on GPUs, which offload to host memory.
    fn file(&self, ranks: &mut BenchRanks<'_>) -> Result<Option<f64>, Failure> {
        if ranks.on.placement().device() != DeviceKind::Cpu {
            return Ok(None);
        }
        let label = StoreLabel { holds: "the benchmark", key: "--offload-path" };
        let open = || OffloadStore::in_file(label, self.offload_path.as_deref());
        // Fails before ranks start.
        open().or_usage()?;
        let bytes = self.elems() * size_of::<f32>();
        let rate = ranks.run(self.repeats, |bench| {
            let (file, back) = (open()?, Tensor::ones(self.elems(), DType::F32, &Device::Cpu)?);
            let there_and_back = || {
                // The store needs sole ownership of the tensor.
                let there = back.copy()?;
                let place = file.reserve(bytes);
                file.write(&place, there)?;
                file.settle()?;
                file.read(&place, || Ok::<_, OffloadError>(back.clone()))?;
                anyhow::Ok(())
            };
            Ok(per_second(&bench.take_turns(vec![Case::new("file", 2.0 * bytes as f64, there_and_back)])?))
        })?;
        Ok(Some(rate))
    }

    fn link(&self, ranks: &mut BenchRanks<'_>) -> Result<Option<LinkRates>, Failure> {
        if ranks.count == 1 {
            return Ok(None);
        }
        let small = collectives(ranks, LATENCY_ELEMS, self.repeats)?;
        let large = collectives(ranks, self.elems(), self.repeats)?;
        link_rates(&small, &large).map(Some).or_run()
    }
}

/// Returns the rate of figures one after the other, in bytes or FLOPs.
fn per_second(figures: &[Figure]) -> f64 {
    let work: f64 = figures.iter().map(|figure| figure.work).sum();
    work / figures.iter().map(Figure::seconds).sum::<f64>()
}

/// Derives link rates from small (latency) and large (bandwidth) collectives.
fn link_rates(small: &[Figure], large: &[Figure]) -> Result<LinkRates> {
    let is_collective = |figure: &&Figure| figure.name != "copy";
    let latencies: Vec<f64> = small.iter().filter(is_collective).map(Figure::seconds).collect();
    let rate = |name: &str| {
        let figure = large.iter().find(|figure| figure.name == name);
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

/// The operands of the memory-bound operations of a layer.
struct Elementwise {
    x: [Tensor; 3],
    weight: Tensor,
    rstd: Tensor,
    wide: [Tensor; 5],
}

/// Returns a copy, norms and SwiGLU with their gradients, each with the bytes that it reads and writes.
fn elementwise(model: &ModelConfig, tokens: usize, options: &TensorOptions) -> Result<Vec<Case<'static>>> {
    let TensorOptions { device, dtype } = options;
    let ones = |width: usize| Tensor::ones((tokens, width), *dtype, device);
    let narrow = || ones(model.hidden_size);
    let wide = || ones(model.intermediate_size);
    let operands = Rc::new(Elementwise {
        x: [narrow()?, narrow()?, narrow()?],
        weight: Tensor::ones(model.hidden_size, *dtype, device)?,
        rstd: Tensor::ones(tokens, DType::F32, device)?,
        wide: [wide()?, wide()?, wide()?, wide()?, wide()?],
    });
    let case = |name, bytes, run| Case::on(&operands, name, bytes, run);
    let bytes = |width: usize, times: usize| (times * tokens * width * dtype.size_in_bytes()) as f64;
    let (narrow, wide) = (model.hidden_size, model.intermediate_size);
    Ok(vec![
        case("copy", bytes(narrow, 2), |Elementwise { x: [x, y, _], .. }| strided_copy::copy(x, y)),
        case("rms_norm", bytes(narrow, 2), |Elementwise { x: [x, y, _], weight, rstd, .. }| {
            rms_norm::forward(x, weight, 1e-5, y, rstd)
        }),
        case(
            "rms_norm backward",
            bytes(narrow, 3),
            |Elementwise { x: [x, dy, dx], weight, rstd, .. }| {
                rms_norm::backward(dy, x, weight, rstd, dx, false, None)
            },
        ),
        case("swiglu", bytes(wide, 3), |Elementwise { wide: [gate, up, product, ..], .. }| {
            glu::forward(Silu, gate, up, product)
        }),
        case(
            "swiglu backward",
            bytes(wide, 5),
            |Elementwise { wide: [gate, up, dy, dgate, dup], .. }| {
                glu::backward(Silu, dy, gate, up, dgate, dup)
            },
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLLECTIVES: [&str; 4] = ["all_to_all", "all_reduce", "reduce_scatter", "all_gather"];

    fn figure(name: &str, seconds: f64) -> Figure {
        Figure { seconds: vec![seconds], ..Figure::new(name, 2e6) }
    }

    fn figures(seconds: f64) -> Vec<Figure> {
        COLLECTIVES.map(|name| figure(name, seconds)).into()
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
            large.insert(index, figure(missing, 0.0));
            link_rates(&figures(1e-6), &large).unwrap_err();
        }
        assert_eq!(link_rates(&[], &figures(1e-3)).unwrap_err().to_string(), "the latency was not measured");
    }
}
