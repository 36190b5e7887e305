//! The steps in f64, as in PyTorch's documentation and the papers. All update in place.

use super::adagrad::AdagradParams;
use super::adamw::AdamParams;
use super::lion::LionParams;
use super::sgd::SgdParams;

/// [`adamw::step`](super::adamw::step).
pub fn adamw(
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

/// [`sgd::step`](super::sgd::step); the buffer is untouched without momentum.
pub fn sgd(param: &mut [f64], grad: &[f64], buffer: &mut [f64], params: &SgdParams) {
    let SgdParams { lr, momentum, nesterov, weight_decay, .. } = *params;
    for i in 0..param.len() {
        let mut g = grad[i] * params.grad_scale + weight_decay * param[i];
        if momentum != 0.0 {
            buffer[i] = if params.step > 1 { momentum * buffer[i] + g } else { g };
            g = if nesterov { g + momentum * buffer[i] } else { buffer[i] };
        }
        param[i] -= lr * g;
    }
}

/// [`lion::step`](super::lion::step): algorithm 2 of the paper, line by line.
pub fn lion(param: &mut [f64], grad: &[f64], exp_avg: &mut [f64], params: &LionParams) {
    let LionParams { lr, beta1, beta2, weight_decay, grad_scale } = *params;
    for i in 0..param.len() {
        let g = grad[i] * grad_scale;
        let c = beta1 * exp_avg[i] + (1.0 - beta1) * g;
        let sign = if c == 0.0 { 0.0 } else { c.signum() };
        param[i] -= lr * (sign + weight_decay * param[i]);
        exp_avg[i] = beta2 * exp_avg[i] + (1.0 - beta2) * g;
    }
}

/// [`adagrad::step`](super::adagrad::step).
pub fn adagrad(param: &mut [f64], grad: &[f64], state_sum: &mut [f64], params: &AdagradParams) {
    let AdagradParams { lr, lr_decay, eps, weight_decay, .. } = *params;
    let decayed_lr = lr / (1.0 + (params.step as f64 - 1.0) * lr_decay);
    for i in 0..param.len() {
        let g = grad[i] * params.grad_scale + weight_decay * param[i];
        state_sum[i] += g * g;
        param[i] -= decayed_lr * g / (state_sum[i].sqrt() + eps);
    }
}
