//! Loss and gradients of a batch.

use super::batch::{Batch, IGNORED};
use super::model::row_logits;
use super::weights::{ReferenceConfig, Tensors, Weights, is_constant};
use anyhow::{Context, Result};
use candle_core::{D, DType, Device, Tensor};
use std::collections::BTreeMap;

/// The result of a forward pass over a batch.
pub struct Forward {
    /// Per sequence, `[seq_len, vocab_size]`.
    pub logits: Vec<Tensor>,
    /// Per sequence, `[seq_len]`: negative log-likelihood, 0 where the label is ignored.
    pub token_losses: Vec<Tensor>,
    /// Scalar: sum of the token losses divided by the number of valid tokens of the whole batch.
    pub loss: Tensor,
}

/// Logits and mean loss. A batch without a valid label has loss 0.
pub fn forward(config: &ReferenceConfig, weights: &Weights, batch: &Batch) -> Result<Forward> {
    forward_over(config, weights, batch, batch.num_valid_tokens().max(1) as f64)
}

/// [`forward`] with the sum of the token losses divided by `denominator`.
fn forward_over(
    config: &ReferenceConfig,
    weights: &Weights,
    batch: &Batch,
    denominator: f64,
) -> Result<Forward> {
    batch.validate()?;
    let (mut logits, mut token_losses) = (Vec::new(), Vec::new());
    let mut sum = Tensor::zeros((), DType::F64, &Device::Cpu)?;
    for row in 0..batch.num_rows() {
        let row_logits = row_logits(config, weights, &batch.input_ids[row], &batch.position_ids[row])?;
        let losses = cross_entropy(&row_logits, &batch.labels[row])?;
        sum = (sum + losses.sum_all()?)?;
        logits.push(row_logits);
        token_losses.push(losses);
    }
    Ok(Forward { logits, token_losses, loss: (sum / denominator)? })
}

/// Per token `log Σ exp(logits) − logits[label]`, 0 where the label is ignored: `[S, V]` → `[S]`.
fn cross_entropy(logits: &Tensor, labels: &[i64]) -> Result<Tensor> {
    let maximum = logits.max_keepdim(D::Minus1)?.detach();
    let shifted = logits.broadcast_sub(&maximum)?;
    let log_sum_exp = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?; // [S, 1]
    let (mut targets, mut counts) = (Vec::new(), Vec::new());
    for &label in labels {
        let ignored = label == IGNORED;
        let target = if ignored { 0 } else { label };
        targets.push(u32::try_from(target).with_context(|| format!("label {label}"))?);
        counts.push(if ignored { 0.0 } else { 1.0 });
    }
    let targets = Tensor::from_vec(targets, (labels.len(), 1), &Device::Cpu)?;
    let counts = Tensor::from_vec(counts, (labels.len(), 1), &Device::Cpu)?;
    let losses = (log_sum_exp - shifted.gather(&targets, D::Minus1)?)?;
    Ok((losses * counts)?.squeeze(D::Minus1)?)
}

/// The mean loss over all valid tokens of the batch, and its gradient for every parameter.
pub fn loss_and_grads(config: &ReferenceConfig, weights: &Weights, batch: &Batch) -> Result<(f64, Tensors)> {
    loss_and_grads_over(config, weights, batch, batch.num_valid_tokens().max(1) as f64)
}

/// [`loss_and_grads`] of the sum of token losses over a given `denominator`.
pub fn loss_and_grads_over(
    config: &ReferenceConfig,
    weights: &Weights,
    batch: &Batch,
    denominator: f64,
) -> Result<(f64, Tensors)> {
    let loss = forward_over(config, weights, batch, denominator)?.loss;
    let mut gradients = loss.backward()?;
    let mut grads = BTreeMap::new();
    for (name, weight) in weights.iter().filter(|(name, _)| !is_constant(name)) {
        let grad = gradients.remove(weight).with_context(|| format!("no gradient for {name}"))?;
        grads.insert(name.clone(), grad.detach());
    }
    Ok((loss.to_scalar()?, grads))
}

/// DeepSpeed's normalization: the mean over micro batches (of all dp ranks and
/// accumulation steps) of each one's mean over its own valid tokens.
pub fn micro_batch_loss_and_grads(
    config: &ReferenceConfig,
    weights: &Weights,
    micro_batches: &[Batch],
) -> Result<(f64, Tensors)> {
    let (mut loss, mut grads) = (0.0, Tensors::new());
    for batch in micro_batches {
        let denominator = batch.num_valid_tokens().max(1) * micro_batches.len();
        let (part, part_grads) = loss_and_grads_over(config, weights, batch, denominator as f64)?;
        loss += part;
        for (name, grad) in part_grads {
            let sum = match grads.get(&name) {
                Some(sum) => (sum + grad)?,
                None => grad,
            };
            grads.insert(name, sum);
        }
    }
    Ok((loss, grads))
}
