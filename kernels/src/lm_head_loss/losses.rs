//! The losses of a forward pass.

use super::LossSum;
use crate::OpError;
use crate::tensor::to_vec;
use candle_core::Tensor;

/// The token losses of a micro batch; a GPU may still be computing them.
#[derive(Debug, Default)]
pub struct Losses {
    /// Losses that the CPU has summed, and the number of all tokens with a label.
    summed: LossSum,
    /// f32, `[n]` each; 0 for tokens without a label.
    on_device: Vec<Tensor>,
}

impl Losses {
    pub(super) fn summed(summed: LossSum) -> Self {
        Self { summed, on_device: Vec::new() }
    }

    /// Losses that a device may still be computing, f32 of shape `[n]`, of a number of tokens with a label.
    pub fn from_tensor(losses: Tensor, valid_tokens: u64) -> Self {
        Self { summed: LossSum { sum: 0.0, valid_tokens }, on_device: vec![losses] }
    }

    /// Appends the losses of the tokens that follow.
    pub fn append(&mut self, following: Self) {
        self.summed.sum += following.summed.sum;
        self.summed.valid_tokens += following.summed.valid_tokens;
        self.on_device.extend(following.on_device);
    }

    /// Number of tokens with a label.
    #[must_use]
    pub fn valid_tokens(&self) -> u64 {
        self.summed.valid_tokens
    }

    /// Sums the losses. Synchronizes with a GPU, and sums on the host in f64, in token order.
    ///
    /// # Errors
    /// A failure of the GPU.
    pub fn sum(&self) -> Result<LossSum, OpError> {
        let mut total = self.summed;
        for losses in &self.on_device {
            let op = "lm_head_loss::Losses::sum";
            let losses = to_vec::<f32>(losses).map_err(|source| OpError::Candle { op, source })?;
            total.sum += losses.into_iter().map(f64::from).sum::<f64>();
        }
        Ok(total)
    }
}
