//! Helpers shared by the ops' tests.

use crate::device::DeviceKind;
#[cfg(feature = "cuda")]
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cell::{Cell, RefCell};

/// Row counts and widths that cover every remainder of the vector widths.
pub(super) const SHAPES: [(usize, usize); 7] = [(1, 1), (3, 1), (1, 7), (5, 7), (4, 64), (3, 100), (17, 131)];

/// Uniform in [−2, 2).
pub(super) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-2.0..2.0)).collect()
}

thread_local! {
    /// Number of NaN elements before and after those of a test's tensor.
    static PADDING: Cell<(usize, usize)> = const { Cell::new(ODD) };

    /// Device of the tests' tensors.
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// An odd offset, at which kernels must not access 16 bytes at once.
const ODD: (usize, usize) = (3, 2);

/// A multiple of 16 bytes for every element type.
const ALIGNED: (usize, usize) = (8, 2);

/// A tensor of `data` in the middle of a larger buffer, at an odd offset except in [`at_every_alignment`].
pub(super) fn tensor(data: &[f32], shape: &[usize]) -> Tensor {
    in_a_buffer(DType::F32, data).reshape(shape).unwrap()
}

/// Device of the tests' tensors.
pub(super) fn device() -> Device {
    DEVICE.with_borrow(Device::clone)
}

/// `data`, rounded to `dtype`, in the middle of a larger buffer of NaN.
fn in_a_buffer(dtype: DType, data: &[f32]) -> Tensor {
    let (before, after) = PADDING.get();
    let mut padded = vec![f32::NAN; before];
    padded.extend_from_slice(data);
    padded.resize(padded.len() + after, f32::NAN);
    let len = padded.len();
    let flat = Tensor::from_vec(padded, len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    flat.to_device(&device()).unwrap().narrow(0, before, data.len()).unwrap()
}

/// An output whose old content must not matter: all NaN.
pub(super) fn output(shape: &[usize]) -> Tensor {
    tensor(&vec![f32::NAN; shape.iter().product()], shape)
}

/// Returns a tensor's elements, after checking that nothing was written around them.
#[track_caller]
pub(super) fn read(tensor: &Tensor) -> Vec<f32> {
    let on_the_host = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let elements: Vec<f32> = crate::tensor::to_vec(&on_the_host).unwrap();
    let (storage, _) = tensor.storage_and_layout();
    let storage = match &*storage {
        Storage::Cpu(storage) => storage.clone(),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => storage.to_cpu_storage().unwrap(),
        _ => panic!("a tensor on the CPU or a GPU"),
    };
    let whole: Vec<f32> = match storage {
        CpuStorage::F32(whole) => whole,
        CpuStorage::BF16(whole) => whole.iter().map(|x| x.to_f32()).collect(),
        CpuStorage::F16(whole) => whole.iter().map(|x| x.to_f32()).collect(),
        other => panic!("{other:?}"),
    };
    let (before, after) = PADDING.get();
    if whole.len() == before + elements.len() + after {
        let padding = whole[..before].iter().chain(&whole[whole.len() - after..]);
        assert!(padding.copied().all(f32::is_nan), "written outside of the tensor");
    }
    elements
}

/// Returns whether the tests are for a GPU: with `ULYSSES_TEST_DEVICE=cuda`.
pub(super) fn is_for_a_gpu() -> bool {
    std::env::var("ULYSSES_TEST_DEVICE").is_ok_and(|device| device == "cuda")
}

/// Runs `run` with the tests' tensors on a GPU. A test that has no other target is named `on_a_gpu`.
#[track_caller]
pub(super) fn on_a_gpu<R>(run: impl FnOnce() -> R) -> R {
    assert!(
        is_for_a_gpu(),
        "a test of GPUs: set ULYSSES_TEST_DEVICE=cuda, or leave it out with `--skip on_a_gpu --skip on_the_fake_driver`"
    );
    DEVICE.set(DeviceKind::Cuda.open().expect("a GPU, as ULYSSES_TEST_DEVICE asks for"));
    let output = run();
    DEVICE.set(Device::Cpu);
    output
}

/// Runs a test with every instruction set of the CPU; or on a GPU, with tensors at every alignment.
pub(super) fn on_every_target(run: impl Fn(&str)) {
    if is_for_a_gpu() {
        on_a_gpu(|| at_every_alignment(|alignment| run(&format!("cuda, {alignment}"))));
    } else {
        crate::simd::at_every_level(|level| run(&format!("{level:?}")));
    }
}

/// As [`on_every_target`], on the CPU in a pool of one thread, which computes all of it.
pub(super) fn on_every_target_in_one_thread(run: impl Fn(&str) + Send + Sync) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    if is_for_a_gpu() { on_every_target(run) } else { pool.install(|| on_every_target(run)) }
}

/// Runs a test with tensors aligned to 16 bytes, and again with tensors at odd offsets.
pub(super) fn at_every_alignment(run: impl Fn(&str)) {
    for (padding, alignment) in [(ALIGNED, "aligned"), (ODD, "not aligned")] {
        PADDING.set(padding);
        run(alignment);
    }
}

/// Runs a test on a GPU for every element type and alignment, with the relative error of one rounding.
#[cfg(feature = "cuda")]
pub(super) fn for_every_dtype(run: impl Fn(DType, f64)) {
    on_a_gpu(|| {
        for (dtype, bits) in [(DType::F32, 24), (DType::BF16, 8), (DType::F16, 11)] {
            at_every_alignment(|_| run(dtype, f64::from(bits).exp2().recip()));
        }
    });
}

/// Runs `run` on a GPU, on f32 tensors of `data` that begin at a 16-byte boundary and on others. Both must give the same
/// bits and leave their surroundings unchanged. The surroundings are finite here, because an in-place update of NaN stays
/// NaN.
#[cfg(feature = "cuda")]
#[track_caller]
pub(super) fn assert_same_at_any_alignment(data: &[Vec<f32>], run: impl Fn(&[Tensor])) {
    const AROUND: f32 = 7.0;
    let place = |data: &Vec<f32>, offset: usize| {
        let around = |len| std::iter::repeat_n(AROUND, len);
        let elements: Vec<f32> = around(offset).chain(data.iter().copied()).chain(around(5)).collect();
        let flat = Tensor::from_slice(&elements, elements.len(), &device()).unwrap();
        let tensor = flat.narrow(0, offset, data.len()).unwrap();
        (flat, tensor)
    };
    let bits_at = |offset: usize| -> Vec<Vec<f32>> {
        let (flats, tensors): (Vec<_>, Vec<_>) = data.iter().map(|data| place(data, offset)).unzip();
        run(&tensors);
        for (flat, data) in flats.iter().zip(data) {
            let flat = flat.to_vec1::<f32>().unwrap();
            let around = flat[..offset].iter().chain(&flat[offset + data.len()..]);
            assert!(around.copied().all(|x| x == AROUND), "written outside of the tensor, offset {offset}");
        }
        tensors.iter().map(|tensor| tensor.to_vec1().unwrap()).collect()
    };
    on_a_gpu(|| {
        let aligned = bits_at(4);
        for offset in 5..8 {
            assert!(bits_at(offset) == aligned, "{offset} elements after a boundary give other bits");
        }
    });
}

/// As [`tensor`], with an element type; also returns the elements after rounding to it.
pub(super) fn rounded(dtype: DType, data: &[f32], shape: &[usize]) -> (Tensor, Vec<f64>) {
    let tensor = in_a_buffer(dtype, data).reshape(shape).unwrap();
    let values = to_f64(&read(&tensor));
    (tensor, values)
}

pub(super) fn to_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// Checks that every element is within `relative` of its expected value plus `relative` of the largest one: a
/// sum whose terms cancel is only as accurate as its terms.
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

/// Checks that `gradient` is the gradient of `f` at `x`, by central differences in f64.
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

/// Checks that `run` returns the same bits in rayon pools of 1, 2 and 3 threads.
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

/// A tensor of a type without kernels.
pub(super) fn wrong_dtype(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F64, &Device::Cpu).unwrap()
}
