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

/// The sizes of an output, which are those of the queries.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutputDims {
    pub(super) batch: usize,
    pub(super) num_queries: usize,
    pub(super) num_heads: usize,
    pub(super) head_dim: usize,
}

impl OutputDims {
    /// Those of `o [b, sq, hq, d]`.
    pub(super) fn new(o: &Tensor) -> Result<Self> {
        let (batch, num_queries, num_heads, head_dim) = o.dims4()?;
        Ok(Self { batch, num_queries, num_heads, head_dim: head_dim.max(1) })
    }

    /// `[b, sq, hq, d]`
    pub(super) fn shape(self) -> [usize; 4] {
        [self.batch, self.num_queries, self.num_heads, self.head_dim]
    }

    /// `[b, hq, sq]`
    pub(super) fn row_shape(self) -> [usize; 3] {
        [self.batch, self.num_heads, self.num_queries]
    }
}

impl Dims {
    /// Those of the output.
    pub(super) fn output(&self) -> OutputDims {
        let Self { batch, num_queries, num_heads, head_dim, .. } = *self;
        OutputDims { batch, num_queries, num_heads, head_dim }
    }

    /// `[b, sq, hq, d]`
    pub(super) fn q_shape(&self) -> [usize; 4] {
        self.output().shape()
    }

    /// `[b, skv, hkv, d]`
    pub(super) fn kv_shape(&self) -> [usize; 4] {
        [self.batch, self.num_keys, self.num_kv_heads, self.head_dim]
    }

    /// `[b, hq, sq]`
    pub(super) fn row_shape(&self) -> [usize; 3] {
        self.output().row_shape()
    }
}
