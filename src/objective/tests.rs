//! The head on masked tokens, its logits, and losses of the user's own.

mod masks;

use super::*;
use crate::nn::tests::{context, random};
use candle_core::{DType, Device, Tensor};

#[test]
fn logits_recycle_their_workspace_tensors() {
    let (batch, seq_len, hidden, vocab) = (2, 3, 8, 5);
    let head = CausalLm::new("lm_head.weight", vocab, hidden, 1e-6, 0.02);
    let ctx = context(batch, seq_len);
    let x = random(&[batch, seq_len, hidden], 0);
    head.output(&[random(&[hidden], 1), random(&[vocab, hidden], 2)], &x, &ctx).unwrap();
    // The normalized tokens, and a reciprocal root mean square of each.
    assert_eq!(ctx.workspace().free_bytes(), batch * seq_len * (hidden + 1) * size_of::<f32>());
}
