//! Attention as one candle autograd node, collectives included.

use crate::ops::attention::{Attention, Geometry, SavedAttention};
use candle_core::{CpuStorage, CustomOp3, Error, Layout, Result, Shape, Tensor, WithDType, bail};
use std::sync::{Arc, Mutex, PoisonError};

/// Attention for blocks written with candle ops: `(q, k, v) → o` as **one** custom op,
/// whose backward runs `attention`'s own and returns all three gradients. With a
/// [`UlyssesAttention`](crate::ulysses::UlyssesAttention) both directions communicate, so all
/// ranks of the sp group must call forward and `backward()` equally often.
///
/// # Shapes
/// `q`, result: `[batch, seq_local, num_heads, head_dim]`; `k`, `v`:
/// `[batch, seq_local, num_kv_heads, head_dim]`; contiguous f32.
///
/// # Errors
/// Whatever `attention` reports, as a candle error.
pub fn autograd_attention(
    attention: Arc<dyn Attention>,
    geometry: &Geometry,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<Tensor> {
    let op = AttentionOp { attention, geometry: geometry.clone(), saved: Mutex::new(None) };
    q.contiguous()?.apply_op3(&k.contiguous()?, &v.contiguous()?, op)
}

struct AttentionOp {
    attention: Arc<dyn Attention>,
    geometry: Geometry,
    /// Made by the forward pass, taken by the backward pass.
    saved: Mutex<Option<SavedAttention>>,
}

impl CustomOp3 for AttentionOp {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let q = detached(q, q_layout)?;
        let (k, v) = (detached(k, k_layout)?, detached(v, v_layout)?);
        let (out, saved) = self.attention.forward(q, k, v, &self.geometry).map_err(Error::wrap)?;
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(saved);
        let elements = crate::tensor::to_vec::<f32>(&out)?;
        Ok((f32::to_cpu_storage_owned(elements), out.shape().clone()))
    }

    fn bwd(
        &self,
        _q: &Tensor,
        _k: &Tensor,
        _v: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(saved) = saved else { bail!("attention: a second backward through the same graph") };
        let dout = dout.detach().contiguous()?;
        let (dq, dk, dv) = self.attention.backward(saved, &dout, &self.geometry).map_err(Error::wrap)?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

/// candle lends custom ops the bare storage; the attention wants tensors of its own.
fn detached(storage: &CpuStorage, layout: &Layout) -> Result<Tensor> {
    let elements = f32::cpu_storage_as_slice(storage)?;
    match layout.contiguous_offsets() {
        Some((start, end)) => {
            Tensor::from_slice(&elements[start..end], layout.shape(), &candle_core::Device::Cpu)
        }
        None => bail!("attention: q, k and v must be contiguous"),
    }
}
