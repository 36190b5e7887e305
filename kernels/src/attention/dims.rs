//! The sizes of a call.

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
