//! RMS normalization in f64, term by term.

/// (y, rstd) of x: [n, d] with `d = weight.len()`.
#[must_use]
pub fn forward(x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let d = weight.len();
    let (mut y, mut rstd) = (Vec::new(), Vec::new());
    for x in x.chunks_exact(d) {
        let mean_square = x.iter().map(|x| x * x).sum::<f64>() / d as f64;
        let r = 1.0 / (mean_square + eps).sqrt();
        y.extend(x.iter().zip(weight).map(|(x, w)| w * (x * r)));
        rstd.push(r);
    }
    (y, rstd)
}

/// The rows of `d` elements without their means. LayerNorm is [`forward`] of these.
#[must_use]
pub fn centered(x: &[f64], d: usize) -> Vec<f64> {
    let center = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / d as f64;
        row.iter().map(|x| x - mean).collect::<Vec<f64>>()
    };
    x.chunks_exact(d).flat_map(center).collect()
}

/// (dx, dweight) for the upstream gradient dy.
#[must_use]
pub fn backward(dy: &[f64], x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let d = weight.len();
    let (_, rstd) = forward(x, weight, eps);
    let (mut dx, mut dweight) = (Vec::new(), vec![0.0; d]);
    for ((dy, x), r) in dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(rstd) {
        let mean = (0..d).map(|i| dy[i] * weight[i] * x[i] * r).sum::<f64>() / d as f64;
        for i in 0..d {
            dx.push(r * (dy[i] * weight[i] - x[i] * r * mean));
            dweight[i] += dy[i] * x[i] * r;
        }
    }
    (dx, dweight)
}
