//! The step in f64, in the words of PyTorch's documentation.

use super::AdamParams;

/// Updates param, exp_avg and exp_avg_sq in place.
pub fn step(
    param: &mut [f64],
    grad: &[f64],
    exp_avg: &mut [f64],
    exp_avg_sq: &mut [f64],
    params: &AdamParams,
) {
    let AdamParams { lr, beta1, beta2, eps, weight_decay, .. } = *params;
    let t = params.step as i32;
    for i in 0..param.len() {
        let mut g = grad[i] * params.grad_scale;
        if params.decoupled {
            param[i] -= lr * weight_decay * param[i];
        } else {
            g += weight_decay * param[i];
        }
        exp_avg[i] = beta1 * exp_avg[i] + (1.0 - beta1) * g;
        exp_avg_sq[i] = beta2 * exp_avg_sq[i] + (1.0 - beta2) * g * g;
        let (m, v) = match params.bias_correction {
            true => (exp_avg[i] / (1.0 - beta1.powi(t)), exp_avg_sq[i] / (1.0 - beta2.powi(t))),
            false => (exp_avg[i], exp_avg_sq[i]),
        };
        param[i] -= lr * m / (v.sqrt() + eps);
    }
}
