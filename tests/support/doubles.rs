//! Faulty implementations of the library's traits. The suite must detect each.

use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use ulysses::comm::{
    Call, CallSignature, CollectiveOp, CommError, GroupWrapper, Pending, ProcessGroup, ProcessGroupExt,
};
use ulysses::kernels::attention::{
    AttentionCompute, AttentionError, AttentionLayout, FlashAttention, QkvGradients, Upstream,
};
use ulysses::kernels::{OpError, Workspace};
use ulysses::nn::{Layer, LayerContext, LayerError, ParameterSpec, Saved};

/// A fault in the f32 sums of a [`FaultyGroup`], which are the gradients.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// Every rank keeps its own values.
    SkipsTheSum,
    /// The sum is multiplied by the number of ranks (DeepSpeed at stages 0 to 2).
    ScalesByWorldSize,
}

/// A process group that sums gradients incorrectly.
#[derive(Debug)]
pub struct FaultyGroup {
    inner: Arc<dyn ProcessGroup>,
    fault: Fault,
}

impl FaultyGroup {
    pub fn wrap(inner: Arc<dyn ProcessGroup>, fault: Fault) -> Arc<dyn ProcessGroup> {
        Arc::new(Self { inner, fault })
    }
}

impl GroupWrapper for FaultyGroup {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        let tensor_error = |error: OpError| CommError::Tensor(error.to_string());
        match (self.fault, call.signature()) {
            (Fault::SkipsTheSum, CallSignature::AllReduce { elements, .. })
                if elements.dtype == DType::F32 =>
            {
                Ok(Pending::ready())
            }
            (Fault::ScalesByWorldSize, CallSignature::AllReduce { elements, .. })
                if elements.dtype == DType::F32 =>
            {
                let (sum, factor) = (call.outputs()[0].clone(), self.world_size() as f32);
                let scale = move || ulysses::kernels::elementwise::scale(&sum, factor).map_err(tensor_error);
                Ok(self.inner.start(call)?.then(scale))
            }
            (Fault::SkipsTheSum, CallSignature::ReduceScatter { chunk, .. }) => {
                let own = call.inputs()[0].narrow(0, self.rank() * chunk.count, chunk.count)?;
                ulysses::kernels::strided_copy::copy(&own, &call.outputs()[0]).map_err(tensor_error)?;
                Ok(Pending::ready())
            }
            _ => self.inner.start(call),
        }
    }
}

/// A fault of the group of a pipeline's ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PipelineFault {
    /// A rank gets the message of the previous micro batch; the first one is right.
    SendsThePreviousMessage,
    /// A stage averages over two micro batches what the others have averaged too.
    HalvesMessages,
    /// A rank knows the squares of its own gradients only.
    SkipsTheNorm,
}

/// The group of a pipeline's ranks with a [`PipelineFault`].
#[derive(Debug)]
pub struct FaultyPipeline {
    inner: Arc<dyn ProcessGroup>,
    fault: PipelineFault,
    /// The last message to each rank.
    sent: Mutex<HashMap<usize, Tensor>>,
}

impl FaultyPipeline {
    pub fn wrap(inner: Arc<dyn ProcessGroup>, fault: PipelineFault) -> Arc<dyn ProcessGroup> {
        Arc::new(Self { inner, fault, sent: Mutex::default() })
    }
}

impl GroupWrapper for FaultyPipeline {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        let tensor_error = |error: OpError| CommError::Tensor(error.to_string());
        let copied = |tensor: &Tensor| tensor.copy().map_err(|error| CommError::Tensor(error.to_string()));
        let send = |tensor: Tensor, dst| {
            let pending = self.inner.start_send(&tensor, dst)?;
            Ok(pending.then(move || {
                drop(tensor);
                Ok(())
            }))
        };
        match (self.fault, call.signature()) {
            (PipelineFault::SendsThePreviousMessage, CallSignature::Send { dst, .. }) => {
                let own = copied(&call.inputs()[0])?;
                let previous = self.sent.lock().unwrap().insert(*dst, own.clone());
                send(previous.unwrap_or(own), *dst)
            }
            (PipelineFault::HalvesMessages, CallSignature::Send { dst, .. }) => {
                let half = copied(&call.inputs()[0])?;
                ulysses::kernels::elementwise::scale(&half, 0.5).map_err(tensor_error)?;
                send(half, *dst)
            }
            (PipelineFault::SkipsTheNorm, CallSignature::AllGather { chunk })
                if chunk.dtype == DType::F64 =>
            {
                let (own, rank) = (copied(&call.inputs()[0])?, self.rank());
                let outputs = call.outputs()[0].clone();
                let count = chunk.count;
                let keep = move || {
                    let others = outputs.zeros_like()?;
                    let zeros = others.narrow(0, 0, count)?;
                    for place in 0..outputs.elem_count() / count {
                        let of_rank = if place == rank { &own } else { &zeros };
                        outputs.slice_set(&of_rank.contiguous()?, 0, place * count)?;
                    }
                    candle_core::Result::Ok(())
                };
                let lose = move || keep().map_err(|error| CommError::Tensor(error.to_string()));
                Ok(self.inner.start(call)?.then(lose))
            }
            _ => self.inner.start(call),
        }
    }
}

/// A process group whose messages run as on the one stream of NCCL: those until a flush at the same time, and the rank goes on when
/// all of them have arrived.
#[derive(Debug)]
pub struct OneStream {
    inner: Arc<dyn ProcessGroup>,
    /// The messages since the last flush.
    messages: Arc<Mutex<Vec<Message>>>,
}

/// Whether it is sent or received, the tensor, and the other rank.
type Message = (bool, Tensor, usize);

impl OneStream {
    pub fn wrap(inner: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        Arc::new(Self { inner, messages: Arc::default() })
    }

    fn run(inner: &dyn ProcessGroup, messages: &Mutex<Vec<Message>>) -> Result<(), CommError> {
        fn call((is_sent, tensor, rank): &Message) -> Call<'_> {
            if *is_sent { Call::send(tensor, *rank) } else { Call::recv(tensor, *rank) }
        }
        let messages = std::mem::take(&mut *messages.lock().unwrap());
        inner.start_messages(&messages.iter().map(call).collect::<Vec<_>>())?.wait()
    }
}

impl GroupWrapper for OneStream {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn has_one_stream(&self) -> bool {
        true
    }

    fn flush_messages(&self) -> Result<(), CommError> {
        Self::run(&*self.inner, &self.messages)
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        let message = match call.signature() {
            CallSignature::Send { dst, .. } => (true, call.inputs()[0].clone(), *dst),
            CallSignature::Recv { src, .. } => (false, call.outputs()[0].clone(), *src),
            _ => {
                GroupWrapper::flush_messages(self)?;
                return self.inner.start(call);
            }
        };
        self.messages.lock().unwrap().push(message);
        let (inner, messages) = (self.inner.clone(), self.messages.clone());
        Ok(Pending::new(|| true, move || Self::run(&*inner, &messages), |_| {}))
    }
}

/// A process group, one transfer of which delivers zeros.
#[derive(Debug)]
pub struct LossyGroup {
    inner: Arc<dyn ProcessGroup>,
    /// The transfer that is lost, by number.
    lost: u64,
    transfers: AtomicU64,
}

impl LossyGroup {
    pub fn wrap(inner: Arc<dyn ProcessGroup>, lost: u64) -> Arc<dyn ProcessGroup> {
        Arc::new(Self { inner, lost, transfers: AtomicU64::new(0) })
    }
}

impl GroupWrapper for LossyGroup {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        if call.op() != CollectiveOp::AllToAllStrided {
            return self.inner.start(call);
        }
        let outputs = call.outputs().to_vec();
        let pending = self.inner.start(call)?;
        if self.transfers.fetch_add(1, Ordering::Relaxed) != self.lost {
            return Ok(pending);
        }
        let lose = move || {
            let fill = |output| ulysses::kernels::elementwise::fill(output, 0.0);
            outputs.iter().try_for_each(fill).map_err(|error| CommError::Tensor(error.to_string()))
        };
        Ok(pending.then(lose))
    }
}

/// Attention whose log-denominators are all 0: a ring then merges blocks with equal weights.
pub struct EqualWeights;

impl AttentionCompute for EqualWeights {
    fn attend(
        &self,
        qkv: [&Tensor; 3],
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor), AttentionError> {
        let (o, lse) = FlashAttention::default().attend(qkv, layout, workspace)?;
        ulysses::kernels::elementwise::fill(&lse, 0.0)?;
        Ok((o, lse))
    }

    fn attend_backward(
        &self,
        qkv: [&Tensor; 3],
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError> {
        FlashAttention::default().attend_backward(qkv, upstream, layout, workspace)
    }
}

/// Runs the right attention on a wrong layout.
pub struct WrongAttentionLayout(pub fn(&AttentionLayout) -> AttentionLayout);

impl WrongAttentionLayout {
    /// Attends across documents.
    pub fn ignores_cu_seqlens() -> Self {
        Self(|layout| {
            let whole_rows = layout.cu_seqlens().iter().map(|row| vec![0, row[row.len() - 1]]).collect();
            rebuilt(layout, whole_rows, layout.q_to_kv().to_vec())
        })
    }

    /// Maps query head `h` to KV head `h / group`, as if heads were shared evenly.
    pub fn divides_heads_by_group() -> Self {
        Self(|layout| {
            let num_heads = layout.q_to_kv().len();
            let num_kv_heads = layout.q_to_kv().iter().max().map_or(1, |kv| kv + 1);
            let group = num_heads.div_ceil(num_kv_heads);
            let q_to_kv = (0..num_heads).map(|head| head / group).collect();
            rebuilt(layout, layout.cu_seqlens().to_vec(), q_to_kv)
        })
    }
}

fn rebuilt(layout: &AttentionLayout, cu_seqlens: Vec<Vec<u32>>, q_to_kv: Vec<usize>) -> AttentionLayout {
    let (q, kv) = (layout.q_positions().clone(), layout.kv_positions().clone());
    AttentionLayout::new(q, kv, cu_seqlens, q_to_kv, layout.window()).expect("a valid, if wrong, layout")
}

impl AttentionCompute for WrongAttentionLayout {
    fn attend(
        &self,
        qkv: [&Tensor; 3],
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor), AttentionError> {
        FlashAttention::default().attend(qkv, &self.0(layout), workspace)
    }

    fn attend_backward(
        &self,
        qkv: [&Tensor; 3],
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError> {
        FlashAttention::default().attend_backward(qkv, upstream, &self.0(layout), workspace)
    }
}

/// A pass of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    Forward,
    Backward,
}

/// A layer that calls a function before each pass.
pub struct Hooked<F> {
    inner: Box<dyn Layer>,
    before: F,
}

impl<F: Fn(Pass) -> candle_core::Result<()> + Send + Sync + 'static> Hooked<F> {
    pub fn wrap(inner: Box<dyn Layer>, before: F) -> Box<dyn Layer> {
        Box::new(Self { inner, before })
    }
}

impl<F: Fn(Pass) -> candle_core::Result<()> + Send + Sync + 'static> Layer for Hooked<F> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.inner.parameters()
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        (self.before)(Pass::Forward)?;
        self.inner.forward(params, x, ctx)
    }

    fn backward(
        &self,
        params: &[Tensor],
        saved: Saved,
        dy: Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        (self.before)(Pass::Backward)?;
        self.inner.backward(params, saved, dy, grads, ctx)
    }
}
