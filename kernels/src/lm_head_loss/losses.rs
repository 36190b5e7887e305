//! The losses of a forward pass.

use super::LossSum;
use crate::OpError;
use crate::tensor::to_vec;
use candle_core::Tensor;

/// The token losses of a micro batch; a GPU may still be computing them.
#[derive(Debug)]
pub struct Losses(Values);

#[derive(Debug)]
enum Values {
    Summed(LossSum),
    /// f32, `[n]`; 0 for tokens without a label.
    OnDevice {
        losses: Tensor,
        valid_tokens: u64,
    },
}

impl Losses {
    pub(super) fn summed(sum: LossSum) -> Self {
        Self(Values::Summed(sum))
    }

    pub(super) fn on_device(losses: Tensor, valid_tokens: u64) -> Self {
        Self(Values::OnDevice { losses, valid_tokens })
    }

    /// Number of tokens with a label.
    #[must_use]
    pub fn valid_tokens(&self) -> u64 {
        match &self.0 {
            Values::Summed(sum) => sum.valid_tokens,
            Values::OnDevice { valid_tokens, .. } => *valid_tokens,
        }
    }

    /// Sums the losses. Synchronizes with a GPU, and sums on the host in f64, in token order.
    ///
    /// # Errors
    /// A failure of the GPU.
    pub fn sum(&self) -> Result<LossSum, OpError> {
        match &self.0 {
            Values::Summed(sum) => Ok(*sum),
            Values::OnDevice { losses, valid_tokens } => {
                let op = "lm_head_loss::Losses::sum";
                let losses = to_vec::<f32>(losses).map_err(|source| OpError::Candle { op, source })?;
                let sum = losses.into_iter().map(f64::from).sum();
                Ok(LossSum { sum, valid_tokens: *valid_tokens })
            }
        }
    }
}
