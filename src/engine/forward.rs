//! The forward pass.

use super::{Engine, EngineError};
use crate::data::MicroBatch;
use crate::mesh::shard_range;
use crate::model::{HeadSaved, LayerContext, Saved};
use crate::ops::cross_entropy::LossSum;
use candle_core::Tensor;

/// A micro batch's loss on this rank, and what its backward pass needs.
#[must_use]
pub struct Loss {
    local: LossSum,
    pub(super) tape: Tape,
}

/// What the forward pass leaves for the backward pass.
pub(super) struct Tape {
    pub(super) ctx: LayerContext,
    /// Steps that were done when it was made: the parameters that it saw.
    pub(super) step: u64,
    pub(super) rows_hash: u64,
    pub(super) input_ids: Vec<u32>,
    pub(super) labels: Vec<i64>,
    /// Input of every layer.
    pub(super) inputs: Vec<Tensor>,
    /// State of every layer, or nothing where it is recomputed.
    pub(super) saved: Vec<Option<Saved>>,
    /// Output of the last layer.
    pub(super) hidden: Tensor,
    pub(super) head: HeadSaved,
}

impl Loss {
    /// Sum of the token losses of this rank's tokens.
    pub fn sum(&self) -> f64 {
        self.local.sum
    }

    /// Tokens of this rank that have a label.
    pub fn valid_tokens(&self) -> u64 {
        self.local.valid_tokens
    }

    /// Bytes of the tensors kept for the backward pass; one that is kept twice counts twice.
    pub fn saved_bytes(&self) -> usize {
        let layers: usize = self.tape.saved.iter().flatten().map(Saved::bytes).sum();
        let inputs = if self.tape.saved.iter().any(Option::is_none) { &self.tape.inputs[..] } else { &[] };
        let inputs: usize = inputs.iter().map(crate::tensor::bytes).sum();
        layers + inputs + self.tape.head.bytes()
    }
}

impl Engine {
    /// Runs the model on this rank's shard of a micro batch. Collective.
    ///
    /// # Errors
    /// A batch that does not fit the config, a token or label outside the vocabulary, or
    /// failed communication.
    pub fn forward(&mut self, batch: &MicroBatch) -> Result<Loss, EngineError> {
        self.check_usable()?;
        // A loss that was dropped instead of going backward leaves its head gathered.
        self.zero.release_all();
        let (got, expected) = (batch.batch, self.config.micro_batch_size);
        if got != expected {
            let what = "its number of rows (train_micro_batch_size_per_gpu)";
            return Err(EngineError::MicroBatch { what, got, expected });
        }
        let ctx = self.context(batch)?;
        let mut inputs = Vec::with_capacity(self.model.layers.len());
        let mut saved = Vec::with_capacity(self.model.layers.len());
        let recompute = self.config.activation_checkpointing;
        let hidden = self.run_layers(&batch.input_ids, &ctx, |x, state| {
            inputs.push(x);
            saved.push((!recompute).then_some(state));
        })?;
        let head_unit = self.head_unit();
        let params = self.zero.parameters(head_unit)?;
        let (norm, projection) = head_views(&params, self.model.is_tied());
        let (local, head) = self.model.head.forward(norm, projection, &hidden, &batch.labels, &ctx)?;
        let (input_ids, labels) = (batch.input_ids.clone(), batch.labels.clone());
        let (step, rows_hash) = (self.attempted_steps, batch.rows_hash);
        Ok(Loss {
            local,
            tape: Tape { ctx, step, rows_hash, input_ids, labels, inputs, saved, hidden, head },
        })
    }

    /// Sum of the token losses and number of valid tokens of a held-out batch, over the whole
    /// mesh and without a gradient: their quotient is the loss. Collective; each dp rank brings
    /// rows of its own, any number of them.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn evaluate(&mut self, batch: &MicroBatch) -> Result<LossSum, EngineError> {
        self.check_usable()?;
        let sent = self.bytes_sent();
        self.check_rows(batch.rows_hash)?;
        let ctx = self.context(batch)?;
        let hidden = self.run_layers(&batch.input_ids, &ctx, |_, _| {})?;
        let head_unit = self.head_unit();
        let params = self.zero.parameters(head_unit)?;
        let (norm, projection) = head_views(&params, self.model.is_tied());
        let (local, _) = self.model.head.forward(norm, projection, &hidden, &batch.labels, &ctx)?;
        self.zero.release(head_unit);
        let [sum, valid_tokens] = self.sum_over_mesh([local.sum, local.valid_tokens as f64])?;
        // A step's metrics count what the step sent.
        self.reported_bytes += self.bytes_sent() - sent;
        Ok(LossSum { sum, valid_tokens: valid_tokens as u64 })
    }

    /// Logits of this rank's tokens, `[batch, seq_local, vocab]`, for checks: training
    /// never holds them. Collective.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn logits(&mut self, batch: &MicroBatch) -> Result<Tensor, EngineError> {
        self.check_usable()?;
        let ctx = self.context(batch)?;
        let hidden = self.run_layers(&batch.input_ids, &ctx, |_, _| {})?;
        let head_unit = self.head_unit();
        let params = self.zero.parameters(head_unit)?;
        let (norm, projection) = head_views(&params, self.model.is_tied());
        let logits = self.model.head.logits(norm, projection, &hidden, &ctx)?;
        self.zero.release(head_unit);
        Ok(logits)
    }

    /// Embedding and layers. `keep` receives every layer's input and saved state; the
    /// parameters of a layer are gathered before and released after it, the next one's
    /// gather runs meanwhile.
    fn run_layers(
        &mut self,
        input_ids: &[u32],
        ctx: &LayerContext,
        mut keep: impl FnMut(Tensor, Saved),
    ) -> Result<Tensor, EngineError> {
        let mut x = self.embed(input_ids, ctx)?;
        for index in 0..self.model.layers.len() {
            let params = self.zero.parameters(index + 1)?;
            self.zero.prefetch(self.unit_after(index))?;
            let (y, state) = self.model.layers[index].forward(&params, &x, ctx)?;
            self.zero.release(index + 1);
            keep(std::mem::replace(&mut x, y), state);
        }
        Ok(x)
    }

    /// Looks up the embedding. The views end here, or they would keep the gathered matrix
    /// beyond its release.
    fn embed(&mut self, input_ids: &[u32], ctx: &LayerContext) -> Result<Tensor, EngineError> {
        let params = self.zero.parameters(0)?;
        self.zero.prefetch(if self.model.layers.is_empty() { self.head_unit() } else { 1 })?;
        let x = self.model.embedding.forward(&params[0], input_ids, ctx)?;
        self.zero.release(0);
        Ok(x)
    }

    fn context(&self, batch: &MicroBatch) -> Result<LayerContext, EngineError> {
        let sp = &self.groups.sp;
        let shard = shard_range(batch.seq_len, sp.world_size(), sp.rank());
        let tokens = batch.batch * shard.len();
        let row_end = batch.cu_seqlens.first().and_then(|row| row.last()).map_or(0, |&end| end as usize);
        let sizes = [
            ("the number of rows that its document boundaries cover", batch.cu_seqlens.len(), batch.batch),
            ("the end of its first row's document boundaries", row_end, batch.seq_len),
            ("the first token of its shard", batch.shard.start, shard.start),
            ("the end of its shard", batch.shard.end, shard.end),
            ("the number of its tokens on this rank", batch.input_ids.len(), tokens),
            ("the number of its labels on this rank", batch.labels.len(), tokens),
            ("the number of its position ids on this rank", batch.position_ids.len(), tokens),
        ];
        if let Some((what, got, expected)) = sizes.into_iter().find(|(_, got, expected)| got != expected) {
            return Err(EngineError::MicroBatch { what, got, expected });
        }
        Ok(LayerContext::new(
            batch.shard.clone(),
            batch.position_ids.clone(),
            batch.cu_seqlens.clone(),
            self.attention.clone(),
            self.workspace.clone(),
        )?)
    }
}

/// Norm and projection among the parameters (or gradients) of the head's unit, which is the
/// embedding's when the two are tied.
pub(super) fn head_views(views: &[Tensor], tied: bool) -> (&Tensor, &Tensor) {
    if tied { (&views[1], &views[0]) } else { (&views[0], &views[1]) }
}
