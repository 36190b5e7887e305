//! Faulty embeddings and heads that the ranks of tp divide. The suite must detect each.

use candle_core::Tensor;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use ulysses::comm::{Call, CollectiveOp, CommError, GroupWrapper, Pending, ProcessGroup};
use ulysses::kernels::elementwise;
use ulysses::model::{Model, ModelConfig};
use ulysses::nn::{InputLayer, LayerContext, LayerError, LocalBatch, ParameterSpec, Saved, TensorRank};
use ulysses::objective::{Losses, Objective};

use super::mesh_run::llama;

/// A fault in what the ranks of tp exchange for the head.
#[derive(Debug, Clone, Copy)]
pub enum HeadFault {
    /// The denominator has this rank's slice of the vocabulary only.
    DenominatorOfOneSlice,
    /// The logit of the label counts twice.
    LabelTwice,
    /// Gradients of hidden states are those of this rank's slice only.
    GradientOfOneSlice,
}

/// The group of tp, with a fault in the exchanges of the head, which are those of matrices: hidden states and statistics in turn, and
/// in the backward pass hidden states and their gradients.
#[derive(Debug)]
pub struct FaultyHeadGroup {
    inner: Arc<dyn ProcessGroup>,
    fault: HeadFault,
    exchanges: AtomicUsize,
}

impl FaultyHeadGroup {
    pub fn wrap(inner: Arc<dyn ProcessGroup>, fault: HeadFault) -> Arc<dyn ProcessGroup> {
        Arc::new(Self { inner, fault, exchanges: AtomicUsize::new(0) })
    }
}

impl GroupWrapper for FaultyHeadGroup {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        let is_head = call.op() == CollectiveOp::AllToAllStrided && call.inputs()[0].dims().len() == 2;
        if !is_head || self.exchanges.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return self.inner.start(call);
        }
        let is_statistics = call.inputs()[0].dims()[0] == 1;
        let (rank, ranks, fault) = (self.rank(), self.world_size(), self.fault);
        let output = call.outputs()[0].flatten_all()?;
        let of_rank = output.elem_count() / ranks;
        let half = of_rank / 2;
        let spoil = move || {
            for peer in 0..ranks {
                let of_peer = |first: usize, len: usize| output.narrow(0, peer * of_rank + first, len);
                match fault {
                    HeadFault::DenominatorOfOneSlice if is_statistics && peer != rank => {
                        elementwise::fill(&of_peer(0, half)?, f32::NEG_INFINITY)
                    }
                    HeadFault::LabelTwice if is_statistics => elementwise::scale(&of_peer(half, half)?, 2.0),
                    HeadFault::GradientOfOneSlice if !is_statistics && peer != rank => {
                        elementwise::fill(&of_peer(0, of_rank)?, 0.0)
                    }
                    _ => Ok(()),
                }
                .map_err(|error| CommError::Tensor(error.to_string()))?;
            }
            Ok(())
        };
        Ok(self.inner.start(call)?.then(spoil))
    }
}

/// An embedding that looks up the next row.
struct NextRow {
    inner: Box<dyn InputLayer>,
    vocab_size: u32,
}

impl InputLayer for NextRow {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.inner.parameters()
    }

    fn tensor_parallel(&self, tp: TensorRank) -> Option<Box<dyn InputLayer>> {
        let inner = self.inner.tensor_parallel(tp)?;
        Some(Box::new(Self { inner, vocab_size: self.vocab_size }))
    }

    fn forward(
        &self,
        params: &[Tensor],
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        let next: Vec<u32> = batch.all_input_ids.iter().map(|id| (id + 1) % self.vocab_size).collect();
        self.inner.forward(params, &LocalBatch { all_input_ids: &next, ..*batch }, ctx)
    }

    fn backward(
        &self,
        saved: Saved,
        dx: &Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<(), LayerError> {
        self.inner.backward(saved, dx, grads, ctx)
    }
}

/// A head whose gradient is that of the sum over tp, as if the ranks had the same rows.
struct SummedOverTp {
    inner: Box<dyn Objective>,
    ranks: usize,
}

impl Objective for SummedOverTp {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.inner.parameters()
    }

    fn tensor_parallel(&self, tp: TensorRank) -> Option<Box<dyn Objective>> {
        Some(Box::new(Self { inner: self.inner.tensor_parallel(tp)?, ranks: tp.size }))
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Losses, Saved), LayerError> {
        self.inner.forward(params, x, batch, ctx)
    }

    fn backward(
        &self,
        params: &[Tensor],
        saved: Saved,
        scale: f32,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let dx = self.inner.backward(params, saved, scale, grads, ctx)?;
        let of_projection = grads[1].iter();
        of_projection.into_iter().try_for_each(|grad| elementwise::scale(grad, self.ranks as f32))?;
        Ok(dx)
    }

    fn output(&self, params: &[Tensor], x: &Tensor, ctx: &LayerContext) -> Result<Tensor, LayerError> {
        self.inner.output(params, x, ctx)
    }
}

/// A model whose embedding is off by one row.
pub fn with_next_row(config: &ModelConfig) -> Model {
    let model = llama(config);
    Model { input: Box::new(NextRow { inner: model.input, vocab_size: config.vocab_size as u32 }), ..model }
}

/// A model whose head's gradient is summed over tp.
pub fn with_head_summed_over_tp(config: &ModelConfig) -> Model {
    let model = llama(config);
    Model { objective: Box::new(SummedOverTp { inner: model.objective, ranks: 1 }), ..model }
}
