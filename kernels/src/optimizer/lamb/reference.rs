//! The step in f64: algorithm 2 of the paper line by line, with bounds for the trust ratio.

use super::LambParams;
use crate::optimizer::Step;

/// Updates one parameter tensor and its moments in place.
pub fn step(
    param: &mut [f64],
    grad: &[f64],
    exp_avg: &mut [f64],
    exp_avg_sq: &mut [f64],
    params: &LambParams,
) {
    let LambParams { beta1, beta2, eps, weight_decay, min_coeff, max_coeff, .. } = *params;
    let Step { number, lr, grad_scale } = params.step;
    let t = number as i32;
    let mut direction = vec![0.0; param.len()];
    for i in 0..param.len() {
        let g = grad[i] * grad_scale;
        exp_avg[i] = beta1 * exp_avg[i] + (1.0 - beta1) * g;
        exp_avg_sq[i] = beta2 * exp_avg_sq[i] + (1.0 - beta2) * g * g;
        let (m, v) = match params.bias_correction {
            true => (exp_avg[i] / (1.0 - beta1.powi(t)), exp_avg_sq[i] / (1.0 - beta2.powi(t))),
            false => (exp_avg[i], exp_avg_sq[i]),
        };
        direction[i] = m / (v.sqrt() + eps) + weight_decay * param[i];
    }
    let norm = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
    let (param_norm, direction_norm) = (norm(param), norm(&direction));
    let ratio = match param_norm > 0.0 && direction_norm > 0.0 {
        true => (param_norm / direction_norm).clamp(min_coeff, max_coeff),
        false => 1.0,
    };
    for (p, u) in param.iter_mut().zip(&direction) {
        *p -= lr * ratio * u;
    }
}
