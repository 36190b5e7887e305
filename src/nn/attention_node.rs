//! Attention as one candle autograd node, collectives included.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Error, Layout, Result, Shape, Storage, Tensor, bail};
use parking_lot::Mutex;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::{Attention, AttentionLayout, QkvGradients, SavedAttention};
use ulysses_kernels::tensor::TensorOptions;

/// Attention for blocks written with candle ops: `(q, k, v) → o` as **one** custom op. Its backward runs the
/// backward of `attention` and returns all three gradients. With a
/// [`UlyssesAttention`](crate::sequence_parallel::UlyssesAttention) both directions communicate, so all ranks
/// of the sp group must call forward and `backward()` equally often.
///
/// # Shapes
/// `q`, result: `[batch, seq_local, num_heads, head_dim]`; `k`, `v`:
/// `[batch, seq_local, num_kv_heads, head_dim]`; of one element type.
///
/// # Errors
/// Any error of `attention`, as a candle error.
pub fn autograd_attention(
    attention: Arc<dyn Attention>,
    layout: &AttentionLayout,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<Tensor> {
    // The attention may overwrite its operands, which the graph still needs: pass copies.
    let own = |tensor: &Tensor| tensor.detach().contiguous()?.copy();
    let (out, saved) =
        attention.forward(own(q)?, own(k)?, own(v)?, layout, &fresh(q)).map_err(Error::wrap)?;
    let computed = Computed::new(out.copy()?);
    let op = AttentionOp { attention, layout: layout.clone(), computed, saved: Mutex::new(Some(saved)) };
    q.apply_op3(k, v, op)
}

/// A workspace like the tensor, without recycling: the graph owns the results.
fn fresh(like: &Tensor) -> Workspace {
    Workspace::with_options(TensorOptions { device: like.device().clone(), dtype: like.dtype() })
}

/// The result of a node whose forward pass has already run, because candle passes bare storages to custom ops, while
/// collectives and kernels need tensors.
pub(super) struct Computed(Mutex<Option<Tensor>>);

impl Computed {
    /// Keeps a result until candle's forward pass takes it. It must not be part of another tensor: candle clones whole storages.
    pub(super) fn new(result: Tensor) -> Self {
        Self(Mutex::new(Some(result)))
    }

    fn take(&self, op: &str) -> Result<Tensor> {
        match self.0.lock().take() {
            Some(result) => Ok(result),
            None => bail!("{op}: second forward through the same node"),
        }
    }

    pub(super) fn take_cpu(&self, op: &str) -> Result<(CpuStorage, Shape)> {
        let result = self.take(op)?;
        let (storage, layout) = result.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => Ok((storage.try_clone(layout)?, result.shape().clone())),
            _ => bail!("{op}: its operands are on the CPU, its result is not"),
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn take_cuda(&self, op: &str) -> Result<(CudaStorage, Shape)> {
        let result = self.take(op)?;
        let (storage, layout) = result.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => Ok((storage.try_clone(layout)?, result.shape().clone())),
            _ => bail!("{op}: its operands are on a GPU, its result is not"),
        }
    }
}

/// The autograd node.
struct AttentionOp {
    attention: Arc<dyn Attention>,
    layout: AttentionLayout,
    computed: Computed,
    /// State for the backward pass, which takes it.
    saved: Mutex<Option<SavedAttention>>,
}

impl CustomOp3 for AttentionOp {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        _q: &CpuStorage,
        _q_layout: &Layout,
        _k: &CpuStorage,
        _k_layout: &Layout,
        _v: &CpuStorage,
        _v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.computed.take_cpu(self.name())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        _q: &CudaStorage,
        _q_layout: &Layout,
        _k: &CudaStorage,
        _k_layout: &Layout,
        _v: &CudaStorage,
        _v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.computed.take_cuda(self.name())
    }

    fn bwd(
        &self,
        _q: &Tensor,
        _k: &Tensor,
        _v: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let saved = self.saved.lock().take();
        let Some(saved) = saved else { bail!("attention: second backward through the same graph") };
        let dout = dout.detach().contiguous()?;
        let QkvGradients { dq, dk, dv } =
            self.attention.backward(saved, &dout, &self.layout, &fresh(&dout)).map_err(Error::wrap)?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
