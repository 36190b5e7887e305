//! Evaluation: the loss of held-out sequences.

use super::error::TrainerError;
use crate::comm::{CommError, ProcessGroup, ProcessGroupExt, ReduceOp};
use crate::data::{DataLoader, Dataset, LoaderOptions};
use crate::engine::Engine;
use crate::kernels::lm_head_loss::LossSum;

/// The loss of an evaluation: the same on all ranks and, up to rounding, on every mesh.
#[derive(Debug, Clone, Copy)]
pub struct Evaluation {
    /// Sum of the losses over all tokens with a label.
    pub sum: LossSum,
    /// Forward passes of each rank.
    pub micro_batches: u64,
}

impl Evaluation {
    /// Returns the mean loss, in nats per token.
    pub fn loss(&self) -> f64 {
        self.sum.sum / self.sum.valid_tokens as f64
    }

    /// Returns the perplexity, `e` to the power of the loss.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }
}

/// Evaluates the first `max_sequences` sequences, or all, in order. The last batch is padded with fully masked sequences.
/// Collective.
///
/// # Errors
/// When the data has no labels or cannot be read, or a forward pass fails.
pub fn evaluate(
    engine: &mut Engine,
    data: &Dataset,
    max_sequences: Option<u64>,
) -> Result<Evaluation, TrainerError> {
    let (micro_batch, rank) = (engine.config().micro_batch_size, engine.data_rank());
    let options = LoaderOptions { seed: 0, micro_batch, accumulation: 1, rank };
    let num_sequences = (data.num_sequences() as u64).min(max_sequences.unwrap_or(u64::MAX));
    let mut loader = DataLoader::once_in_order(data.clone(), options)?.ending_at(num_sequences);
    let micro_batches = loader.steps_left().unwrap_or(0);
    let mut sum = LossSum { sum: 0.0, valid_tokens: 0 };
    for _ in 0..micro_batches {
        let part = engine.evaluate(&loader.next_micro_batch()?)?;
        sum.sum += part.sum;
        sum.valid_tokens += part.valid_tokens;
    }
    match sum.valid_tokens {
        0 => Err(TrainerError::NoLabels { num_sequences }),
        _ => Ok(Evaluation { sum, micro_batches }),
    }
}

/// Returns the first rank's loss on all ranks, so that they make the same decisions. Collective.
pub(super) fn broadcast_loss(group: &dyn ProcessGroup, loss: f64) -> Result<f64, CommError> {
    Ok(f64::from_bits(broadcast_value(group, loss.to_bits())?))
}

/// Returns the first rank's value on all ranks. Collective.
pub(super) fn broadcast_value(group: &dyn ProcessGroup, own: u64) -> Result<u64, CommError> {
    let bits = if group.rank() == 0 { own.cast_signed() } else { i64::MIN };
    Ok(group.all_reduce_values(&[bits], ReduceOp::Max)?[0].cast_unsigned())
}
