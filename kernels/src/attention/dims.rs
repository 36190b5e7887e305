//! The sizes of a call.

use candle_core::{Result, Tensor};

/// The sizes of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dims {
    pub(super) batch: usize,
    pub(super) num_queries: usize,
    pub(super) num_keys: usize,
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
}

impl Dims {
    /// Those of an output `[b, sq, hq, d]`, without its keys.
    pub(super) fn from_output(o: &Tensor) -> Result<Self> {
        let (batch, num_queries, num_heads, head_dim) = o.dims4()?;
        let head_dim = head_dim.max(1);
        Ok(Self { batch, num_queries, num_keys: 0, num_heads, num_kv_heads: 0, head_dim })
    }

    /// `[b, sq, hq, d]`
    pub(super) fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.num_queries, self.num_heads, self.head_dim]
    }

    /// `[b, skv, hkv, d]`
    pub(super) fn kv_shape(&self) -> [usize; 4] {
        [self.batch, self.num_keys, self.num_kv_heads, self.head_dim]
    }

    /// `[b, hq, sq]`
    pub(super) fn row_shape(&self) -> [usize; 3] {
        [self.batch, self.num_heads, self.num_queries]
    }
}
