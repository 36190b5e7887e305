use super::*;
use crate::simd::at_every_level;

const UNTOUCHED: f32 = -7.0;

/// Integers that encode their position, so that sums are exact at every level.
fn matrix(rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|index| (index / cols * 31 + index % cols * 7) as f32 % 61.0 - 30.0).collect()
}

/// Rows of `cols` elements, `stride` apart.
fn check([rows, cols, terms]: [usize; 3], lhs_is_transposed: bool, add: bool, level: impl std::fmt::Debug) {
    let stride = cols + 3;
    let (lhs, rhs) = (matrix(rows, terms), matrix(terms, stride));
    let lhs_strides = if lhs_is_transposed { [1, rows] } else { [terms, 1] };
    let mut dst = vec![UNTOUCHED; rows * stride];
    let matmul = Matmul {
        rows,
        cols,
        terms,
        dst: dst.as_mut_ptr(),
        dst_stride: stride,
        lhs: lhs.as_ptr(),
        lhs_strides,
        rhs: rhs.as_ptr(),
        rhs_stride: stride,
        factor: 0.5,
        add,
    };
    // SAFETY: all three have as many elements as their shapes and strides say.
    unsafe { multiply(matmul) };
    for (index, element) in dst.into_iter().enumerate() {
        let (row, col) = (index / stride, index % stride);
        let lhs = |term| lhs[row * lhs_strides[0] + term * lhs_strides[1]];
        let sum: f32 = (0..terms).map(|term| lhs(term) * rhs[term * stride + col]).sum();
        let before = if add { UNTOUCHED } else { 0.0 };
        let expected = if col < cols { 0.5 * sum + before } else { UNTOUCHED };
        assert_eq!(
            element, expected,
            "{rows} x {cols} x {terms}, {lhs_is_transposed}, {add}, {level:?}: {row}, {col}"
        );
    }
}

#[test]
fn every_remainder_of_rows_and_columns_is_multiplied_and_nothing_else_written() {
    at_every_level(|level| {
        for rows in 1..=26 {
            for cols in 1..=66 {
                check([rows, cols, 3], rows % 2 == 0, cols % 2 == 0, level);
            }
        }
    });
}

#[test]
fn a_matmul_of_no_terms_is_zero_and_one_of_many_is_their_sum() {
    at_every_level(|level| {
        for terms in [0, 1, 64, 257] {
            for add in [false, true] {
                check([24, 64, terms], false, add, level);
                check([24, 32, terms], true, add, level);
            }
        }
        for empty in [[0, 16, 3], [5, 0, 3]] {
            check(empty, false, false, level);
        }
    });
}
