//! `mma`, `ldmatrix` and `cp.async`, against the tables of the PTX ISA and naive products.

use super::super::words;
use crate::device::cuda::fake_driver::{bank_conflicts, failure, in_order};
use crate::device::{DeviceError, sources};
use crate::tensor::to_vec;
use crate::testing::{device, on_a_gpu, random};
use candle_core::{DType, Device, Tensor};
use half::f16;

fn launch(
    name: &'static str,
    grid: [usize; 3],
    output: &Tensor,
    inputs: &[&Tensor],
    scalars: &[u32],
) -> Result<(), DeviceError> {
    super::super::launch((&sources::tests::MMA, name), grid, output, inputs, scalars)
}

/// 16-bit elements and their values.
pub(super) fn matrix(dtype: DType, data: &[f32], shape: &[usize]) -> (Tensor, Vec<f32>) {
    let tensor = Tensor::from_slice(data, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    let values = to_vec(&tensor.to_dtype(DType::F32).unwrap()).unwrap();
    (tensor.to_device(&device()).unwrap(), values)
}

/// Numbers that both element types store exactly, and of whose products all sums here are exact: a GPU truncates others.
pub(super) fn exact(seed: u64, len: usize) -> Vec<f32> {
    random(seed, len).into_iter().map(|x| (x * 64.0).round() / 64.0).collect()
}

/// c + a · b in f64.
pub(super) fn product(c: &[f32], a: &[f32], b: &[f32], [rows, depth, columns]: [usize; 3]) -> Vec<f32> {
    let element = |row: usize, column: usize| {
        let terms = (0..depth).map(|k| f64::from(a[row * depth + k]) * f64::from(b[k * columns + column]));
        (f64::from(c[row * columns + column]) + terms.sum::<f64>()) as f32
    };
    (0..rows * columns).map(|i| element(i / columns, i % columns)).collect()
}

const HALVES: [(DType, [&str; 3]); 2] = [
    (DType::BF16, ["test_mma_bf16", "test_matmul_bf16", "test_matmul_unswizzled_bf16"]),
    (DType::F16, ["test_mma_f16", "test_matmul_f16", "test_matmul_unswizzled_f16"]),
];

#[test]
fn mma_with_one_nonzero_element_of_each_operand_shows_every_position() {
    on_a_gpu(|| {
        // a[row][k] · b[k][column] = 1 in exactly one element of c, for every k.
        for (dtype, [mma, ..]) in HALVES {
            for k in 0..16 {
                let (row, column) = ((3 * k + 5) % 16, (5 * k + 2) % 8);
                let unit = |len: usize, at: usize| {
                    (0..len).map(|i| f32::from(u8::from(i == at))).collect::<Vec<_>>()
                };
                let (a, _) = matrix(dtype, &unit(256, row * 16 + k), &[16, 16]);
                let (b, _) = matrix(dtype, &unit(128, k * 8 + column), &[16, 8]);
                let c = Tensor::zeros((16, 8), DType::F32, &device()).unwrap();
                launch(mma, [1, 32, 0], &c, &[&a, &b], &[]).unwrap();
                assert_eq!(to_vec::<f32>(&c).unwrap(), unit(128, row * 8 + column), "{dtype:?}, k = {k}");
            }
        }
    });
}

#[test]
fn mma_adds_the_product_in_any_order_of_lanes() {
    on_a_gpu(|| {
        for (dtype, [mma, ..]) in HALVES {
            let (a, of_a) = matrix(dtype, &exact(1, 256), &[16, 16]);
            let (b, of_b) = matrix(dtype, &exact(2, 128), &[16, 8]);
            let of_c = exact(3, 128);
            for seed in 0..3 {
                let c = Tensor::from_slice(&of_c, (16, 8), &device()).unwrap();
                in_order(seed, || launch(mma, [1, 32, 0], &c, &[&a, &b], &[])).unwrap();
                let expected = product(&of_c, &of_a, &of_b, [16, 16, 8]);
                assert_eq!(to_vec::<f32>(&c).unwrap(), expected, "{dtype:?}, seed {seed}");
            }
        }
    });
}

/// Element (row, column) of matrix i is 64 · i + 8 · row + column, which f16 stores exactly.
#[test]
fn ldmatrix_gives_each_lane_the_elements_of_the_ptx_table() {
    on_a_gpu(|| {
        for (count, plain, transposed) in [
            (1, "test_ldmatrix_x1", "test_ldmatrix_x1_trans"),
            (2, "test_ldmatrix_x2", "test_ldmatrix_x2_trans"),
            (4, "test_ldmatrix_x4", "test_ldmatrix_x4_trans"),
        ] {
            let values: Vec<f32> = (0..64 * count).map(|i| i as f32).collect();
            let (matrices, _) = matrix(DType::F16, &values, &[count, 8, 8]);
            for (name, is_transposed) in [(plain, false), (transposed, true)] {
                let registers = words(vec![0; 32 * count]);
                launch(name, [1, 32, 128 * count], &registers, &[&matrices], &[]).unwrap();
                for (at, register) in to_vec::<u32>(&registers).unwrap().into_iter().enumerate() {
                    let (lane, matrix) = (at / count, at % count);
                    for half in 0..2 {
                        let (row, column) = (lane / 4, lane % 4 * 2 + half);
                        let (row, column) = if is_transposed { (column, row) } else { (row, column) };
                        let element = f16::from_bits((register >> (16 * half)) as u16).to_f32();
                        let expected = (64 * matrix + 8 * row + column) as f32;
                        assert_eq!(element, expected, "{name}: lane {lane}, register {matrix}, half {half}");
                    }
                }
            }
        }
    });
}

#[test]
fn cp_async_copies_and_fills_with_zeros() {
    on_a_gpu(|| {
        let input: Vec<u32> = (1..=128).collect();
        for (bytes, name) in [(4, "test_cp_async_4"), (8, "test_cp_async_8"), (16, "test_cp_async_16")] {
            let words_per_lane = bytes / 4;
            for source in (0..=words_per_lane).map(|words| 4 * words) {
                let out = words(vec![7; 32 * words_per_lane]);
                let from = words(input.clone());
                launch(name, [1, 32, 32 * bytes], &out, &[&from], &[source as u32]).unwrap();
                let copied =
                    |(i, word): (usize, &u32)| if i % words_per_lane < source / 4 { *word } else { 0 };
                let expected: Vec<_> =
                    input.iter().enumerate().take(32 * words_per_lane).map(copied).collect();
                assert_eq!(to_vec::<u32>(&out).unwrap(), expected, "{source} of {bytes} bytes");
            }
        }
    });
}

#[test]
fn cp_async_reads_only_the_source_bytes_on_the_fake_driver() {
    on_a_gpu(|| {
        let (out, from) = (words(vec![0; 128]), words((0..126).collect()));
        launch("test_cp_async_16", [1, 32, 512], &out, &[&from], &[8]).unwrap();
        let message = failure(|| launch("test_cp_async_16", [1, 32, 512], &out, &[&from], &[16]));
        assert!(
            message.contains("thread 31 ") && message.contains("reads 16 bytes at byte 496"),
            "{message}"
        );
    });
}

/// Two stages of `cp.async`, `ldmatrix` and `mma` together, on whole tiles and on the rest of one. `after` gets the
/// kernel and whether its tiles are swizzled.
#[track_caller]
fn check_matmuls(after: impl Fn(&'static str, bool)) {
    let stages = 2 * (16 + 64) * 64 * 2;
    for (dtype, [_, swizzled, plain]) in HALVES {
        for (depth, columns) in [(64, 64), (192, 64), (200, 40), (8, 8)] {
            let (a, of_a) = matrix(dtype, &exact(4, 16 * depth), &[16, depth]);
            let (b, of_b) = matrix(dtype, &exact(5, depth * columns), &[depth, columns]);
            let expected = product(&vec![0.0; 16 * columns], &of_a, &of_b, [16, depth, columns]);
            for (name, seed) in [(swizzled, 0), (swizzled, 1), (plain, 0)] {
                let c = matrix(DType::F32, &vec![f32::NAN; 16 * columns], &[16, columns]).0;
                let scalars = [depth as u32, columns as u32];
                in_order(seed, || launch(name, [1, 64, stages], &c, &[&a, &b], &scalars)).unwrap();
                assert_eq!(to_vec::<f32>(&c).unwrap(), expected, "{name}");
                after(name, name == swizzled);
            }
        }
    }
}

#[test]
fn a_matmul_of_these_instructions_is_the_naive_product() {
    on_a_gpu(|| check_matmuls(|_, _| {}));
}

/// Without the swizzle, the 8 rows of a matrix begin in the same bank.
#[test]
fn bank_conflicts_are_counted_on_the_fake_driver() {
    on_a_gpu(|| {
        bank_conflicts();
        check_matmuls(|name, is_swizzled| {
            let conflicts = bank_conflicts();
            assert_eq!(conflicts == 0, is_swizzled, "{name}: {conflicts} conflicts");
        });
        let matrices = matrix(DType::F16, &[0.0; 256], &[4, 8, 8]).0;
        launch("test_ldmatrix_x4", [1, 32, 512], &words(vec![0; 128]), &[&matrices], &[]).unwrap();
        assert_eq!(bank_conflicts(), 0, "the rows of a matrix are adjacent");
    });
}
