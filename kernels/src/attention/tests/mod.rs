//! Test cases that the tests share, and comparisons of outputs.

mod merge;
#[cfg(feature = "cuda")]
mod on_a_gpu;
mod parity;
mod precision;
mod properties;

use super::{
    Attention, AttentionError, AttentionKernels, AttentionLayout, FlashAttention, Gradients, Logits,
    Operands, Upstream, backward, blocks::Rectangle, delta, forward, reference,
};
use crate::OpError;
use crate::tensor::to_vec;
use crate::testing::{self, read};
use candle_core::{DType, Device, Tensor};

type Result<T> = std::result::Result<T, AttentionError>;

/// Uniform in -1..1, deterministic in the seed.
fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn tensor(data: Vec<f32>, shape: [usize; 4]) -> Result<Tensor> {
    Ok(Tensor::from_vec(data, &shape, &testing::device())?)
}

/// Runs a test on the CPU, or on a GPU with tensors at every alignment.
fn on_every_target(run: impl Fn(&str) -> Result<()>) -> Result<()> {
    if !testing::is_for_a_gpu() {
        return run("CPU");
    }
    testing::on_a_gpu(|| testing::at_every_alignment(|alignment| run(alignment).expect("operands fit")));
    Ok(())
}

/// An output with `like`'s shape and element type, all NaN, at an odd offset if `like` is at one.
fn dirty(like: &Tensor) -> Result<Tensor> {
    let (_, layout) = like.storage_and_layout();
    Ok(match like.dtype() {
        DType::F32 => testing::output(like.dims()),
        dtype if layout.start_offset() > 0 => {
            testing::rounded(dtype, &vec![f32::NAN; like.elem_count()], like.dims()).0
        }
        dtype => {
            Tensor::full(f32::NAN, layout.shape(), &Device::Cpu)?.to_dtype(dtype)?.to_device(like.device())?
        }
    })
}

/// Inputs of both directions, in f32 at odd offsets. Values beyond 1 make the softmax peaked, so that its
/// running maximum changes.
#[derive(Clone)]
struct Case {
    layout: AttentionLayout,
    /// On a GPU.
    kernels: AttentionKernels,
    num_kv_heads: usize,
    head_dim: usize,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
}

/// `[o, lse, dq, dk, dv]`
type Outputs = [Vec<f32>; 5];
const NAMES: [&str; 5] = ["o", "lse", "dq", "dk", "dv"];

impl Case {
    fn new(layout: AttentionLayout, num_kv_heads: usize, head_dim: usize) -> Result<Self> {
        let (b, hq) = (layout.batch(), layout.q_to_kv().len());
        let q_shape = [b, layout.q_positions().len(), hq, head_dim];
        let kv_shape = [b, layout.kv_positions().len(), num_kv_heads, head_dim];
        let draw = |seed, factor: f32, shape: [usize; 4]| {
            let data: Vec<f32> = random(seed, shape.iter().product());
            testing::tensor(&data.into_iter().map(|x| factor * x).collect::<Vec<_>>(), &shape)
        };
        let (q, k) = (draw(1, 4.0, q_shape), draw(2, 2.0, kv_shape));
        let (v, dout) = (draw(3, 1.0, kv_shape), draw(4, 1.0, q_shape));
        Ok(Self { layout, kernels: AttentionKernels::Tiled, num_kv_heads, head_dim, q, k, v, dout })
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    fn operands(&self) -> Operands<'_> {
        Operands {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            scale: self.scale(),
            layout: &self.layout,
            kernels: self.kernels,
        }
    }

    /// Runs the ops.
    fn run(&self) -> Result<Outputs> {
        self.run_with(
            |o, lse| forward(&self.operands(), o, lse),
            |upstream, gradients| backward(&self.operands(), upstream, gradients),
        )
    }

    /// Runs both directions on outputs that contain NaN.
    fn run_with(
        &self,
        forward: impl Fn(&Tensor, &Tensor) -> Result<()>,
        backward: impl Fn(&Upstream<'_>, &Gradients<'_>) -> Result<()>,
    ) -> Result<Outputs> {
        let (b, sq, hq, _) = self.q.dims4()?;
        let (o, lse) = (dirty(&self.q)?, testing::output(&[b, hq, sq]));
        forward(&o, &lse)?;
        let row_terms = dirty(&lse)?;
        delta(&o, &self.dout, &row_terms)?;
        let (dq, dk, dv) = (dirty(&self.q)?, dirty(&self.k)?, dirty(&self.v)?);
        let upstream = Upstream { dout: &self.dout, lse: &lse, delta: &row_terms };
        backward(&upstream, &Gradients { dq: &dq, dk: &dk, dv: &dv })?;
        Ok([&o, &lse, &dq, &dk, &dv].map(read))
    }

    fn run_with_threads(&self, num_threads: usize) -> Result<Outputs> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build();
        pool.map_err(AttentionError::other)?.install(|| self.run())
    }

    fn reference<T: reference::Real>(&self) -> Result<[Vec<T>; 5]> {
        let numbers = |tensor| -> Vec<T> { read(tensor).into_iter().map(T::from).collect() };
        let (q, k, v) = (numbers(&self.q), numbers(&self.k), numbers(&self.v));
        let problem = reference::Problem {
            q: &q,
            k: &k,
            v: &v,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            scale: T::from(self.scale()),
            layout: &self.layout,
        };
        let (o, lse) = reference::forward(&problem);
        let (dq, dk, dv) = reference::backward(&problem, &numbers(&self.dout));
        Ok([o, lse, dq, dk, dv])
    }

    fn check(&self, name: &str) -> Result<()> {
        self.check_within(2e-6, name)
    }

    /// Checks that the error of each output is at most `tolerance` of its largest element, or twice that of
    /// the naive f32 computation. Gradients are differences of terms of order 1, so smaller ones count as 1.
    fn check_within(&self, tolerance: f64, name: &str) -> Result<()> {
        self.check_outputs(&self.run()?, tolerance, name)
    }

    fn check_outputs(&self, got: &Outputs, tolerance: f64, name: &str) -> Result<()> {
        let (truth, naive) = (self.reference::<f64>()?, self.reference::<f32>()?);
        for (index, output) in NAMES.iter().enumerate() {
            let truth = &truth[index];
            let (error, naive) = (max_error(&got[index], truth), max_error(&naive[index], truth));
            let size = truth.iter().filter(|x| x.is_finite()).fold(1.0, |a: f64, b| a.max(b.abs()));
            assert!(
                error <= (tolerance * size).max(2.0 * naive),
                "{name}: {output} is off by {error:e}, the naive way by {naive:e}, of {size}"
            );
        }
        Ok(())
    }
}

/// The largest difference; equal infinities do not differ, and NaN differs infinitely.
fn max_error(got: &[f32], truth: &[f64]) -> f64 {
    assert_eq!(got.len(), truth.len());
    let difference = |(got, truth): (&f32, &f64)| match f64::from(*got) {
        got if got == *truth => 0.0,
        got if (got - truth).is_nan() => f64::INFINITY,
        got => (got - truth).abs(),
    };
    got.iter().zip(truth).map(difference).fold(0.0, f64::max)
}

fn bits(outputs: &Outputs) -> Vec<Vec<u32>> {
    outputs.iter().map(|output| output.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Whole sequences of packed documents.
fn packed(cu_seqlens: &[&[u32]], q_to_kv: &[usize], window: Option<usize>) -> Result<AttentionLayout> {
    let seq_len = cu_seqlens[0].last().copied().unwrap_or(0);
    let positions: Vec<u32> = (0..seq_len).collect();
    let rows: Vec<Vec<u32>> = cu_seqlens.iter().map(|row| row.to_vec()).collect();
    AttentionLayout::new(positions.clone(), positions, rows, q_to_kv, window)
}

fn causal(
    batch: usize,
    seq_len: u32,
    q_to_kv: &[usize],
    num_kv_heads: usize,
    head_dim: usize,
) -> Result<Case> {
    Case::new(AttentionLayout::causal(batch, seq_len, q_to_kv)?, num_kv_heads, head_dim)
}

/// Parts of two packed sequences of 700 tokens.
fn shards(q: impl IntoIterator<Item = u32>, kv: impl IntoIterator<Item = u32>) -> Result<AttentionLayout> {
    let (q, kv): (Vec<u32>, Vec<u32>) = (q.into_iter().collect(), kv.into_iter().collect());
    AttentionLayout::new(q, kv, vec![vec![0, 700], vec![0, 130, 410, 700]], vec![0, 1, 1], None)
}

/// Checks that rectangles contain each pair of the first sequence at most once, and the visible ones once.
pub(super) fn assert_covers_visible_pairs(
    layout: &AttentionLayout,
    rectangles: impl IntoIterator<Item = Rectangle>,
    case: &str,
) {
    let (num_queries, num_keys) = (layout.q_positions().len(), layout.kv_positions().len());
    let mut covered = vec![0u8; num_queries * num_keys];
    for Rectangle { queries, keys } in rectangles {
        for query in queries {
            covered[query * num_keys..][keys.clone()].iter_mut().for_each(|count| *count += 1);
        }
    }
    for (pair, count) in covered.into_iter().enumerate() {
        let (query, key) = (pair / num_keys, pair % num_keys);
        let visible = reference::is_visible(layout, 0, query, key);
        assert!(count <= 1 && (count == 1 || !visible), "{case}: ({query}, {key}) {count} times");
    }
}
