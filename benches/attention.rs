//! Attention's arithmetic rate, forward and backward, beside the matrix-product rate of the same run.
//!
//! `cargo bench --bench attention -- [seq_len] [num_heads] [head_dim] [threads] [repeats]` (default 4096 8 64 1 7).

use candle_core::{Device, Tensor};
use std::time::Instant;
use ulysses::ops::attention::{Geometry, Gradients, Operands, Upstream, backward, delta, forward};

fn main() -> anyhow::Result<()> {
    let arguments: Vec<usize> =
        std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let argument = |index: usize, default: usize| arguments.get(index).copied().unwrap_or(default);
    let case = Case {
        seq_len: argument(0, 4096),
        num_heads: argument(1, 8),
        head_dim: argument(2, 64),
        threads: argument(3, 1),
        repeats: argument(4, 7),
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(case.threads).build()?;
    pool.install(|| run(&case))
}

struct Case {
    seq_len: usize,
    num_heads: usize,
    head_dim: usize,
    threads: usize,
    repeats: usize,
}

fn run(case: &Case) -> anyhow::Result<()> {
    let &Case { seq_len, num_heads, head_dim, threads, repeats } = case;
    let random = || Tensor::randn(0f32, 1.0, (1, seq_len, num_heads, head_dim), &Device::Cpu);
    let (q, k, v, dout) = (random()?, random()?, random()?, random()?);
    let (o, dq, dk, dv) = (q.zeros_like()?, q.zeros_like()?, k.zeros_like()?, v.zeros_like()?);
    let lse = Tensor::zeros((1, num_heads, seq_len), q.dtype(), q.device())?;
    let row_terms = lse.zeros_like()?;
    let geometry = Geometry::causal(1, u32::try_from(seq_len)?, (0..num_heads).collect::<Vec<_>>())?;
    let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
    let operands = Operands { q: &q, k: &k, v: &v, scale, geometry: &geometry };
    let upstream = Upstream { dout: &dout, lse: &lse, delta: &row_terms };
    let gradients = Gradients { dq: &dq, dk: &dk, dv: &dv };

    let mut best = [f64::INFINITY; 4];
    for _ in 0..repeats {
        best[0] = best[0].min(gemm_seconds_per_flop(threads));
        best[1] = best[1].min(seconds(|| forward(&operands, &o, &lse))?);
        best[2] = best[2].min(seconds(|| delta(&o, &dout, &row_terms))?);
        best[3] = best[3].min(seconds(|| backward(&operands, &upstream, &gradients))?);
    }
    let pairs = geometry.num_visible_pairs() as f64 * num_heads as f64;
    let peak = 1e-9 / best[0];
    println!(
        "causal, seq_len {seq_len}, {num_heads} heads of {head_dim}, f32, {threads} thread(s), best of {repeats}"
    );
    println!("gemm 1024^3  {peak:7.1} GFLOP/s");
    for (name, seconds, flops) in [("forward", best[1], 4.0 * pairs), ("backward", best[3], 10.0 * pairs)] {
        let rate = flops * head_dim as f64 / seconds * 1e-9;
        println!("{name:<12} {rate:7.1} GFLOP/s  {:8.2} ms  {:.2} of gemm", seconds * 1e3, rate / peak);
    }
    println!("delta        {:27.2} ms", best[2] * 1e3);
    Ok(())
}

fn seconds<E>(work: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// What the machine gives to a plain square product with the same crate and number of threads.
fn gemm_seconds_per_flop(threads: usize) -> f64 {
    const N: usize = 1024;
    let (a, b, mut c) = (vec![1f32; N * N], vec![1f32; N * N], vec![0f32; N * N]);
    let parallelism = if threads > 1 { gemm::Parallelism::Rayon(threads) } else { gemm::Parallelism::None };
    let start = Instant::now();
    // SAFETY: all three are N x N, row-major.
    unsafe {
        let (row, col) = (N as isize, 1);
        let (c, a, b) = (c.as_mut_ptr(), a.as_ptr(), b.as_ptr());
        gemm::gemm(
            N,
            N,
            N,
            c,
            col,
            row,
            false,
            a,
            col,
            row,
            b,
            col,
            row,
            0f32,
            1f32,
            false,
            false,
            false,
            parallelism,
        );
    }
    let seconds = start.elapsed().as_secs_f64();
    std::hint::black_box(&c);
    seconds / (2.0 * (N * N * N) as f64)
}
