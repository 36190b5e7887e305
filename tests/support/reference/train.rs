//! A training loop over the reference.

use super::batch::Batch;
use super::loss::loss_and_grads;
use super::optimizer::{Optimizer, clip_by_global_norm, global_norm};
use super::weights::{ReferenceConfig, Tensors, Weights, is_constant};
use anyhow::{Result, ensure};

/// The result of one step, before its update.
pub struct Step {
    pub loss: f64,
    /// Before clipping.
    pub grad_norm: f64,
    /// Before clipping.
    pub grads: Tensors,
}

/// A finished training run.
pub struct Training {
    pub steps: Vec<Step>,
    pub weights: Weights,
}

/// Trains copies of `weights` for `num_steps`; step `t` takes batch `t % batches.len()`, the
/// whole global batch at once. `clip` is the maximum gradient norm. A step whose batch has no
/// valid label is recorded (loss and norm 0) and updates neither weights nor optimizer state.
pub fn train(
    config: &ReferenceConfig,
    weights: &Weights,
    batches: &[Batch],
    optimizer: &mut dyn Optimizer,
    clip: Option<f64>,
    num_steps: usize,
) -> Result<Training> {
    ensure!(!batches.is_empty(), "no batch to train on");
    // Optimizers replace the entries of this copy, so the caller's weights do not change.
    let (constants, mut weights): (Weights, Weights) =
        weights.clone().into_iter().partition(|(name, _)| is_constant(name));
    let with_constants =
        |weights: &Weights| weights.clone().into_iter().chain(constants.clone()).collect::<Weights>();
    let mut steps = Vec::with_capacity(num_steps);
    for batch in batches.iter().cycle().take(num_steps) {
        let (loss, grads) = loss_and_grads(config, &with_constants(&weights), batch)?;
        if batch.num_valid_tokens() > 0 {
            match clip {
                Some(max_norm) => optimizer.step(&mut weights, &clip_by_global_norm(&grads, max_norm)?)?,
                None => optimizer.step(&mut weights, &grads)?,
            }
        }
        steps.push(Step { loss, grad_norm: global_norm(&grads)?, grads });
    }
    Ok(Training { steps, weights: with_constants(&weights) })
}
