//! The rotation in f64, one pair at a time.

/// x: [n, heads, head_dim] rotated by its positions; backwards with a `sign` of −1.
#[must_use]
pub fn apply(x: &[f64], position_ids: &[u32], head_dim: usize, theta: f64, sign: f64) -> Vec<f64> {
    let mut y = x.to_vec();
    let half = head_dim / 2;
    let row_elems = x.len() / position_ids.len().max(1);
    for (row, position) in y.chunks_exact_mut(row_elems.max(1)).zip(position_ids) {
        for head in row.chunks_exact_mut(head_dim) {
            for i in 0..half {
                let angle = f64::from(*position) * theta.powf(-2.0 * i as f64 / head_dim as f64);
                let (sin, cos) = (sign * angle).sin_cos();
                let (a, b) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
    y
}
