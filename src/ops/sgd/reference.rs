//! The step in f64, branch for branch as PyTorch documents it.

use super::SgdParams;

/// Updates param and the momentum buffer in place; the buffer is untouched without momentum.
pub fn step(param: &mut [f64], grad: &[f64], buffer: &mut [f64], params: &SgdParams) {
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
