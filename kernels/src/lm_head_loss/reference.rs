//! Linear + cross-entropy in f64 with all logits at once.

use super::{IGNORED, LossSum};
use crate::linear;

/// The loss and each token's logsumexp (0 if ignored); x: [n, d], weight: [vocab, d].
#[must_use]
pub fn forward(x: &[f64], weight: &[f64], labels: &[i64], d: usize) -> (LossSum, Vec<f64>) {
    forward_capped(x, weight, labels, d, None)
}

/// As [`forward`], of logits with a soft cap.
#[must_use]
pub fn forward_capped(
    x: &[f64],
    weight: &[f64],
    labels: &[i64],
    d: usize,
    softcap: Option<f64>,
) -> (LossSum, Vec<f64>) {
    let logits: Vec<f64> =
        linear::reference::forward(x, weight, d).into_iter().map(|logit| capped(logit, softcap)).collect();
    let mut loss = LossSum::default();
    let mut lse = Vec::new();
    for (logits, label) in logits.chunks_exact(weight.len() / d).zip(labels) {
        if *label == IGNORED {
            lse.push(0.0);
            continue;
        }
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let value = max + logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
        loss.sum += value - logits[*label as usize];
        loss.valid_tokens += 1;
        lse.push(value);
    }
    (loss, lse)
}

/// (dx, dweight) of `scale` times the summed loss.
#[must_use]
pub fn backward(x: &[f64], weight: &[f64], labels: &[i64], scale: f64, d: usize) -> (Vec<f64>, Vec<f64>) {
    backward_capped(x, weight, labels, scale, d, None)
}

/// As [`backward`], of logits with a soft cap.
#[must_use]
pub fn backward_capped(
    x: &[f64],
    weight: &[f64],
    labels: &[i64],
    scale: f64,
    d: usize,
    softcap: Option<f64>,
) -> (Vec<f64>, Vec<f64>) {
    let vocab_size = weight.len() / d;
    let (_, lse) = forward_capped(x, weight, labels, d, softcap);
    let mut dlogits = linear::reference::forward(x, weight, d);
    for ((row, label), lse) in dlogits.chunks_exact_mut(vocab_size).zip(labels).zip(lse) {
        for (j, value) in row.iter_mut().enumerate() {
            let hit = if j as i64 == *label { 1.0 } else { 0.0 };
            let slope = softcap.map_or(1.0, |cap| 1.0 - (*value / cap).tanh().powi(2));
            let difference = (capped(*value, softcap) - lse).exp() - hit;
            *value = if *label == IGNORED { 0.0 } else { scale * difference * slope };
        }
    }
    let dx = linear::reference::backward_input(&dlogits, weight, d);
    let dweight = linear::reference::backward_weight(&dlogits, x, d, vocab_size);
    (dx, dweight)
}

fn capped(logit: f64, softcap: Option<f64>) -> f64 {
    softcap.map_or(logit, |cap| cap * (logit / cap).tanh())
}
