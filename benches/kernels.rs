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
use ulysses::kernels::optimizer::{ElementStep, Step, adamw::AdamParams};
use ulysses::kernels::rope::{self, Direction, Table};
use ulysses::kernels::{
    elementwise, embedding,
    glu::{self, Activation::Silu},
    rms_norm, strided_copy,
};

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

/// A measured op.
struct Figure {
    name: &'static str,
    gb_per_s: f64,
    ms: f64,
}

fn main() -> Result<()> {
    let options = Options::parse()?;
    let rows = (options.mib << 20) / (WIDTH * options.dtype.size_in_bytes());
    let figures = measure(rows, &options)?;
    let copy = figures[0].gb_per_s;
    let Options { device, dtype, mib, repeats, json } = options;
    if json {
        let ops = figures.iter().map(|Figure { name, gb_per_s, ms }| {
            json!({ "op": name, "gb_per_s": gb_per_s, "ms": ms, "share_of_copy": gb_per_s / copy })
        });
        let ops = ops.collect::<Vec<_>>();
        println!("{}", json!({ "dtype": dtype.as_str(), "mib": mib, "repeats": repeats, "ops": ops }));
        return Ok(());
    }
    println!("{rows} × {WIDTH} {} elements on {:?}, best of {repeats}", dtype.as_str(), device.location());
    for Figure { name, gb_per_s, ms } in &figures {
        let share = gb_per_s / copy;
        println!("{name:<20} {gb_per_s:8.1} GB/s  {ms:9.3} ms  {share:.2} of the copy's rate");
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

    /// Measures an op that reads and writes at least `bytes`: the fastest repeat counts.
    fn best<E>(&self, name: &'static str, bytes: usize, run: impl Fn() -> Result<(), E>) -> Result<Figure>
    where
        anyhow::Error: From<E>,
    {
        let mut best = f64::INFINITY;
        // The first repeat compiles kernels and touches new memory.
        for _ in 0..=self.repeats {
            self.device.synchronize()?;
            let start = Instant::now();
            run()?;
            self.device.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(Figure { name, gb_per_s: bytes as f64 / best * 1e-9, ms: best * 1e3 })
    }
}

fn device(name: &str) -> Result<Device> {
    Ok(match name {
        "cpu" => DeviceKind::Cpu.open()?,
        "cuda" => DeviceKind::Cuda.open()?,
        _ => bail!("--device is cpu or cuda, got {name}"),
    })
}

/// Measures the copy that the others are compared with, and the ops, on matrices of `rows × WIDTH`.
fn measure(rows: usize, options: &Options) -> Result<Vec<Figure>> {
    let Options { device, dtype, .. } = options;
    let matrix = || -> Result<Tensor> {
        Ok(Tensor::randn(0f32, 1.0, (rows, WIDTH), &Device::Cpu)?.to_device(device)?.to_dtype(*dtype)?)
    };
    let [a, b, c, d, e] = [matrix()?, matrix()?, matrix()?, matrix()?, matrix()?];
    let weight = Tensor::ones(WIDTH, *dtype, device)?;
    let dweight = Tensor::zeros(WIDTH, DType::F32, device)?;
    let rstd = Tensor::ones(rows, DType::F32, device)?;
    let heads = a.reshape((rows, WIDTH / HEAD_DIM, HEAD_DIM))?;
    let angles = Table::new(&(0..rows as u32).collect::<Vec<_>>(), HEAD_DIM, 10_000.0)?;
    let ids = embedding::Ids::new((0..rows).map(|row| (row * 7919 % VOCAB) as u32).collect::<Vec<_>>());
    let table = Tensor::ones((VOCAB, WIDTH), *dtype, device)?;
    let flat = || Tensor::ones(rows * WIDTH, DType::F32, device);
    let (param, grad, state) = (flat()?, flat()?, [flat()?, flat()?]);
    let bytes = rows * WIDTH * dtype.size_in_bytes();
    Ok(vec![
        options.best("copy", 2 * bytes, || strided_copy::copy(&b, &a))?,
        options.best("rms_norm", 2 * bytes, || rms_norm::forward(&a, &weight, 1e-5, &b, &rstd))?,
        options.best("rms_norm backward", 3 * bytes, || {
            rms_norm::backward(&a, &b, &weight, &rstd, &c, false, &dweight)
        })?,
        options.best("rope", 2 * bytes, || rope::apply(&heads, &angles, Direction::Forward))?,
        options.best("swiglu", 3 * bytes, || glu::forward(Silu, &a, &b, &c))?,
        options.best("swiglu backward", 5 * bytes, || glu::backward(Silu, &a, &b, &c, &d, &e))?,
        options.best("embedding", 2 * bytes, || embedding::forward(&ids, &table, &a))?,
        options.best("sum of squares", bytes, || elementwise::sum_of_squares(&a).map(drop))?,
        options.best("adamw (f32)", 7 * rows * WIDTH * size_of::<f32>(), || {
            ADAMW.apply(&param, &grad, &state)
        })?,
    ])
}

const ADAMW: AdamParams = AdamParams {
    step: Step { number: 1, lr: 1e-3, grad_scale: 1.0 },
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.01,
    decoupled: true,
    bias_correction: true,
};
