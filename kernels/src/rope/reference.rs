//! The rotation in f64, one pair at a time.

use super::Rope;

/// x: [n, heads, head_dim] rotated by its positions; backwards with a `sign` of −1. Without scaling.
#[must_use]
pub fn apply(x: &[f64], position_ids: &[u32], head_dim: usize, rope: impl Into<Rope>, sign: f64) -> Vec<f64> {
    let rope = rope.into();
    let rotary_dim = (head_dim as f64 * rope.partial_rotary_factor) as usize;
    let mut y = x.to_vec();
    let row_elems = x.len() / position_ids.len().max(1);
    for (row, position) in y.chunks_exact_mut(row_elems.max(1)).zip(position_ids) {
        for head in row.chunks_exact_mut(head_dim) {
            for i in 0..rotary_dim / 2 {
                let angle = f64::from(*position) * rope.theta.powf(-2.0 * i as f64 / rotary_dim as f64);
                let (sin, cos) = (sign * angle).sin_cos();
                let (first, second) =
                    if rope.interleaved { (2 * i, 2 * i + 1) } else { (i, i + rotary_dim / 2) };
                let (a, b) = (head[first], head[second]);
                (head[first], head[second]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
    y
}
