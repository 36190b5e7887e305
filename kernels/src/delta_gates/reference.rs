//! Decay and rate in f64, head by head.

/// (g, beta) of `[n, H]` projections.
#[must_use]
pub fn forward([a, b]: [&[f64]; 2], [a_log, dt_bias]: [&[f64]; 2]) -> [Vec<f64>; 2] {
    let heads = a_log.len();
    let g = |(i, a): (usize, &f64)| -a_log[i % heads].exp() * (1.0 + (a + dt_bias[i % heads]).exp()).ln();
    let beta = |b: &f64| 1.0 / (1.0 + (-b).exp());
    [a.iter().enumerate().map(g).collect(), b.iter().map(beta).collect()]
}

/// (da, db, da_log, ddt_bias) for the upstream gradients dg and dbeta.
#[must_use]
pub fn backward(
    [a, b]: [&[f64]; 2],
    [a_log, dt_bias]: [&[f64]; 2],
    [dg, dbeta]: [&[f64]; 2],
) -> [Vec<f64>; 4] {
    let heads = a_log.len();
    let [g, beta] = forward([a, b], [a_log, dt_bias]);
    let (mut da, mut da_log, mut ddt_bias) = (Vec::new(), vec![0.0; heads], vec![0.0; heads]);
    for i in 0..a.len() {
        let head = i % heads;
        let gradient = -dg[i] * a_log[head].exp() / (1.0 + (-a[i] - dt_bias[head]).exp());
        da.push(gradient);
        da_log[head] += dg[i] * g[i];
        ddt_bias[head] += gradient;
    }
    let db = beta.iter().zip(dbeta).map(|(beta, dbeta)| dbeta * beta * (1.0 - beta)).collect();
    [da, db, da_log, ddt_bias]
}
