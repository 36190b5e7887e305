//! What the ops' tests share.

use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Row counts and widths that meet every remainder of the vector widths.
pub(super) const SHAPES: [(usize, usize); 7] = [(1, 1), (3, 1), (1, 7), (5, 7), (4, 64), (3, 100), (17, 131)];

/// Uniform in [−2, 2).
pub(super) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-2.0..2.0)).collect()
}

/// A tensor of `data` that begins in the middle of a larger buffer, at an odd offset.
pub(super) fn tensor(data: &[f32], shape: &[usize]) -> Tensor {
    let mut padded = vec![f32::NAN; 3];
    padded.extend_from_slice(data);
    padded.extend_from_slice(&[f32::NAN; 2]);
    let flat = Tensor::from_vec(padded, data.len() + 5, &Device::Cpu).unwrap();
    flat.narrow(0, 3, data.len()).unwrap().reshape(shape).unwrap()
}

/// An output whose old content must not matter: NaN throughout.
pub(super) fn output(shape: &[usize]) -> Tensor {
    tensor(&vec![f32::NAN; shape.iter().product()], shape)
}

pub(super) fn read(tensor: &Tensor) -> Vec<f32> {
    crate::tensor::to_vec(tensor).unwrap()
}

pub(super) fn to_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// Every element within `relative` of its own expected value plus `relative` of the largest one: a sum of
/// terms that cancel is only as exact as its terms.
#[track_caller]
pub(super) fn assert_close(what: &str, got: &[f32], expected: &[f64], relative: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    let largest = expected.iter().fold(0.0f64, |max, e| max.max(e.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        let allowed = relative * (expected.abs() + largest);
        assert!(
            error <= allowed,
            "{what}[{i}]: got {got}, expected {expected}, error {error:e} > {allowed:e}"
        );
    }
}

/// The gradient of `f` at `x` must equal `gradient`, by central differences in f64.
#[track_caller]
pub(super) fn assert_gradient(what: &str, f: impl Fn(&[f64]) -> f64, x: &[f64], gradient: &[f64]) {
    const STEP: f64 = 1e-5;
    assert_eq!(x.len(), gradient.len(), "{what}: length");
    let largest = gradient.iter().fold(1e-3f64, |max, g| max.max(g.abs()));
    let mut at = x.to_vec();
    for i in 0..x.len() {
        at[i] = x[i] + STEP;
        let above = f(&at);
        at[i] = x[i] - STEP;
        let below = f(&at);
        at[i] = x[i];
        let numeric = (above - below) / (2.0 * STEP);
        let error = (numeric - gradient[i]).abs();
        assert!(error <= 1e-7 * largest, "{what}[{i}]: numeric {numeric}, analytic {}", gradient[i]);
    }
}

/// Σ cotangent · values: turns an op with many outputs into a function with one.
pub(super) fn weighted_sum(values: &[f64], cotangent: &[f64]) -> f64 {
    values.iter().zip(cotangent).map(|(v, c)| v * c).sum()
}

/// `run` in rayon pools of 1, 2 and 3 threads must return the same bits.
#[track_caller]
pub(super) fn assert_same_for_any_thread_count<T: PartialEq + std::fmt::Debug + Send>(
    run: impl Fn() -> T + Sync,
) {
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&run)
    };
    let expected = with(1);
    for threads in [2, 3] {
        assert!(with(threads) == expected, "{threads} threads differ from 1");
    }
}

/// A tensor that no kernel exists for.
pub(super) fn wrong_dtype(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F64, &Device::Cpu).unwrap()
}
