//! Activation checkpointing of a token mixer: the tensors that are saved, and recomputation from them.

use super::{MixerSaved, TokenMixer};
use crate::nn::{
    AttentionSaved, Branch, BranchInput, ForwardPass, LatentAttentionSaved, LayerContext, LayerError, Saves,
};
use candle_core::Tensor;

/// The tensors of a token mixer that a forward pass keeps for the backward pass.
pub enum MixerKept {
    /// The state: of every head chunk of an attention, or of all heads.
    State(Vec<MixerSaved>),
    /// Those that are computed only once: if the context says so, attention output and lse of every head chunk.
    Checkpoint(Vec<Tensor>),
}

impl MixerKept {
    /// Whether it is the state.
    pub fn is_state(&self) -> bool {
        matches!(self, Self::State(_))
    }

    /// The states; none of a checkpoint.
    pub fn into_states(self) -> Vec<MixerSaved> {
        if let Self::State(states) = self { states } else { Vec::new() }
    }

    /// The tensors of a checkpoint; none of the state.
    pub fn into_checkpoint(self) -> Vec<Tensor> {
        if let Self::Checkpoint(tensors) = self { tensors } else { Vec::new() }
    }

    pub(super) fn saves(&self) -> Saves {
        if self.is_state() { Saves::Whole } else { Saves::Checkpoint }
    }

    pub(super) fn keep(&mut self, saved: MixerSaved, pass: &ForwardPass<'_>) {
        match self {
            Self::State(states) => states.push(saved),
            Self::Checkpoint(tensors) if pass.ctx.saves_attention_output() => {
                tensors.extend(saved.into_checkpoint(pass));
            }
            Self::Checkpoint(_) => saved.recycle(pass),
        }
    }
}

impl TokenMixer {
    /// The output and the state for the backward pass, from what [`forward`](Self::forward) kept for a checkpoint.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), or a checkpoint of another layer.
    pub fn recompute(
        &self,
        input: BranchInput<'_>,
        checkpoint: &mut impl Iterator<Item = Tensor>,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Vec<MixerSaved>), LayerError> {
        match self {
            Self::Attention(attention) if pass.ctx.saves_attention_output() => {
                let mut chunks = saved_chunks(checkpoint, pass)?;
                let output = attention.forward_from_outputs(input, &mut chunks, pass)?;
                Ok((output, chunks.into_iter().map(MixerSaved::Attention).collect()))
            }
            Self::LatentAttention(latent) if pass.ctx.saves_attention_output() => {
                let saved = LatentAttentionSaved::from_checkpoint(saved_chunk(checkpoint, pass)?);
                let output = latent.forward_from_output(input, &saved, pass)?;
                Ok((output, vec![MixerSaved::LatentAttention(saved)]))
            }
            _ => {
                let mut kept = MixerKept::State(Vec::new());
                let output = self.forward(input, &mut kept, pass)?;
                Ok((output, kept.into_states()))
            }
        }
    }

    /// As [`recompute`](Self::recompute), where the output is not needed. An attention, which must have no output gate, and an MLP are
    /// not run: [`backward`](Self::backward) computes again what is missing. `input` is called if the module must run.
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
        if self.recomputes_chunks(pass.ctx) || matches!(self, Self::Mlp(_)) {
            return Ok(Vec::new());
        }
        if self.attention().is_some() {
            return Ok(saved_chunks(checkpoint, pass)?.into_iter().map(MixerSaved::Attention).collect());
        }
        if matches!(self, Self::LatentAttention(_)) && pass.ctx.saves_attention_output() {
            let saved = LatentAttentionSaved::from_checkpoint(saved_chunk(checkpoint, pass)?);
            return Ok(vec![MixerSaved::LatentAttention(saved)]);
        }
        let x = input()?;
        let (output, saved) = self.recompute(branch.input(&x), checkpoint, pass)?;
        pass.recycle([output]);
        Ok(saved)
    }

    /// Returns whether the checkpoint of a block also has the mixer's output, if the MLP's input follows from it: where attention is
    /// recomputed in several head chunks. Else every chunk would be recomputed twice, for the MLP's input and in its own backward pass.
    pub fn checkpoint_has_output(&self, ctx: &LayerContext) -> bool {
        ctx.tiling().head_chunks > 1 && self.recomputes_chunks(ctx)
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
    let chunk = |_| Ok(AttentionSaved::from_checkpoint(saved_chunk(checkpoint, pass)?));
    (0..pass.ctx.tiling().head_chunks).map(chunk).collect()
}

/// Output and lse of a head chunk.
fn saved_chunk(
    checkpoint: &mut impl Iterator<Item = Tensor>,
    pass: &ForwardPass<'_>,
) -> Result<[Tensor; 2], LayerError> {
    let tensors = checkpoint.next().zip(checkpoint.next()).map(<[Tensor; 2]>::from);
    tensors.ok_or_else(|| pass.foreign_state())
}
