//! The documents and heads of a call.

use crate::Documents;
use std::sync::Arc;

/// Tokens of a chunk, the part of a document that is computed with matmuls.
pub(super) const CHUNK: usize = 64;

/// Tokens between two states that the forward pass saves of a document.
pub(super) const STATE_INTERVAL: usize = 1024;

/// Documents and heads of a call: where states begin, and which key head each value head uses.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct DeltaLayout {
    documents: Documents,
    v_to_k: Arc<[usize]>,
}

impl DeltaLayout {
    /// Creates the layout. `v_to_k` has the local key head of each local value head, in any order and group size.
    pub fn new(documents: Documents, v_to_k: impl Into<Arc<[usize]>>) -> Self {
        Self { documents, v_to_k: v_to_k.into() }
    }

    /// The documents of the sequences.
    pub fn documents(&self) -> &Documents {
        &self.documents
    }

    /// The local key head of each local value head.
    pub fn v_to_k(&self) -> &Arc<[usize]> {
        &self.v_to_k
    }

    /// The shape of the f32 tensor of states that [`forward`](super::forward) saves, for heads of `key_dim` and
    /// `value_dim` elements. It does not depend on the documents. The order of the states and of their elements is up to
    /// the kernels.
    pub fn states_shape(&self, key_dim: usize, value_dim: usize) -> [usize; 5] {
        let states = self.documents.seq_len().saturating_sub(1) / STATE_INTERVAL;
        [self.documents.batch(), self.v_to_k.len(), states, key_dim, value_dim]
    }

    /// Floating-point operations of a forward pass with heads of `key_dim` and `value_dim` elements: those of the matmuls
    /// with the states, and within chunks of 64 tokens.
    pub fn flops(&self, key_dim: usize, value_dim: usize) -> f64 {
        let tokens = (self.documents.batch() * self.documents.seq_len() * self.v_to_k.len()) as f64;
        let multiply_adds = 3 * key_dim * value_dim + CHUNK * (2 * key_dim + 2 * value_dim);
        2.0 * multiply_adds as f64 * tokens
    }
}
