//! The linear layer in f64, element by element. All results are returned, none are accumulated.

/// x·weightᵀ with x: [n, inputs], weight: [outputs, inputs].
#[must_use]
pub fn forward(x: &[f64], weight: &[f64], inputs: usize) -> Vec<f64> {
    let mut y = Vec::new();
    for x in x.chunks_exact(inputs) {
        for weight in weight.chunks_exact(inputs) {
            y.push(x.iter().zip(weight).map(|(x, w)| x * w).sum());
        }
    }
    y
}

/// dy·weight with dy: [n, outputs], weight: [outputs, inputs].
#[must_use]
pub fn backward_input(dy: &[f64], weight: &[f64], inputs: usize) -> Vec<f64> {
    let outputs = weight.len() / inputs;
    let mut dx = Vec::new();
    for dy in dy.chunks_exact(outputs) {
        for i in 0..inputs {
            dx.push((0..outputs).map(|o| dy[o] * weight[o * inputs + i]).sum());
        }
    }
    dx
}

/// dyᵀ·x with dy: [n, outputs], x: [n, inputs].
#[must_use]
pub fn backward_weight(dy: &[f64], x: &[f64], inputs: usize, outputs: usize) -> Vec<f64> {
    let mut dweight = vec![0.0; outputs * inputs];
    for (dy, x) in dy.chunks_exact(outputs).zip(x.chunks_exact(inputs)) {
        for o in 0..outputs {
            for i in 0..inputs {
                dweight[o * inputs + i] += dy[o] * x[i];
            }
        }
    }
    dweight
}
