//! `wgmma`, against the tables of the PTX ISA and naive products, and faults in its use.

use super::super::launch;
use super::tensor_cores::{exact, matrix, product};
use crate::device::cuda::fake_driver::{failure, in_order};
use crate::device::{DeviceError, sources};
use crate::tensor::to_vec;
use crate::testing::{on_a_gpu, random};
use candle_core::{DType, Tensor};

/// Shared memory of the kernels of one product: 64 rows of A and up to 130 of B, of 128 bytes.
const SHARED: usize = (64 + 130) * 128;

/// A kernel of one product, whose B is `[columns, 16]` in shared memory, or `[16, columns]` with A in registers.
#[derive(Clone, Copy)]
struct Form {
    name: &'static str,
    dtype: DType,
    columns: usize,
    is_b_by_rows: bool,
}

const fn form(name: &'static str, dtype: DType, columns: usize, is_b_by_rows: bool) -> Form {
    Form { name, dtype, columns, is_b_by_rows }
}

const FORMS: [Form; 8] = [
    form("test_wgmma_shared_bf16_64", DType::BF16, 64, false),
    form("test_wgmma_shared_bf16_128", DType::BF16, 128, false),
    form("test_wgmma_shared_f16_64", DType::F16, 64, false),
    form("test_wgmma_shared_f16_128", DType::F16, 128, false),
    form("test_wgmma_registers_bf16_64", DType::BF16, 64, true),
    form("test_wgmma_registers_bf16_128", DType::BF16, 128, true),
    form("test_wgmma_registers_f16_64", DType::F16, 64, true),
    form("test_wgmma_registers_f16_128", DType::F16, 128, true),
];

impl Form {
    /// Runs `c [64, columns] += a [64, 16] · b [16, columns]`.
    fn run(self, c: &[f32], a: &[f32], b: &[f32], fault: u32) -> Result<Tensor, DeviceError> {
        let Self { name, dtype, columns, is_b_by_rows } = self;
        let transposed = || (0..16 * columns).map(|i| b[i % 16 * columns + i / 16]).collect();
        let b: Vec<f32> = if is_b_by_rows { b.to_vec() } else { transposed() };
        let (a, b) = (matrix(dtype, a, &[64, 16]).0, matrix(dtype, &b, &[16 * columns]).0);
        let c = matrix(DType::F32, c, &[64, columns]).0;
        launch((&sources::tests::WGMMA, name), [1, 128, SHARED], &c, &[&a, &b], &[fault])?;
        Ok(c)
    }
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    to_vec(tensor).unwrap()
}

#[test]
fn a_product_with_one_nonzero_element_of_each_operand_shows_every_position() {
    on_a_gpu(|| {
        for form in FORMS {
            for k in 0..16 {
                let (row, column) = ((13 * k + 5) % 64, (41 * k + 2) % form.columns);
                let unit = |len: usize, at: usize| {
                    (0..len).map(|i| f32::from(u8::from(i == at))).collect::<Vec<_>>()
                };
                let (a, b) =
                    (unit(64 * 16, row * 16 + k), unit(16 * form.columns, k * form.columns + column));
                let c = form.run(&vec![0.0; 64 * form.columns], &a, &b, 0).unwrap();
                assert_eq!(
                    elements(&c),
                    unit(64 * form.columns, row * form.columns + column),
                    "{}, k = {k}",
                    form.name
                );
            }
        }
    });
}

#[test]
fn a_product_is_added_to_the_accumulators_in_any_order_of_threads() {
    on_a_gpu(|| {
        for form in FORMS {
            let (a, b, c) = (exact(1, 64 * 16), exact(2, 16 * form.columns), exact(3, 64 * form.columns));
            let expected = product(&c, &a, &b, [64, 16, form.columns]);
            for seed in 0..3 {
                let got = in_order(seed, || form.run(&c, &a, &b, 0)).unwrap();
                assert_eq!(elements(&got), expected, "{}, seed {seed}", form.name);
            }
        }
    });
}

/// The descriptors of `Panels`, of several panels, steps and warpgroups. All sums are exact.
#[test]
fn a_chain_of_products_of_two_warpgroups_is_the_naive_one() {
    on_a_gpu(|| {
        let integers = |seed, len| random(seed, len).into_iter().map(f32::round).collect::<Vec<_>>();
        for (dtype, name) in [(DType::BF16, "test_wgmma_chain_bf16"), (DType::F16, "test_wgmma_chain_f16")] {
            let (a, of_a) = matrix(dtype, &integers(4, 128 * 64), &[128, 64]);
            let (b, of_b) = matrix(dtype, &integers(5, 128 * 64), &[128, 64]);
            let (d, of_d) = matrix(dtype, &exact(6, 128 * 128), &[128, 128]);
            let transposed: Vec<f32> = (0..64 * 128).map(|i| of_b[i % 128 * 64 + i / 128]).collect();
            let s = product(&vec![0.0; 128 * 128], &of_a, &transposed, [128, 64, 128]);
            let expected = product(&vec![0.0; 128 * 128], &s, &of_d, [128, 128, 128]);
            for seed in 0..2 {
                let c = matrix(DType::F32, &vec![f32::NAN; 128 * 128], &[128, 128]).0;
                let kernel = (&sources::tests::WGMMA, name);
                in_order(seed, || launch(kernel, [1, 256, 65536], &c, &[&a, &b, &d], &[])).unwrap();
                assert_eq!(elements(&c), expected, "{name}, seed {seed}");
            }
        }
    });
}

/// The faults of `cuda/tests/wgmma.cu` by number.
#[test]
fn faults_in_the_use_of_products_are_found_on_the_fake_driver() {
    on_a_gpu(|| {
        let shared = FORMS[1];
        let registers = FORMS[5];
        let run = |form: Form, fault| {
            let (a, b, c) = (exact(1, 64 * 16), exact(2, 16 * form.columns), exact(3, 64 * form.columns));
            // In other orders, a thread may read what no thread has written yet.
            in_order(0, || form.run(&c, &a, &b, fault))
        };
        // The accumulators stay NaN without a wait that covers the product.
        for (fault, what) in [(1, "no wait"), (2, "no commit"), (3, "a wait for too few groups")] {
            for form in [shared, registers] {
                assert!(elements(&run(form, fault).unwrap()).iter().all(|x| x.is_nan()), "{what}");
            }
        }
        for (form, fault, expected) in [
            (shared, 4, "wgmma on accumulators that were accessed after the last wgmma.fence for them"),
            (registers, 4, "wgmma on an operand A that was accessed after the last wgmma.fence for it"),
            (shared, 5, "accumulators of wgmma were written before the wait for it"),
            (registers, 6, "operand A of wgmma was written before the wait for it"),
            (shared, 7, "without a barrier after the read by"),
            (shared, 8, "which was written without a fence for it"),
            (registers, 8, "which was written without a fence for it"),
            (shared, 10, "the threads of a warpgroup are at different instructions or operands"),
            (shared, 11, "a product is not reached by all threads it needs"),
            (shared, 12, "wgmma on a matrix that begins 256 bytes after a multiple of 1024"),
        ] {
            let message = failure(|| run(form, fault).map(|_| ()));
            assert!(message.contains(expected), "{}, fault {fault}: {message}", form.name);
        }
        for form in [shared, registers] {
            let message = failure(|| run(form, 9).map(|_| ()));
            let is_found =
                message.contains("without a barrier after the write") || message.contains("which no thread");
            assert!(is_found, "{}: {message}", form.name);
        }
    });
}
