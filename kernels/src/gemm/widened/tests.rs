use super::*;
use crate::testing::{assert_same_for_any_thread_count, random};
use half::{bf16, f16};

/// (m, n, k): empty, less than a block, whole blocks, remainders everywhere, several rounds of terms, several
/// tasks.
const SIZES: [[usize; 3]; 9] = [
    [0, 3, 2],
    [3, 2, 0],
    [1, 1, 1],
    [5, 3, 2],
    [ROW_STEP, BLOCK_COLUMNS, BLOCK_K],
    [ROW_STEP + 1, BLOCK_COLUMNS + 3, BLOCK_K + 1],
    [31, 70, 3 * BLOCK_K - 1],
    [300, 40, 50],
    [2 * MAX_ROWS + 7, MAX_COLUMNS + 5, 3],
];

/// Distinct small integers whose products and sums are exact.
fn integers<T: Float>(salt: usize, len: usize) -> Vec<T> {
    let values: Vec<f32> = (0..len).map(|i| ((i * 7 + salt) % 13) as f32 - 6.0).collect();
    rounded(&values)
}

fn rounded<T: Float>(values: &[f32]) -> Vec<T> {
    let mut elements = vec![T::zero(); values.len()];
    T::round(values, &mut elements);
    elements
}

fn wide<T: Float>(elements: &[T]) -> Vec<f32> {
    let mut values = vec![0.0; elements.len()];
    T::widen(elements, &mut values);
    values
}

/// Lines in either memory order.
struct Matrix<T> {
    rows: usize,
    k: usize,
    contiguous: Vec<T>,
    interleaved: Vec<T>,
}

impl<T: Float> Matrix<T> {
    fn new(rows: usize, k: usize, contiguous: Vec<T>) -> Self {
        let interleaved = (0..k * rows).map(|at| contiguous[at % rows * k + at / rows]).collect();
        Self { rows, k, contiguous, interleaved }
    }

    fn operand(&self, is_interleaved: bool) -> MatmulOperand<'_, T> {
        if is_interleaved {
            MatmulOperand::interleaved(&self.interleaved, self.rows, self.k).unwrap()
        } else {
            MatmulOperand::contiguous(&self.contiguous, self.rows, self.k).unwrap()
        }
    }
}

fn check_integers<A: Float, B: Float, C: Float>() {
    let types = [A::DTYPE, B::DTYPE, C::DTYPE];
    for [m, n, k] in SIZES {
        let (a, b) = (Matrix::new(m, k, integers::<A>(1, m * k)), Matrix::new(n, k, integers::<B>(2, n * k)));
        let (wide_a, wide_b) = (wide(&a.contiguous), wide(&b.contiguous));
        let product = |row: usize, column: usize| -> f32 {
            let terms = wide_a[row * k..][..k].iter().zip(&wide_b[column * k..][..k]);
            terms.map(|(a, b)| a * b).sum()
        };
        for (of_a, of_b) in [(false, false), (false, true), (true, false), (true, true)] {
            for (add, old) in [(false, f32::NAN), (true, 3.0)] {
                let mut c = rounded::<C>(&vec![old; m * n]);
                multiply(a.operand(of_a), b.operand(of_b), &mut c, add);
                let c = wide(&c);
                for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                    let sum = product(row, column) + if add { old } else { 0.0 };
                    let expected = wide(&rounded::<C>(&[sum]))[0];
                    let got = c[row * n + column];
                    assert_eq!(
                        got, expected,
                        "{types:?} {m} x {n} x {k}, {of_a}, {of_b}, {add}: {row}, {column}"
                    );
                }
            }
        }
    }
}

#[test]
fn integers_are_multiplied_exactly_in_every_layout_and_type() {
    check_integers::<bf16, bf16, bf16>();
    check_integers::<f16, f16, f16>();
    check_integers::<bf16, bf16, f32>();
    check_integers::<f32, f16, f16>();
    check_integers::<f32, bf16, f32>();
}

#[test]
fn sums_of_many_terms_are_no_worse_than_one_chain_of_additions() {
    let [m, n, k] = [40, 30, 4096];
    let a = Matrix::new(m, k, rounded::<bf16>(&random(1, m * k)));
    let b = Matrix::new(n, k, rounded::<bf16>(&random(2, n * k)));
    let mut sums = vec![0.0_f32; m * n];
    multiply(a.operand(false), b.operand(false), &mut sums, false);
    let (mut worst, mut worst_plain) = (0.0_f64, 0.0_f64);
    for (index, sum) in sums.into_iter().enumerate() {
        let (row, column) = (index / n, index % n);
        let terms = || a.contiguous[row * k..][..k].iter().zip(&b.contiguous[column * k..][..k]);
        let exact: f64 = terms().map(|(a, b)| a.to_f64() * b.to_f64()).sum();
        let plain: f32 = terms().map(|(a, b)| a.to_f32() * b.to_f32()).sum();
        worst = worst.max((f64::from(sum) - exact).abs());
        worst_plain = worst_plain.max((f64::from(plain) - exact).abs());
    }
    assert!(worst <= worst_plain, "{worst:e}, one chain of additions {worst_plain:e}");
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let [m, n, k] = [3 * ROW_STEP + 5, 2 * BLOCK_COLUMNS + 9, 2 * BLOCK_K + 3];
    let a = Matrix::new(m, k, rounded::<bf16>(&random(1, m * k)));
    let b = Matrix::new(n, k, rounded::<bf16>(&random(2, n * k)));
    assert_same_for_any_thread_count(|| {
        let mut sums = vec![0.0_f32; m * n];
        multiply(a.operand(true), b.operand(false), &mut sums, false);
        sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    });
}

#[test]
fn tasks_cover_every_element_once_and_keep_all_threads_busy() {
    for threads in [1, 2, 3, 8, 64] {
        for [m, n] in [[1, 1], [24, 64], [2048, 256], [1024, 512], [1000, 1376], [100_000, 17], [7, 50_000]] {
            let [rows, columns] = task_sizes([m, n], threads);
            let label = format!("{m} x {n} on {threads}: {rows} x {columns}");
            assert!(rows <= MAX_ROWS && columns <= MAX_COLUMNS && rows * columns <= MAX_SUMS, "{label}");
            let tasks = tasks_of([m, n], [rows, columns]);
            let mut visits = vec![0_u8; m * n];
            for task in &tasks {
                for row in task.rows.clone() {
                    visits[row * n..][task.columns.clone()].iter_mut().for_each(|visits| *visits += 1);
                }
            }
            assert!(visits.iter().all(|visits| *visits == 1), "{label}");
            let share = (m * n).div_ceil(threads);
            let longest = tasks.len().div_ceil(threads) * rows.min(m) * columns.min(n);
            let least = ROW_STEP * BLOCK_COLUMNS;
            assert!(longest <= 2 * share.max(least), "{label}: {longest} for shares of {share}");
        }
    }
}
