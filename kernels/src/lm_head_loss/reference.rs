//! Linear + cross-entropy in f64 with all logits at once.

use super::{IGNORED, LossSum};
use crate::linear;

/// The loss and each token's logsumexp (0 if ignored); x: [n, d], weight: [vocab, d].
#[must_use]
pub fn forward(x: &[f64], weight: &[f64], labels: &[i64], d: usize) -> (LossSum, Vec<f64>) {
    let logits = linear::reference::forward(x, weight, d);
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
    let vocab_size = weight.len() / d;
    let (_, lse) = forward(x, weight, labels, d);
    let mut dlogits = linear::reference::forward(x, weight, d);
    for ((row, label), lse) in dlogits.chunks_exact_mut(vocab_size).zip(labels).zip(lse) {
        for (j, value) in row.iter_mut().enumerate() {
            let hit = if j as i64 == *label { 1.0 } else { 0.0 };
            *value = if *label == IGNORED { 0.0 } else { scale * ((*value - lse).exp() - hit) };
        }
    }
    let dx = linear::reference::backward_input(&dlogits, weight, d);
    let dweight = linear::reference::backward_weight(&dlogits, x, d, vocab_size);
    (dx, dweight)
}
