//! `ulysses bench profile`: the rates that `ulysses plan --machine` goes by.

use super::attention::Operation;
use super::collectives::{figures, figures_of};
use super::gemm::{Product, Square};
use super::report::{Figure, cores, processor};
use super::turns::{Case, median, take_turns};
use super::{DeviceArg, Failure, OrFail, Ranks, on_ranks, print, settings};
use crate::log_line;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use std::path::{Path, PathBuf};
use ulysses::comm::{LaunchOptions, RankContext};
use ulysses::config::{LinkRates, Links, MachineProfile, Rates, RatesByFormat};
use ulysses::device::DeviceKind;
use ulysses::kernels::attention::Geometry;
use ulysses::kernels::optimizer::adamw::{self, AdamParams};
use ulysses::kernels::{rms_norm, strided_copy, swiglu};
use ulysses::model::{LlamaConfig, preset};
use ulysses::offload::{OffloadError, OffloadStore, Use};

/// Elements of a collective that takes nothing but its latency.
const FEW: usize = 8;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Ranks that work at once, as threads: as many as will share a machine. One communicates with nobody.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
    /// Preset of whose sizes the products are (nano, tiny, small, base).
    #[arg(long, default_value = "base")]
    model: String,
    /// Tokens of a rank.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    tokens: u32,
    /// MiB that a collective, the update and a file are given.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    mib: u16,
    /// Threads of each rank; a fair share of the cores without it.
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Where the tensors are.
    #[arg(long, default_value = "cpu")]
    device: DeviceArg,
    /// Directory of the file that stands for offloaded tensors; the system's for temporary files without it.
    #[arg(long)]
    offload_path: Option<PathBuf>,
    /// Measured repetitions; one more goes before them. Medians count.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeats: u32,
    /// The file to write; standard output without it.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What is measured with.
struct Bench<'a> {
    args: &'a Args,
    model: LlamaConfig,
    geometry: Geometry,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let device = args.device.kind()?;
    let model = preset(&args.model).or_usage()?;
    let ranks = usize::from(args.ranks);
    let options = settings::launch_options(args.threads_per_rank, ranks)?;
    let tensors = args.tokens as usize * 8 * (2 * model.intermediate_size + 2 * model.hidden_size);
    settings::check_tensors(device, (ranks * (tensors + 8 * (usize::from(args.mib) << 18))) as f64)?;
    let geometry = Geometry::causal(1, args.tokens, (0..model.num_heads).collect::<Vec<_>>()).or_usage()?;
    let bench = Bench { args, model, geometry };
    let rates_of = |dtype| on_ranks(ranks, &options, |rank| bench.rates(rank, device, dtype)).map(Some);
    let rates = RatesByFormat { f32: rates_of(DType::F32)?, bf16: rates_of(DType::BF16)?, fp16: None };
    let profile = MachineProfile {
        name: processor(),
        origin: bench.origin(&options),
        ranks_per_node: ranks,
        rates,
        update_bytes_per_second: on_ranks(ranks, &options, |rank| bench.update(rank, device))?,
        file_bytes_per_second: bench.file(ranks, &options, device)?,
        // Nobody has measured it yet: see docs/gpu.md.
        host_bytes_per_second: None,
        // Ranks that are threads move what is theirs themselves, when they wait for it.
        overlaps_communication: false,
        links: Links { intra_node: bench.link(ranks, &options, device)?, inter_node: None },
    };
    let text = format!("{:#}\n", profile.to_json());
    let Some(path) = &args.output else { return print(text) };
    std::fs::write(path, text)
        .with_context(|| format!("--output: cannot write {}", path.display()))
        .or_run()?;
    log_line(format_args!("profile     {}", path.display()));
    Ok(())
}

impl Bench<'_> {
    fn origin(&self, options: &LaunchOptions) -> String {
        let Args { ranks, model, tokens, repeats, .. } = self.args;
        format!(
            "measured by ulysses bench profile {}: {ranks} rank(s) of {} thread(s) at once on {} core(s), products of \
             {model} with {tokens} tokens, medians of {repeats}",
            env!("CARGO_PKG_VERSION"),
            options.threads_per_rank,
            cores()
        )
    }

    /// What a rank computes while the others do the same. Collective.
    fn rates(&self, rank: &RankContext, device: DeviceKind, dtype: DType) -> Result<Rates> {
        let device = device.open(rank.rank)?;
        let (square, tokens) = (Square::new(dtype, &device)?, self.args.tokens as usize);
        let products = Product::all(&self.model, tokens, dtype, &device)?;
        let attention = Operation::new(&self.geometry, self.model.head_dim, dtype, &device)?;
        let elementwise = Elementwise::new(&self.model, tokens, dtype, &device)?;
        let LlamaConfig { num_heads, head_dim, .. } = self.model;
        let products_of_pairs = self.geometry.num_visible_pairs() as f64 * (num_heads * head_dim) as f64;
        let mut cases = vec![square.case(), attention.forward(), attention.backward()];
        let mut work = vec![square.flops(), 4.0 * products_of_pairs, 8.0 * products_of_pairs];
        let of_products =
            products.iter().flat_map(|product| product.cases().map(|(_, case)| (case, product.flops())));
        for (case, amount) in of_products.chain(elementwise.cases()) {
            cases.push(case);
            work.push(amount);
        }
        let seconds = take_turns(&*rank.group, &device, self.args.repeats, cases)?;
        let first_sweep = 3 + 3 * products.len();
        let rate = |cases: std::ops::Range<usize>| {
            let seconds: f64 = seconds[cases.clone()].iter().map(|seconds| median(seconds)).sum();
            work[cases].iter().sum::<f64>() / seconds
        };
        Ok(Rates {
            peak_flops_per_second: rate(0..1),
            attention_forward_flops_per_second: rate(1..2),
            attention_backward_flops_per_second: rate(2..3),
            product_flops_per_second: rate(3..first_sweep),
            elementwise_bytes_per_second: rate(first_sweep..work.len()),
        })
    }

    /// Bytes that AdamW reads and writes in a second. Collective.
    fn update(&self, rank: &RankContext, device: DeviceKind) -> Result<f64> {
        let device = device.open(rank.rank)?;
        let elems = usize::from(self.args.mib) << 18;
        let ones = || Tensor::ones(elems, DType::F32, &device);
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
        let seconds = take_turns(&*rank.group, &device, self.args.repeats, vec![update])?;
        // Four tensors are read, three written.
        Ok((7 * elems * size_of::<f32>()) as f64 / median(&seconds[0]))
    }

    /// Bytes to a file and back in a second, as offloaded tensors go there; none from a GPU, which has no such files.
    fn file(
        &self,
        ranks: usize,
        options: &LaunchOptions,
        device: DeviceKind,
    ) -> Result<Option<f64>, Failure> {
        if device != DeviceKind::Cpu {
            return Ok(None);
        }
        let use_ = Use { holds: "what is measured", key: "--offload-path" };
        let directory = self.args.offload_path.as_deref();
        // Refused before anything starts.
        OffloadStore::in_file(use_, directory).or_usage()?;
        let measure = |rank: &RankContext| self.file_of(rank, use_, directory);
        on_ranks(ranks, options, measure).map(Some)
    }

    fn file_of(&self, rank: &RankContext, use_: Use, directory: Option<&Path>) -> Result<f64> {
        let file = OffloadStore::in_file(use_, directory)?;
        let bytes = usize::from(self.args.mib) << 20;
        let back = Tensor::ones(bytes / size_of::<f32>(), DType::F32, &Device::Cpu)?;
        let there_and_back = Case::new(|| {
            // The file takes a tensor that nobody else holds.
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
        ranks: usize,
        options: &LaunchOptions,
        device: DeviceKind,
    ) -> Result<Option<LinkRates>, Failure> {
        if ranks == 1 {
            return Ok(None);
        }
        let Args { mib, repeats, .. } = *self.args;
        let mut threads = Ranks::threads();
        let (few, many) = (
            figures_of(FEW, &mut threads, ranks, options, device, repeats)?,
            figures(&mut threads, ranks, options, device, mib, repeats)?,
        );
        link_of(&few, &many).map(Some).or_run()
    }
}

/// A link by what collectives of few and of many elements took.
fn link_of(few: &[Figure], many: &[Figure]) -> Result<LinkRates> {
    let is_collective = |figure: &&Figure| figure.name() != "copy";
    let latencies: Vec<f64> = few.iter().filter(is_collective).map(Figure::seconds).collect();
    let rate = |name: &str| {
        let figure = many.iter().find(|figure| figure.name() == name);
        let rate = figure.map(Figure::rate).filter(|rate| rate.is_finite() && *rate > 0.0);
        Ok::<_, anyhow::Error>(1e9 * rate.with_context(|| format!("no rate of {name} was measured"))?)
    };
    Ok(LinkRates {
        latency_seconds: Some(median(&latencies))
            .filter(|seconds| seconds.is_finite())
            .context("no latency was measured")?,
        all_to_all_bytes_per_second: rate("all_to_all")?,
        all_reduce_bytes_per_second: rate("all_reduce")?,
        reduce_scatter_bytes_per_second: rate("reduce_scatter")?,
        all_gather_bytes_per_second: rate("all_gather")?,
    })
}

/// The operations of a layer that go through memory once: a copy, norms and SwiGLU with their gradients.
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

    /// Each with the bytes that it reads and writes.
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
    fn a_figure_that_was_not_measured_is_an_error_that_names_it() {
        let link = link_of(&figures(1e-6), &figures(1e-3)).unwrap();
        assert_eq!(link.latency_seconds, 1e-6);
        assert!((link.all_gather_bytes_per_second / 2e9 - 1.0).abs() < 1e-12, "{link:?}");
        for (index, missing) in COLLECTIVES.into_iter().enumerate() {
            let mut many = figures(1e-3);
            many.remove(index);
            let error = link_of(&figures(1e-6), &many).unwrap_err().to_string();
            assert_eq!(error, format!("no rate of {missing} was measured"));
            many.insert(index, Figure::new(missing, vec![0.0], 2e6));
            link_of(&figures(1e-6), &many).unwrap_err();
        }
        assert_eq!(link_of(&[], &figures(1e-3)).unwrap_err().to_string(), "no latency was measured");
    }
}
