//! The logits of an attention call: their form, and those without a key.

use candle_core::{Result, Tensor};
use std::ops::Range;

/// The scale and the soft cap of attention logits, applied before the softmax.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Logits {
    /// The factor; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Then `softcap · tanh(logit / softcap)`, which is positive; `None` without a cap.
    pub softcap: Option<f32>,
}

/// Learned logits, one per query head, that take part in the softmax and contribute no value
/// ([`attention_sink`](crate::attention_sink)).
#[derive(Debug, Clone)]
pub struct Sinks {
    /// The logits, `[num_heads]`, of the element type of the queries.
    pub logits: Tensor,
    /// Their gradient in f32, to which a backward pass adds that of its tokens; `None` if nothing needs it.
    pub gradient: Option<Tensor>,
}

impl Sinks {
    /// Those of some query heads. Shares the storage.
    ///
    /// # Errors
    /// Heads that do not exist.
    pub fn heads(&self, heads: &Range<usize>) -> Result<Self> {
        let of_heads = |tensor: &Tensor| tensor.narrow(0, heads.start, heads.len());
        let gradient = self.gradient.as_ref().map(of_heads).transpose()?;
        Ok(Self { logits: of_heads(&self.logits)?, gradient })
    }
}
