//! What ops on 16-bit tensors hold beside them: a tile or a piece in f32, never a copy of the whole. Their results are
//! those of whole copies, to the bit.

#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Tensor};
use std::alloc::System;
use ulysses::memory::{CountingAllocator, PeakMeter};
use ulysses::ops::cross_entropy::{self, IGNORED, Labels};
use ulysses::ops::{Workspace, reduce};
use ulysses::tensor::{TensorOptions, to_vec};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);

const TOKENS: usize = 4096;
const HIDDEN: usize = 64;
const VOCAB: usize = 96;
const TILE: usize = 100;

/// Bytes of a copy of the tokens in f32.
const WIDENED: u64 = (TOKENS * HIDDEN * size_of::<f32>()) as u64;

/// Repeatable numbers between −1 and 1, as the element type rounds them.
fn numbers(rows: usize, cols: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> =
        (0..rows * cols).map(|i| ((i * 2_654_435_761) % 2003) as f32 / 1001.5 - 1.0).collect();
    Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Loss, logsumexp, dx in f32 and dweight; and the most that forward and backward hold beside the tensors.
struct Run {
    bits: (u64, Vec<f32>, Vec<f32>, Vec<f32>),
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
    let loss = cross_entropy::forward(x, weight, &labels, TILE, &lse, &workspace).unwrap();
    let forward = meter.bytes();
    workspace.clear();
    let meter = PeakMeter::start();
    cross_entropy::backward(x, weight, &labels, &lse, 0.25, &dx, &dweight, TILE, &workspace).unwrap();
    let backward = meter.bytes();
    let wide = |tensor: &Tensor| to_vec::<f32>(&tensor.to_dtype(DType::F32).unwrap()).unwrap();
    let sum = loss.sum().unwrap().sum.to_bits();
    Run { bits: (sum, wide(&lse), wide(&dx), wide(&dweight)), peaks: [forward, backward] }
}

#[test]
fn the_loss_of_a_long_row_widens_a_tile_and_gives_the_bits_of_the_whole() {
    // The first products make room for the panels that threads keep.
    run(&numbers(TOKENS, HIDDEN, DType::F32), &numbers(VOCAB, HIDDEN, DType::F32));
    for dtype in [DType::BF16, DType::F16] {
        let (x, weight) = (numbers(TOKENS, HIDDEN, dtype), numbers(VOCAB, HIDDEN, dtype));
        let narrow = run(&x, &weight);
        let wide = run(&x.to_dtype(DType::F32).unwrap(), &weight.to_dtype(DType::F32).unwrap());
        let (sum, lse, dx, dweight) = wide.bits;
        let dx = Tensor::from_vec(dx, TOKENS * HIDDEN, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let dx = to_vec::<f32>(&dx.to_dtype(DType::F32).unwrap()).unwrap();
        assert!(narrow.bits == (sum, lse, dx, dweight), "{dtype:?}: other bits");

        // Beside what f32 takes: the weight, a tile of tokens and, backward, a tile of their gradient.
        let f32 = size_of::<f32>() as u64;
        let (weight, tile) = ((VOCAB * HIDDEN) as u64 * f32, (TILE * HIDDEN) as u64 * f32);
        for ((peak, of_f32), tiles) in narrow.peaks.into_iter().zip(wide.peaks).zip([1, 2]) {
            let (more, expected) = (peak - of_f32, weight + tiles * tile);
            assert!(more.abs_diff(expected) < 4096, "{dtype:?}: {more} more than f32 takes, not {expected}");
            assert!(more < WIDENED / 2);
        }
    }
}

#[test]
fn sums_scales_and_checks_widen_a_piece_and_give_the_bits_of_the_whole() {
    for dtype in [DType::BF16, DType::F16] {
        let x = numbers(TOKENS, HIDDEN, dtype);
        let wide = x.to_dtype(DType::F32).unwrap();
        let meter = PeakMeter::start();
        let sum = reduce::sum_of_squares(&x).unwrap();
        assert!(reduce::all_finite(&x).unwrap());
        reduce::scale(&x, 0.7).unwrap();
        let peak = meter.bytes();
        assert!(peak < WIDENED / 4, "{dtype:?}: {peak} bytes beside a tensor that is {WIDENED} in f32");
        assert_eq!(sum.to_bits(), reduce::sum_of_squares(&wide).unwrap().to_bits(), "{dtype:?}");
        reduce::scale(&wide, 0.7).unwrap();
        let rounded = wide.to_dtype(dtype).unwrap();
        let bits =
            |tensor: &Tensor| to_vec::<f32>(&tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap());
        assert_eq!(bits(&x).unwrap(), bits(&rounded).unwrap(), "{dtype:?}");
    }
}
