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
    a_log: &[f64],
    dt_bias: &[f64],
    limits: [f64; 2],
    dg: &[f64],
    dbeta: &[f64],
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

/// (g, beta) of projections `[n, H·C]` and `[n, H]`.
#[must_use]
pub fn forward(a: &[f64], b: &[f64], a_log: &[f64], dt_bias: &[f64]) -> [Vec<f64>; 2] {
    let g = |(i, a): (usize, &f64)| {
        let column = i % dt_bias.len();
        -rate(a_log, dt_bias, column) * (1.0 + (a + dt_bias[column]).exp()).ln()
    };
    let beta = |b: &f64| 1.0 / (1.0 + (-b).exp());
    [a.iter().enumerate().map(g).collect(), b.iter().map(beta).collect()]
}

/// (da, db, da_log, ddt_bias) for the upstream gradients dg and dbeta.
#[must_use]
pub fn backward(
    a: &[f64],
    b: &[f64],
    a_log: &[f64],
    dt_bias: &[f64],
    dg: &[f64],
    dbeta: &[f64],
) -> [Vec<f64>; 4] {
    let (heads, columns) = (a_log.len(), dt_bias.len());
    let [g, beta] = forward(a, b, a_log, dt_bias);
    let (mut da, mut da_log, mut ddt_bias) = (Vec::new(), vec![0.0; heads], vec![0.0; columns]);
    for i in 0..a.len() {
        let column = i % columns;
        let gradient = -dg[i] * rate(a_log, dt_bias, column) / (1.0 + (-a[i] - dt_bias[column]).exp());
        da.push(gradient);
        da_log[column * heads / columns] += dg[i] * g[i];
        ddt_bias[column] += gradient;
    }
    let db = beta.iter().zip(dbeta).map(|(beta, dbeta)| dbeta * beta * (1.0 - beta)).collect();
    [da, db, da_log, ddt_bias]
}

/// The decay per unit of time of a column.
fn rate(a_log: &[f64], dt_bias: &[f64], column: usize) -> f64 {
    a_log[column * a_log.len() / dt_bias.len()].exp()
}
