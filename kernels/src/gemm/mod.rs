//! Matmuls on CPUs. `gemm` is a safe wrapper of the crate `gemm`, for strided views of f32 slices.
//! Transposing swaps strides; nothing is copied except the panels that the kernel packs.
//!
//! Which code runs depends on the caller, the element types, and the CPU:
//!
//! | caller | operands | CPU | implementation |
//! |---|---|---|---|
//! | `linear`, `lm_head_loss` (`dispatch::multiply`) | f32 | any | `gemm` |
//! | the same, large matmuls | bf16 | with AMX, or AMD's with AVX512-BF16 | `bf16`: packed panels, f32 sums |
//! | the same | other 16-bit types, or small matmuls | any | `widened`: blocks copied as f32, then `unpacked` |
//! | `attention` | f32, or 16 bits copied as f32 | any | `unpacked::multiply` |
//! | `attention` | bf16 | with AMX | `bf16::multiply_on_caller` |
//! | `attention` | bf16 | AMD's with AVX512-BF16 | `unpacked::multiply_pairs` |
//!
//! There are several implementations for two reasons. The crate has no bf16 matmul with f32 sums. And it
//! packs its operands, which takes as long as multiplying them if the sum is over one head only, as in
//! attention.

pub(super) mod bf16;
pub(super) mod dispatch;
pub(super) mod operand;
pub(super) mod tile;
pub(super) mod transposed;
pub(super) mod unpacked;
pub(super) mod widened;

use super::OpError;

/// A matrix inside a slice; element (i, j) is at `i·row_stride + j·col_stride`.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<'a> {
    data: &'a [f32],
    layout: MatrixLayout,
}

/// A writable [`MatrixRef`]. No two of its elements overlap.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    data: &'a mut [f32],
    layout: MatrixLayout,
}

#[derive(Clone, Copy, Debug)]
struct MatrixLayout {
    rows: usize,
    cols: usize,
    row_stride: isize,
    col_stride: isize,
}

/// The threads that a matmul may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// Only the calling thread: for callers that already run in parallel.
    Caller,
    /// The current rayon pool, if the matmul is large enough.
    Pool,
}

impl<'a> MatrixRef<'a> {
    /// A contiguous row-major matrix at the start of `data`.
    ///
    /// # Errors
    /// If `data` is too short.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Result<Self, OpError> {
        Self::strided(data, rows, cols, cols, 1)
    }

    /// A matrix with any strides, beginning at the start of `data`.
    ///
    /// # Errors
    /// When an element would lie outside `data`.
    pub fn strided(
        data: &'a [f32],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Result<Self, OpError> {
        let layout = MatrixLayout::checked(data.len(), rows, cols, row_stride, col_stride)?;
        Ok(Self { data, layout })
    }

    /// The transposed view.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { data: self.data, layout: self.layout.transposed() }
    }
}

impl<'a> MatrixMut<'a> {
    /// A contiguous row-major matrix at the start of `data`.
    ///
    /// # Errors
    /// If `data` is too short.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Result<Self, OpError> {
        Self::strided(data, rows, cols, cols, 1)
    }

    /// A matrix with any strides that keep its elements distinct, beginning at the start of `data`.
    ///
    /// # Errors
    /// When an element would lie outside `data`, or rows (or columns) would overlap each other.
    pub fn strided(
        data: &'a mut [f32],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Result<Self, OpError> {
        let layout = MatrixLayout::checked(data.len(), rows, cols, row_stride, col_stride)?;
        let rows_hold_cols = col_stride > 0 && cols.saturating_mul(col_stride) <= row_stride;
        let cols_hold_rows = row_stride > 0 && rows.saturating_mul(row_stride) <= col_stride;
        let single =
            (rows <= 1 && col_stride > 0) || (cols <= 1 && row_stride > 0) || rows.saturating_mul(cols) <= 1;
        if !(rows_hold_cols || cols_hold_rows || single) {
            return Err(OpError::MatrixLayout { rows, cols, row_stride, col_stride, len: data.len() });
        }
        Ok(Self { data, layout })
    }

    /// The transposed view.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { data: self.data, layout: self.layout.transposed() }
    }
}

impl MatrixLayout {
    fn checked(
        len: usize,
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Result<Self, OpError> {
        let error = || OpError::MatrixLayout { rows, cols, row_stride, col_stride, len };
        if rows > 0 && cols > 0 {
            let last_row = (rows - 1).checked_mul(row_stride).ok_or_else(error)?;
            let last_col = (cols - 1).checked_mul(col_stride).ok_or_else(error)?;
            let last = last_row.checked_add(last_col).ok_or_else(error)?;
            if last >= len {
                return Err(error());
            }
        }
        let row_stride = isize::try_from(row_stride).map_err(|_| error())?;
        let col_stride = isize::try_from(col_stride).map_err(|_| error())?;
        Ok(Self { rows, cols, row_stride, col_stride })
    }

    fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride }
    }
}

/// Multiply-adds of a matmul that takes a tenth of a millisecond.
const SMALL_MATMUL: usize = 1 << 22;

/// Terms that a small matmul sums before it adds their sum to the others. One long chain of additions has a
/// 1.5 times larger error (rms error of a small model's gradients: 1.28e-7 with one chain, 0.86e-7 this way).
/// In large matmuls the additional passes over `c` would cost at least a tenth of the speed.
const TERMS_PER_SUM: usize = 32;

/// Computes `c = alpha·a·b + beta·c`. With `beta` 0, `c` is not read.
///
/// # Shapes
/// `a: [m, k], b: [k, n], c: [m, n]`
///
/// # Errors
/// Shapes that do not match.
pub fn gemm(
    alpha: f32,
    a: MatrixRef<'_>,
    b: MatrixRef<'_>,
    beta: f32,
    c: MatrixMut<'_>,
    threads: Threads,
) -> Result<(), OpError> {
    let (m, k, n) = (a.layout.rows, a.layout.cols, b.layout.cols);
    for (argument, layout, rows, cols) in [("b", b.layout, k, n), ("c", c.layout, m, n)] {
        if (layout.rows, layout.cols) != (rows, cols) {
            return Err(OpError::Shape {
                op: "gemm",
                argument,
                expected: vec![rows, cols],
                got: vec![layout.rows, layout.cols],
            });
        }
    }
    let parallelism = match (threads, rayon::current_num_threads()) {
        (Threads::Caller, _) | (Threads::Pool, ..=1) => gemm::Parallelism::None,
        (Threads::Pool, threads) => gemm::Parallelism::Rayon(threads),
    };
    let is_small = m.saturating_mul(n).saturating_mul(k) <= SMALL_MATMUL;
    let terms_per_sum = if is_small { TERMS_PER_SUM } else { k.max(1) };
    let mut beta = beta;
    for first in (0..k.max(1)).step_by(terms_per_sum) {
        let terms = terms_per_sum.min(k - first);
        // SAFETY: every element (i, j) of the three views lies inside its slice (`MatrixLayout::checked`), c's
        // elements are distinct (`MatrixMut::strided`), and the borrows keep c apart from a and b. Columns `first`
        // to `first + terms` of a and those rows of b are among their k; for a k of 0 neither is read.
        unsafe {
            // The crate's argument order: its alpha scales the destination, its beta the product; the column
            // stride comes before the row stride.
            gemm::gemm(
                m,
                n,
                terms,
                c.data.as_mut_ptr(),
                c.layout.col_stride,
                c.layout.row_stride,
                beta != 0.0,
                a.data.as_ptr().wrapping_offset(first as isize * a.layout.col_stride),
                a.layout.col_stride,
                a.layout.row_stride,
                b.data.as_ptr().wrapping_offset(first as isize * b.layout.row_stride),
                b.layout.col_stride,
                b.layout.row_stride,
                beta,
                alpha,
                false,
                false,
                false,
                parallelism,
            );
        }
        beta = 1.0;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distinct small integers, so that results are exact and a misplaced element shows.
    fn integers(len: usize, salt: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7 + salt) % 23) as f32 - 11.0).collect()
    }

    fn at(matrix: &MatrixRef<'_>, row: usize, col: usize) -> f32 {
        matrix.data[row * matrix.layout.row_stride as usize + col * matrix.layout.col_stride as usize]
    }

    #[test]
    fn every_layout_multiplies_exactly_and_beta_zero_ignores_old_values() {
        for (m, n, k) in
            [(1, 1, 1), (1, 5, 3), (4, 1, 2), (3, 4, 1), (7, 9, 5), (33, 17, 40), (4, 5, 64), (5, 6, 0)]
        {
            let (a, b) = (integers(m * k, 1), integers(k * n, 2));
            for (a_transposed, b_transposed, c_transposed) in
                [(false, false, false), (true, false, false), (false, true, false), (true, true, true)]
            {
                let a = match a_transposed {
                    false => MatrixRef::new(&a, m, k).unwrap(),
                    true => MatrixRef::new(&a, k, m).unwrap().transposed(),
                };
                let b = match b_transposed {
                    false => MatrixRef::new(&b, k, n).unwrap(),
                    true => MatrixRef::new(&b, n, k).unwrap().transposed(),
                };
                for (beta, old) in [(0.0, f32::NAN), (1.0, 3.0), (2.0, 3.0)] {
                    let mut data = vec![old; m * n];
                    let c = match c_transposed {
                        false => MatrixMut::new(&mut data, m, n).unwrap(),
                        true => MatrixMut::new(&mut data, n, m).unwrap().transposed(),
                    };
                    gemm(0.5, a, b, beta, c, Threads::Caller).unwrap();
                    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                        let product: f32 = (0..k).map(|l| at(&a, i, l) * at(&b, l, j)).sum();
                        let expected = 0.5 * product + if beta == 0.0 { 0.0 } else { beta * old };
                        let got = data[if c_transposed { j * m + i } else { i * n + j }];
                        assert_eq!(got, expected, "{m}x{n}x{k}, beta {beta}, element ({i}, {j})");
                    }
                }
            }
        }
    }

    #[test]
    fn a_strided_destination_leaves_its_gaps_alone() {
        let (a, b) = (integers(6, 0), integers(6, 4));
        let mut data = vec![f32::NAN; 3 * 5];
        let c = MatrixMut::strided(&mut data, 3, 3, 5, 1).unwrap();
        let (a, b) = (MatrixRef::new(&a, 3, 2).unwrap(), MatrixRef::new(&b, 2, 3).unwrap());
        gemm(1.0, a, b, 0.0, c, Threads::Pool).unwrap();
        for (i, value) in data.iter().enumerate() {
            assert_eq!(value.is_nan(), i % 5 >= 3, "element {i}");
        }
    }

    #[test]
    fn views_that_leave_their_slice_or_overlap_are_refused() {
        let mut data = [0.0; 12];
        assert!(MatrixRef::new(&data, 3, 4).is_ok());
        assert!(MatrixRef::new(&data, 3, 5).is_err());
        assert!(MatrixRef::strided(&data, 2, 4, 9, 1).is_err());
        assert!(MatrixRef::strided(&data, usize::MAX, 2, usize::MAX, 1).is_err());
        assert!(MatrixRef::strided(&data, 5, 4, 0, 1).is_ok(), "a broadcast row may be read");
        assert!(MatrixMut::strided(&mut data, 5, 4, 0, 1).is_err(), "but not written");
        assert!(MatrixMut::strided(&mut data, 3, 4, 2, 1).is_err());
        assert!(MatrixMut::strided(&mut data, 3, 4, 1, 3).is_ok());
    }

    #[test]
    fn mismatched_shapes_name_the_matrix() {
        let data = [0.0; 12];
        let mut out = [0.0; 12];
        let (a, b) = (MatrixRef::new(&data, 3, 4).unwrap(), MatrixRef::new(&data, 3, 4).unwrap());
        let error = gemm(1.0, a, b, 0.0, MatrixMut::new(&mut out, 3, 4).unwrap(), Threads::Caller);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`b`") && error.contains("[4, 4]"), "{error}");
    }
}
