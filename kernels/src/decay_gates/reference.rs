//! Decay and rate in f64, head by head.

/// The time steps of Mamba 2, of a `[n, H]` projection.
#[must_use]
pub fn time_steps(a: &[f64], dt_bias: &[f64], limits: [f64; 2]) -> Vec<f64> {
    let step = |(i, a): (usize, &f64)| (1.0 + (a + dt_bias[i % dt_bias.len()]).exp()).ln();
    a.iter().enumerate().map(step).map(|step| step.clamp(limits[0], limits[1])).collect()
}

/// (da, da_log, ddt_bias) of Mamba 2, whose rates are the time steps, for the upstream gradients dg and dbeta.
#[must_use]
pub fn time_steps_backward(
    a: &[f64],
    [a_log, dt_bias]: [&[f64]; 2],
    limits: [f64; 2],
    [dg, dbeta]: [&[f64]; 2],
) -> [Vec<f64>; 3] {
    let heads = a_log.len();
    let steps = time_steps(a, dt_bias, limits);
    let (mut da, mut da_log, mut ddt_bias) = (Vec::new(), vec![0.0; heads], vec![0.0; heads]);
    for (i, step) in steps.iter().enumerate() {
        let head = i % heads;
        let of_step = dbeta[i] - dg[i] * a_log[head].exp();
        let is_within = limits[0] < *step && *step < limits[1];
        let gradient = if is_within { of_step / (1.0 + (-a[i] - dt_bias[head]).exp()) } else { 0.0 };
        da.push(gradient);
        da_log[head] -= dg[i] * a_log[head].exp() * step;
        ddt_bias[head] += gradient;
    }
    [da, da_log, ddt_bias]
}

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
