//! Working memory of ops on 16-bit tensors: at most that of f32, or a piece, never a copy of the whole.
//! Results equal those of whole copies bit for bit, except for the order of summation in matmuls.

use candle_core::{DType, Device, Tensor};
use ulysses::kernels::lm_head_loss::{self, IGNORED, Labels};
use ulysses::kernels::{Workspace, elementwise};
use ulysses::memory::PeakMeter;
use ulysses::tensor::{TensorOptions, to_vec};

const TOKENS: usize = 4096;
const HIDDEN: usize = 64;
const VOCAB: usize = 96;
const TILE: usize = 100;

/// Bytes of a copy of the tokens in f32.
const WIDENED: u64 = (TOKENS * HIDDEN * size_of::<f32>()) as u64;

/// Repeatable values between −1 and 1 that every element type represents exactly, and whose sums of products
/// f32 represents exactly, in any order.
fn numbers(rows: usize, cols: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> =
        (0..rows * cols).map(|i| ((i * 2_654_435_761) % 129) as f32 / 64.0 - 1.0).collect();
    Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Loss and logsumexp; dx in f32 and dweight; and the peak memory of forward and backward in addition to the
/// tensors.
struct Run {
    loss: (u64, Vec<f32>),
    dx: Vec<f32>,
    dweight: Vec<f32>,
    peaks: [u64; 2],
}

fn run(x: &Tensor, weight: &Tensor) -> Run {
    let dtype = x.dtype();
    let workspace = Workspace::with_options(TensorOptions { dtype, ..TensorOptions::default() });
    let zeros = |rows, cols, dtype| Tensor::zeros((rows, cols), dtype, &Device::Cpu).unwrap();
    let (lse, dx) = (zeros(TOKENS, 1, DType::F32), zeros(TOKENS, HIDDEN, dtype));
    let lse = lse.flatten_all().unwrap();
    let dweight = zeros(VOCAB, HIDDEN, DType::F32);
    // Some tokens, and one whole tile, without a label.
    let ignored = |token: usize| token % 7 == 3 || token / TILE == 2;
    let labels = (0..TOKENS).map(|token| if ignored(token) { IGNORED } else { (token % VOCAB) as i64 });
    let labels = Labels::new(labels.collect::<Vec<_>>());
    let meter = PeakMeter::start();
    let operands = lm_head_loss::Operands::new(x, weight, &labels);
    let loss = lm_head_loss::forward(&operands, TILE, &lse, &workspace).unwrap();
    let forward = meter.bytes();
    workspace.clear();
    let meter = PeakMeter::start();
    let into = lm_head_loss::Gradients::new(&dx, &dweight);
    lm_head_loss::backward(&operands, &lse, 0.25, &into, TILE, &workspace).unwrap();
    let backward = meter.bytes();
    let wide = |tensor: &Tensor| to_vec::<f32>(&tensor.to_dtype(DType::F32).unwrap()).unwrap();
    let loss = (loss.sum().unwrap().sum.to_bits(), wide(&lse));
    Run { loss, dx: wide(&dx), dweight: wide(&dweight), peaks: [forward, backward] }
}

/// The largest difference, relative to the largest element.
fn error(got: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let differences = got.iter().zip(expected).map(|(got, expected)| (got - expected).abs());
    differences.fold(0.0, f32::max) / largest
}

#[test]
fn the_loss_of_a_long_sequence_needs_no_more_memory_than_in_f32_and_is_the_same() {
    for (dtype, rounding) in [(DType::BF16, 2_f32.powi(-8)), (DType::F16, 2_f32.powi(-11))] {
        let (x, weight) = (numbers(TOKENS, HIDDEN, dtype), numbers(VOCAB, HIDDEN, dtype));
        let (wide_x, wide_weight) = (x.to_dtype(DType::F32).unwrap(), weight.to_dtype(DType::F32).unwrap());
        // The first matmuls allocate the memory that threads keep.
        run(&x, &weight);
        run(&wide_x, &wide_weight);
        let (narrow, wide) = (run(&x, &weight), run(&wide_x, &wide_weight));
        assert!(narrow.loss == wide.loss, "{dtype:?}: other bits");
        let [dx, dweight] = [error(&narrow.dx, &wide.dx), error(&narrow.dweight, &wide.dweight)];
        assert!(dx <= rounding + 1e-6 && dweight <= 1e-6, "{dtype:?}: dx {dx:e}, dweight {dweight:e}");
        // A tile of logits and little more: neither the weight nor a tile of tokens in f32.
        let logits = (TILE * VOCAB * size_of::<f32>()) as u64;
        for (peak, of_f32) in narrow.peaks.into_iter().zip(wide.peaks) {
            assert!(peak <= logits + 8192, "{dtype:?}: {peak} bytes next to logits of {logits}");
            assert!(peak <= of_f32 + 4096, "{dtype:?}: {peak} bytes, in f32 {of_f32}");
        }
    }
}

#[test]
fn sums_scales_and_checks_convert_by_pieces_and_give_the_same_bits() {
    for dtype in [DType::BF16, DType::F16] {
        let x = numbers(TOKENS, HIDDEN, dtype);
        let wide = x.to_dtype(DType::F32).unwrap();
        let meter = PeakMeter::start();
        let sum = elementwise::sum_of_squares(&x).unwrap();
        assert!(elementwise::all_finite(&x).unwrap());
        elementwise::scale(&x, 0.7).unwrap();
        let peak = meter.bytes();
        assert!(peak < WIDENED / 4, "{dtype:?}: {peak} bytes next to a tensor that is {WIDENED} in f32");
        assert_eq!(sum.to_bits(), elementwise::sum_of_squares(&wide).unwrap().to_bits(), "{dtype:?}");
        elementwise::scale(&wide, 0.7).unwrap();
        let rounded = wide.to_dtype(dtype).unwrap();
        let bits =
            |tensor: &Tensor| to_vec::<f32>(&tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap());
        assert_eq!(bits(&x).unwrap(), bits(&rounded).unwrap(), "{dtype:?}");
    }
}
