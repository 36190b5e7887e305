//! Gated linear units in f64.

use super::Activation;

/// activation(gate) · up.
#[must_use]
pub fn forward(activation: Activation, gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(g, u)| activate(activation, *g).0 * u).collect()
}

/// (dgate, dup) for the upstream gradient dy.
#[must_use]
pub fn backward(activation: Activation, dy: &[f64], gate: &[f64], up: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let gradient = |i: usize| {
        let (activated, derivative) = activate(activation, gate[i]);
        (dy[i] * up[i] * derivative, dy[i] * activated)
    };
    (0..dy.len()).map(gradient).unzip()
}

/// The activation and its derivative.
fn activate(activation: Activation, g: f64) -> (f64, f64) {
    match activation {
        Activation::Silu => {
            let s = 1.0 / (1.0 + (-g).exp());
            (g * s, s * (1.0 + g * (1.0 - s)))
        }
        Activation::GeluTanh => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let t = (c * (g + 0.044_715 * g.powi(3))).tanh();
            let slope = c * (1.0 + 3.0 * 0.044_715 * g * g);
            (0.5 * g * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * slope)
        }
        Activation::Gelu => {
            // Φ(g) = ½ + φ(g) · (g + g³/3 + g⁵/(3·5) + …). Beyond 10 it is 0 or 1.
            let x = g.clamp(-10.0, 10.0);
            let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
            let (mut term, mut sum) = (x, x);
            for odd in (3..600).step_by(2) {
                term *= x * x / f64::from(odd);
                sum += term;
            }
            let cumulative = 0.5 + density * sum;
            (g * cumulative, cumulative + g * density)
        }
        Activation::SquaredRelu => (g.max(0.0).powi(2), 2.0 * g.max(0.0)),
        Activation::Sigmoid => {
            let s = 1.0 / (1.0 + (-g).exp());
            (s, s * (1.0 - s))
        }
        Activation::Identity => (g, 1.0),
    }
}
