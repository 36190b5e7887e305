//! SwiGLU in f64.

/// silu(gate) · up.
#[must_use]
pub fn forward(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(g, u)| g * sigmoid(*g) * u).collect()
}

/// (dgate, dup) for the upstream gradient dy.
#[must_use]
pub fn backward(dy: &[f64], gate: &[f64], up: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let gradient = |i: usize| {
        let (g, s) = (gate[i], sigmoid(gate[i]));
        (dy[i] * up[i] * s * (1.0 + g * (1.0 - s)), dy[i] * g * s)
    };
    (0..dy.len()).map(gradient).unzip()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
