//! Activation checkpointing of a token mixer: the tensors that are saved, and recomputation from them.

use super::{MixerSaved, TokenMixer};
use crate::nn::{AttentionSaved, Branch, ForwardPass, LayerContext, LayerError, Saves};
use candle_core::Tensor;

impl TokenMixer {
    /// As [`forward`](Self::forward). Appends to `checkpoint` what is computed only once: if the context says so, attention output
    /// and lse of every head chunk.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_checkpointed(
        &self,
        branch: &Branch,
        x: &Tensor,
        checkpoint: &mut Vec<Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let keep = |saved: MixerSaved| match pass.ctx.saves_attention_output() {
            true => checkpoint.extend(saved.into_checkpoint(pass)),
            false => saved.recycle(pass),
        };
        self.forward(branch, x, Saves::Checkpoint, keep, pass)
    }

    /// The output and the state for the backward pass, from what [`forward_checkpointed`](Self::forward_checkpointed) appended.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), or a checkpoint of another layer.
    pub fn recompute(
        &self,
        branch: &Branch,
        x: &Tensor,
        checkpoint: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Vec<MixerSaved>), LayerError> {
        let Some(attention) = self.attention().filter(|_| pass.ctx.saves_attention_output()) else {
            let mut saved = Vec::new();
            let output = self.forward(branch, x, Saves::Whole, |state| saved.push(state), pass)?;
            return Ok((output, saved));
        };
        let mut chunks = saved_chunks(checkpoint, pass)?;
        let output = attention.forward_from_outputs(branch, x, &mut chunks, pass)?;
        Ok((output, chunks.into_iter().map(MixerSaved::Attention).collect()))
    }

    /// As [`recompute`](Self::recompute), where the output is not needed. An attention, which must have no output gate, is not run:
    /// [`backward`](Self::backward) computes again what is missing. `input` is called if the module must run.
    ///
    /// # Errors
    /// As [`recompute`](Self::recompute).
    pub fn recompute_state(
        &self,
        branch: &Branch,
        input: impl FnOnce() -> Result<Tensor, LayerError>,
        checkpoint: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<Vec<MixerSaved>, LayerError> {
        if self.recomputes_chunks(pass.ctx) {
            return Ok(Vec::new());
        }
        if self.attention().is_some() {
            return Ok(saved_chunks(checkpoint, pass)?.into_iter().map(MixerSaved::Attention).collect());
        }
        let x = input()?;
        let (output, saved) = self.recompute(branch, &x, checkpoint, pass)?;
        pass.recycle([output]);
        Ok(saved)
    }

    /// Returns whether [`backward`](Self::backward) recomputes an attention of which the checkpoint has nothing, one head chunk after
    /// the other.
    pub fn recomputes_chunks(&self, ctx: &LayerContext) -> bool {
        self.attention().is_some() && !ctx.saves_attention_output()
    }
}

/// The state of every head chunk of an attention, from a checkpoint that has outputs.
fn saved_chunks(
    checkpoint: &mut impl Iterator<Item = Tensor>,
    pass: &ForwardPass<'_>,
) -> Result<Vec<AttentionSaved>, LayerError> {
    let chunks = (0..pass.ctx.tiling().head_chunks).map(|_| {
        let tensors = checkpoint.next().zip(checkpoint.next());
        let foreign = || LayerError::ForeignSavedState { layer: pass.layer.to_owned() };
        Ok(AttentionSaved::from_checkpoint(tensors.ok_or_else(foreign)?.into()))
    });
    chunks.collect()
}
