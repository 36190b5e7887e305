//! Comparison of tensors by name, relative to the expected tensor's largest entry.
//!
//! An error relative to each entry would measure only the noise of entries near zero. NaN and infinities never
//! compare as close.

use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// The entry with the largest error.
#[derive(Debug, Clone, Copy)]
struct Worst {
    index: usize,
    actual: f64,
    expected: f64,
    error: f64,
}

/// Returns `max |actual − expected| / max |expected|`, or the absolute error if all of `expected` is zero.
///
/// Infinite if an entry of either side is NaN or infinite.
///
/// # Panics
/// Panics if the numbers of elements differ.
pub fn max_rel_error<T: Copy + Into<f64>>(actual: &[T], expected: &Tensor) -> f64 {
    worst_entry(actual, &values(expected)).map_or(0.0, |worst| worst.error)
}

/// Asserts that `actual` is within `tolerance` of `expected` in the sense of [`max_rel_error`].
///
/// # Panics
/// When it is not, or when the numbers of elements differ.
#[track_caller]
pub fn assert_close<T: Copy + Into<f64>>(name: &str, actual: &[T], expected: &Tensor, tolerance: f64) {
    let expected_values = values(expected);
    assert_eq!(
        actual.len(),
        expected_values.len(),
        "{name}: number of elements ({:?} expected)",
        expected.dims()
    );
    if let Some(worst) = worst_entry(actual, &expected_values) {
        assert!(
            worst.error <= tolerance,
            "{name} {:?}: relative error {:.3e} > {tolerance:.1e}; worst at {:?}: actual {:e}, expected {:e}",
            expected.dims(),
            worst.error,
            coordinates(worst.index, expected.dims()),
            worst.actual,
            worst.expected,
        );
    }
}

/// `√(Σ (actual − expected)² / Σ expected²)` over all elements of all tensors.
///
/// # Panics
/// If `actual` lacks a tensor of `expected`.
pub fn rms_error(actual: &BTreeMap<String, Tensor>, expected: &BTreeMap<String, Tensor>) -> f64 {
    let (mut squares, mut errors) = (0.0, 0.0);
    for (name, expected) in expected {
        for (got, expected) in values(&actual[name]).iter().zip(values(expected)) {
            squares += expected * expected;
            errors += (got - expected) * (got - expected);
        }
    }
    f64::sqrt(errors / squares)
}

/// [`assert_close`] for two scalars.
///
/// # Panics
/// When they are further apart than `tolerance · |expected|`.
#[track_caller]
pub fn assert_scalar_close(name: &str, actual: f64, expected: f64, tolerance: f64) {
    if let Some(worst) = worst_entry(&[actual], &[expected]) {
        assert!(
            worst.error <= tolerance,
            "{name}: relative error {:.3e} > {tolerance:.1e}: actual {actual:e}, expected {expected:e}",
            worst.error
        );
    }
}

/// Asserts that two sets have the same names, and that each tensor has the expected shape and is close. `what`, such
/// as "gradient", prefixes the names.
///
/// # Panics
/// When they are not.
#[track_caller]
pub fn assert_all_close(
    what: &str,
    actual: &BTreeMap<String, Tensor>,
    expected: &BTreeMap<String, Tensor>,
    tolerance: f64,
) {
    let names = |tensors: &BTreeMap<String, Tensor>| tensors.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(actual), names(expected), "{what}: names");
    for (name, expected) in expected {
        let label = format!("{what} {name}");
        assert_eq!(actual[name].dims(), expected.dims(), "{label}: shape");
        assert_close(&label, &values(&actual[name]), expected, tolerance);
    }
}

/// Returns all elements in row-major order, as f64.
///
/// # Panics
/// When the tensor's type does not convert to f64.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_dtype(DType::F64).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1());
    flat.expect("a tensor of numbers")
}

fn worst_entry<T: Copy + Into<f64>>(actual: &[T], expected: &[f64]) -> Option<Worst> {
    assert_eq!(actual.len(), expected.len(), "number of elements");
    let largest = expected.iter().fold(0.0_f64, |largest, e| largest.max(e.abs()));
    let scale = if largest > 0.0 { largest } else { 1.0 };
    let entries = actual.iter().zip(expected).enumerate().map(|(index, (&actual, &expected))| {
        let actual = actual.into();
        let difference = (actual - expected).abs();
        let error = if difference.is_finite() { difference / scale } else { f64::INFINITY };
        Worst { index, actual, expected, error }
    });
    entries.max_by(|a, b| a.error.total_cmp(&b.error))
}

fn coordinates(mut index: usize, dims: &[usize]) -> Vec<usize> {
    let mut coordinates = vec![0; dims.len()];
    for (coordinate, dim) in coordinates.iter_mut().zip(dims).rev() {
        *coordinate = index % dim;
        index /= dim;
    }
    coordinates
}
