use super::*;
use crate::testing::{assert_same_for_any_thread_count, random};

/// (m, n, k): less than a tile, whole blocks, remainders everywhere, several rounds of terms, several tasks.
const SIZES: [[usize; 3]; 8] = [
    [1, 1, 1],
    [5, 3, 2],
    [32, 32, 32],
    [33, 47, 65],
    [31, 70, 129],
    [128, 96, 64],
    [300, 40, 50],
    [20, 33, 2 * K_PER_SUM + 7],
];

fn kernels() -> impl Iterator<Item = Kernel> {
    Kernel::all().chain([Kernel::Portable])
}

/// bf16 matrices `[m, k]` and `[k, n]`, each in both memory orders.
struct Operands {
    sizes: [usize; 3],
    a: [Vec<bf16>; 2],
    b: [Vec<bf16>; 2],
}

impl Operands {
    fn new(sizes: [usize; 3], element: impl Fn(u64, usize) -> Vec<bf16>) -> Self {
        let [m, n, k] = sizes;
        let both = |rows: usize, cols: usize, elements: Vec<bf16>| {
            let transposed = (0..cols * rows).map(|at| elements[at % rows * cols + at / rows]).collect();
            [elements, transposed]
        };
        Self { sizes, a: both(m, k, element(1, m * k)), b: both(n, k, element(2, n * k)) }
    }

    fn matrices(&self, a_interleaved: bool, b_interleaved: bool) -> [MatmulOperand<'_, bf16>; 2] {
        let [m, n, k] = self.sizes;
        [(&self.a, m, a_interleaved), (&self.b, n, b_interleaved)].map(
            |([plain, other], rows, interleaved)| match interleaved {
                false => MatmulOperand::contiguous(plain, rows, k).unwrap(),
                true => MatmulOperand::interleaved(other, rows, k).unwrap(),
            },
        )
    }

    /// Dot product of a row and a column, in f64.
    fn product(&self, row: usize, column: usize) -> f64 {
        let k = self.sizes[2];
        let terms = self.a[0][row * k..][..k].iter().zip(&self.b[0][column * k..][..k]);
        terms.map(|(a, b)| a.to_f64() * b.to_f64()).sum()
    }
}

#[test]
fn every_kernel_multiplies_integers_exactly_in_every_layout() {
    let integers = |salt: u64, len| {
        (0..len).map(|i| bf16::from_f32(((i * 7 + salt as usize) % 13) as f32 - 6.0)).collect()
    };
    for sizes in SIZES {
        let operands = Operands::new(sizes, integers);
        let [m, n, _] = sizes;
        for kernel in kernels() {
            for (a_interleaved, b_interleaved) in [(false, false), (false, true), (true, false), (true, true)]
            {
                let [a, b] = operands.matrices(a_interleaved, b_interleaved);
                for (add, old) in [(false, f32::NAN), (true, 3.0)] {
                    let mut sums = vec![old; m * n];
                    multiply(kernel, a, b, &mut sums, add);
                    let mut rounded = vec![bf16::from_f32(old); m * n];
                    multiply(kernel, a, b, &mut rounded, add);
                    for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                        let expected = operands.product(row, column) as f32 + if add { old } else { 0.0 };
                        let (sum, rounded) = (sums[row * n + column], rounded[row * n + column]);
                        let label = format!("{kernel:?} {sizes:?} ({row}, {column})");
                        assert_eq!(sum, expected, "{label}");
                        assert_eq!(rounded, bf16::from_f32(expected), "{label}, rounded");
                    }
                }
            }
        }
    }
}

/// The criterion of FlashAttention's tests: at most twice the error of a plain sum that is rounded to bf16.
#[test]
fn rounded_matmuls_are_as_accurate_as_a_plain_sum_and_sums_as_f32() {
    let operands = Operands::new([64, 48, 4096], |salt, len| {
        random(salt, len).into_iter().map(bf16::from_f32).collect()
    });
    let [m, n, k] = operands.sizes;
    let [a, b] = operands.matrices(false, true);
    for kernel in kernels() {
        let (mut sums, mut rounded) = (vec![0.0; m * n], vec![bf16::ZERO; m * n]);
        multiply(kernel, a, b, &mut sums, false);
        multiply(kernel, a, b, &mut rounded, false);
        let mut errors = [0.0_f64; 4];
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let exact = operands.product(row, column);
            let terms = operands.a[0][row * k..][..k].iter().zip(&operands.b[0][column * k..][..k]);
            let plain: f32 = terms.map(|(a, b)| a.to_f32() * b.to_f32()).sum();
            let at = row * n + column;
            let of_element = [
                f64::from(sums[at]) - exact,
                f64::from(plain) - exact,
                rounded[at].to_f64() - exact,
                bf16::from_f32(plain).to_f64() - exact,
            ];
            for (error, of_element) in errors.iter_mut().zip(of_element) {
                *error = error.max(of_element.abs());
            }
        }
        let [sum, plain_sum, rounded, plain_rounded] = errors;
        assert!(sum <= 2.0 * plain_sum, "{kernel:?}: {sum:e}, plainly {plain_sum:e}");
        assert!(rounded <= 2.0 * plain_rounded, "{kernel:?}: {rounded:e}, plainly {plain_rounded:e}");
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let operands = Operands::new([3 * ROWS_PER_TASK + 5, 70, 90], |salt, len| {
        random(salt, len).into_iter().map(bf16::from_f32).collect()
    });
    let [m, n, _] = operands.sizes;
    for kernel in kernels() {
        assert_same_for_any_thread_count(|| {
            let [a, b] = operands.matrices(true, false);
            let mut sums = vec![0.0; m * n];
            multiply(kernel, a, b, &mut sums, false);
            sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
    }
}

#[test]
fn a_slice_of_another_length_than_the_matrix_is_refused() {
    let data = [bf16::ONE; 12];
    assert!(MatmulOperand::contiguous(&data, 3, 4).is_ok());
    assert!(MatmulOperand::contiguous(&data, 3, 5).is_err());
    assert!(MatmulOperand::interleaved(&data, 2, 5).is_err());
    assert!(MatmulOperand::interleaved(&data, usize::MAX, 2).is_err());
}
