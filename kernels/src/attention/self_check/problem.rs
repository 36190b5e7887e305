//! The problems that fused and tiled kernels compute.

use super::difference::Output;
use crate::OpError;
use crate::attention::fused::WGMMA_ROWS;
use crate::attention::{
    AttentionError, AttentionKernels, AttentionLayout, Gradients, Operands, Upstream, backward, delta,
    forward, grouped_heads,
};
use crate::device::multiprocessors;
use crate::tensor::{self, to_vec};
use candle_core::{DType, Device, Tensor};
use std::slice::from_ref;

/// KV heads of the small problems. Their unequal groups of query heads are launched apart.
const NUM_KV_HEADS: usize = 2;

/// KV heads of the problem of a full grid.
const NUM_KV_HEADS_OF_GRID: usize = 8;

pub(super) struct Problem {
    layout: AttentionLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
}

impl Problem {
    /// A sequence of so many keys that every stage of shared memory is used in both phases of its barriers, with whole
    /// tiles that all queries see; and two short ones with documents and a window, of so many rows that backward uses its
    /// stages several times, too. The emulation takes seconds for both.
    pub(super) fn all(head_dim: usize, dtype: DType, device: &Device) -> Result<[Self; 2], AttentionError> {
        let long = AttentionLayout::of_ranges(
            from_ref(&(836..900)),
            from_ref(&(0..900)),
            vec![vec![0, 90, 900]],
            [0, 1, 1],
            None,
        )?;
        let short = AttentionLayout::of_ranges(
            from_ref(&(60..124)),
            from_ref(&(0..200)),
            vec![vec![0, 90, 200], vec![0, 200]],
            [0, 1, 1, 1, 1, 1],
            Some(70),
        )?;
        let new = |layout| Self::new(layout, NUM_KV_HEADS, head_dim, dtype, device);
        Ok([new(long)?, new(short)?])
    }

    /// A causal sequence with a block of each kernel for every multiprocessor.
    pub(super) fn full_grid(head_dim: usize, dtype: DType, device: &Device) -> Result<Self, AttentionError> {
        let blocks = multiprocessors(device).map_err(|source| OpError::Device { op: "attention", source })?;
        let tokens = (blocks * WGMMA_ROWS).div_ceil(NUM_KV_HEADS_OF_GRID);
        let q_to_kv = grouped_heads(2 * NUM_KV_HEADS_OF_GRID, NUM_KV_HEADS_OF_GRID);
        let layout = AttentionLayout::causal(1, tokens as u32, q_to_kv)?;
        Self::new(layout, NUM_KV_HEADS_OF_GRID, head_dim, dtype, device)
    }

    fn new(
        layout: AttentionLayout,
        num_kv_heads: usize,
        head_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self, AttentionError> {
        let (num_queries, num_heads) = (layout.num_queries(), layout.q_to_kv().len());
        let draw = |seed, tokens, heads| -> Result<Tensor, AttentionError> {
            let shape = (layout.batch(), tokens, heads, head_dim);
            let numbers = numbers(seed, layout.batch() * tokens * heads * head_dim);
            Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
        };
        let (q, dout) = (draw(1, num_queries, num_heads)?, draw(4, num_queries, num_heads)?);
        let (k, v) = (draw(2, layout.num_keys(), num_kv_heads)?, draw(3, layout.num_keys(), num_kv_heads)?);
        Ok(Self { layout, q, k, v, dout })
    }

    fn operands(&self, kernels: AttentionKernels) -> Operands<'_> {
        let Self { layout, q, k, v, .. } = self;
        Operands { q, k, v, scale: 1.0 / (q.dims()[3] as f32).sqrt(), layout, kernels }
    }

    /// A tensor with an element per query and head.
    fn of_rows(&self) -> Result<Tensor, AttentionError> {
        let (batch, num_queries, num_heads, _) = self.q.dims4()?;
        Ok(tensor::zeros((batch, num_heads, num_queries), DType::F32, self.q.device())?)
    }

    pub(super) fn forward(&self, kernels: AttentionKernels) -> Result<[Tensor; 2], AttentionError> {
        let (o, lse) = (self.q.zeros_like()?, self.of_rows()?);
        forward(&self.operands(kernels), &o, &lse)?;
        Ok([o, lse])
    }

    /// `o`, `lse`, `dq`, `dk` and `dv`.
    pub(super) fn run(&self, kernels: AttentionKernels) -> Result<Vec<Output>, AttentionError> {
        let [o, lse] = self.forward(kernels)?;
        let delta_of_rows = self.of_rows()?;
        delta(&o, &self.dout, &delta_of_rows)?;
        let [dq, dk, dv] = [&self.q, &self.k, &self.v].map(Tensor::zeros_like);
        let (dq, dk, dv) = (dq?, dk?, dv?);
        let upstream = Upstream { dout: &self.dout, lse: &lse, delta: &delta_of_rows };
        backward(&self.operands(kernels), &upstream, &Gradients { dq: &dq, dk: &dk, dv: &dv })?;
        let mut outputs = outputs([o, lse])?;
        outputs.extend([of_tokens("dq", &dq)?, of_tokens("dk", &dk)?, of_tokens("dv", &dv)?]);
        Ok(outputs)
    }
}

/// Those of the forward pass.
pub(super) fn outputs([o, lse]: [Tensor; 2]) -> Result<Vec<Output>, AttentionError> {
    let lse = Output { name: "lse", elements: values(&lse)?, token_elems: None };
    Ok(vec![of_tokens("o", &o)?, lse])
}

/// An output `[b, s, h, d]`.
fn of_tokens(name: &'static str, tensor: &Tensor) -> Result<Output, AttentionError> {
    let (_, _, heads, head_dim) = tensor.dims4()?;
    Ok(Output { name, elements: values(tensor)?, token_elems: Some(heads * head_dim) })
}

/// Numbers from -2 to 2, so that probabilities differ.
fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    (0..len).map(|_| next()).collect()
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, AttentionError> {
    Ok(to_vec(&tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?)?)
}
