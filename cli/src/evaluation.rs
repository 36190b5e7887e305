//! The loss of rows that are only looked at.

use anyhow::ensure;
use ulysses::data::{DataLoader, Dataset, LoaderOptions, Placement};
use ulysses::engine::Engine;
use ulysses::kernels::lm_head_loss::LossSum;

/// What came of some rows: the same on all ranks and, up to rounding, on every mesh.
#[derive(Clone, Copy)]
pub(super) struct Evaluation {
    pub(super) sum: LossSum,
    /// Forward passes of each rank.
    pub(super) micro_batches: u64,
}

impl Evaluation {
    /// In nats per token.
    pub(super) fn loss(&self) -> f64 {
        self.sum.sum / self.sum.valid_tokens as f64
    }

    pub(super) fn perplexity(&self) -> f64 {
        self.loss().exp()
    }
}

/// Runs the first `max_rows` rows, or all, in the order in which they are packed. Rows that the mesh needs besides are
/// fully masked. Collective.
pub(super) fn evaluate(
    engine: &mut Engine,
    data: &Dataset,
    placement: Placement,
    max_rows: Option<u64>,
) -> anyhow::Result<Evaluation> {
    let micro_batch = engine.config().micro_batch_size;
    let options = LoaderOptions { seed: 0, micro_batch, accumulation: 1, placement };
    let num_rows = (data.num_rows() as u64).min(max_rows.unwrap_or(u64::MAX));
    let mut loader = DataLoader::once_in_row_order(data.clone(), options)?.ending_at(num_rows);
    let micro_batches = loader.steps_left().unwrap_or(0);
    let mut sum = LossSum { sum: 0.0, valid_tokens: 0 };
    for _ in 0..micro_batches {
        let part = engine.evaluate(&loader.next_micro_batch()?)?;
        sum.sum += part.sum;
        sum.valid_tokens += part.valid_tokens;
    }
    ensure!(
        sum.valid_tokens > 0,
        "no token of the first {num_rows} row(s) of the data to evaluate has a label"
    );
    Ok(Evaluation { sum, micro_batches })
}
