//! Reductions in f64, from front to back.

/// Σ x².
#[must_use]
pub fn sum_of_squares(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum()
}
