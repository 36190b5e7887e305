//! Fused ops, compared with a plain copy of the same bytes in the same run.
//!
//! `cargo bench --bench kernels -- [--device cpu|cuda] [--dtype f32|bf16|f16] [--mib 64] [--repeats 20] [--json]`
//!
//! An op that reads or writes each byte once can be as fast as a copy; the result is its share of the copy's rate.
//! On the CPU, 16-bit elements are converted to f32 and back.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::time::Instant;
use ulysses::device::DeviceKind;
use ulysses::kernels::optimizer::adamw::{self, AdamParams};
use ulysses::kernels::rope::{self, Direction, Table};
use ulysses::kernels::{elementwise, embedding, rms_norm, strided_copy, swiglu};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const WIDTH: usize = 4096;
const HEAD_DIM: usize = 128;
const VOCAB: usize = 32_000;

struct Options {
    device: Device,
    dtype: DType,
    mib: usize,
    repeats: usize,
    json: bool,
}

type Run<'a> = Box<dyn Fn() -> Result<()> + 'a>;

/// An op, and the minimum bytes that it reads and writes.
struct Case<'a> {
    name: &'static str,
    bytes: usize,
    run: Run<'a>,
}

impl<'a> Case<'a> {
    fn new(name: &'static str, bytes: usize, run: Run<'a>) -> Self {
        Self { name, bytes, run }
    }
}

fn main() -> Result<()> {
    let options = Options::parse()?;
    let rows = (options.mib << 20) / (WIDTH * options.dtype.size_in_bytes());
    let tensors = Tensors::new(rows, &options)?;
    let mut results = Vec::new();
    for case in tensors.cases() {
        let seconds = options.best(&case.run)?;
        results.push((case.name, case.bytes as f64 / seconds * 1e-9, seconds));
    }
    let copy = results[0].1;
    if options.json {
        let rate = |(name, rate, seconds): &(&str, f64, f64)| json!({ "op": name, "gb_per_s": rate, "ms": seconds * 1e3, "share_of_copy": rate / copy });
        let all: Vec<_> = results.iter().map(rate).collect();
        println!(
            "{}",
            json!({ "dtype": options.dtype.as_str(), "mib": options.mib, "repeats": options.repeats, "ops": all })
        );
        return Ok(());
    }
    println!(
        "{} × {WIDTH} {} elements on {:?}, best of {}",
        rows,
        options.dtype.as_str(),
        options.device.location(),
        options.repeats
    );
    for (name, rate, seconds) in &results {
        println!(
            "{name:<20} {rate:8.1} GB/s  {:9.3} ms  {:.2} of the copy's rate",
            seconds * 1e3,
            rate / copy
        );
    }
    Ok(())
}

impl Options {
    fn parse() -> Result<Self> {
        let mut options = Self { device: Device::Cpu, dtype: DType::F32, mib: 64, repeats: 20, json: false };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().unwrap_or_default();
            match argument.as_str() {
                "--device" => options.device = device(&value())?,
                "--dtype" => options.dtype = value().parse()?,
                "--mib" => options.mib = value().parse()?,
                "--repeats" => options.repeats = value().parse()?,
                "--json" => options.json = true,
                "--bench" => {} // from `cargo bench`
                other => bail!("unknown argument {other}"),
            }
        }
        Ok(options)
    }

    /// Returns the seconds of the fastest repeat.
    fn best(&self, run: &dyn Fn() -> Result<()>) -> Result<f64> {
        let mut best = f64::INFINITY;
        // The first repeat compiles kernels and touches new memory.
        for _ in 0..=self.repeats {
            self.device.synchronize()?;
            let start = Instant::now();
            run()?;
            self.device.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}

fn device(name: &str) -> Result<Device> {
    Ok(match name {
        "cpu" => DeviceKind::Cpu.open()?,
        "cuda" => DeviceKind::Cuda.open()?,
        _ => bail!("--device is cpu or cuda, got {name}"),
    })
}

/// The operands: matrices of `rows × WIDTH`, and vectors.
struct Tensors {
    rows: usize,
    matrices: [Tensor; 5],
    weight: Tensor,
    rstd: Tensor,
    dweight: Tensor,
    optimizer: [Tensor; 4],
    rope: Table,
    ids: embedding::Ids,
    table: Tensor,
}

impl Tensors {
    fn new(rows: usize, options: &Options) -> Result<Self> {
        let Options { device, dtype, .. } = options;
        let matrix = || -> Result<Tensor> {
            Ok(Tensor::randn(0f32, 1.0, (rows, WIDTH), &Device::Cpu)?.to_device(device)?.to_dtype(*dtype)?)
        };
        let flat = || Tensor::ones(rows * WIDTH, DType::F32, device);
        Ok(Self {
            rows,
            matrices: [matrix()?, matrix()?, matrix()?, matrix()?, matrix()?],
            weight: Tensor::ones(WIDTH, *dtype, device)?,
            rstd: Tensor::ones(rows, DType::F32, device)?,
            dweight: Tensor::zeros(WIDTH, DType::F32, device)?,
            optimizer: [flat()?, flat()?, flat()?, flat()?],
            rope: Table::new(&(0..rows as u32).collect::<Vec<_>>(), HEAD_DIM, 10_000.0)?,
            ids: embedding::Ids::new((0..rows).map(|row| (row * 7919 % VOCAB) as u32).collect::<Vec<_>>()),
            table: Tensor::ones((VOCAB, WIDTH), *dtype, device)?,
        })
    }

    /// Returns the cases, starting with the copy that the others are compared with.
    fn cases(&self) -> Vec<Case<'_>> {
        let [a, b, c, d, e] = &self.matrices;
        let matrix = a.elem_count() * a.dtype().size_in_bytes();
        let heads = (self.rows, WIDTH / HEAD_DIM, HEAD_DIM);
        let mut cases: Vec<Case<'_>> = vec![
            Case::new("copy", 2 * matrix, Box::new(|| Ok(strided_copy::copy(b, a)?))),
            Case::new(
                "rms_norm",
                2 * matrix,
                Box::new(|| Ok(rms_norm::forward(a, &self.weight, 1e-5, b, &self.rstd)?)),
            ),
            Case::new(
                "rms_norm backward",
                3 * matrix,
                Box::new(|| Ok(rms_norm::backward(a, b, &self.weight, &self.rstd, c, false, &self.dweight)?)),
            ),
            Case::new(
                "rope",
                2 * matrix,
                Box::new(move || Ok(rope::apply(&a.reshape(heads)?, &self.rope, Direction::Forward)?)),
            ),
            Case::new("swiglu", 3 * matrix, Box::new(|| Ok(swiglu::forward(a, b, c)?))),
            Case::new("swiglu backward", 5 * matrix, Box::new(|| Ok(swiglu::backward(a, b, c, d, e)?))),
            Case::new(
                "embedding",
                2 * matrix,
                Box::new(|| Ok(embedding::forward(&self.ids, &self.table, a)?)),
            ),
            Case::new("sum of squares", matrix, Box::new(|| Ok(elementwise::sum_of_squares(a).map(|_| ())?))),
        ];
        let [param, grad, exp_avg, exp_avg_sq] = &self.optimizer;
        cases.push(Case {
            name: "adamw (f32)",
            bytes: 7 * param.elem_count() * size_of::<f32>(),
            run: Box::new(|| Ok(adamw::step(param, grad, exp_avg, exp_avg_sq, &ADAMW)?)),
        });
        cases
    }
}

const ADAMW: AdamParams = AdamParams {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.01,
    decoupled: true,
    bias_correction: true,
    step: 1,
    grad_scale: 1.0,
};
