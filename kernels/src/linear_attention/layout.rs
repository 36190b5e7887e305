//! The documents and heads of a call.

use super::Rule;
use super::cuda::Plan;
use super::segments::{CHUNK, STATE_INTERVAL};
use crate::Documents;
use crate::device_table::DeviceTable;
use candle_core::{Device, Tensor};
use std::sync::{Arc, OnceLock};

/// Documents and heads of a call: where states begin, and which key head each value head uses.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct LinearAttentionLayout {
    documents: Documents,
    v_to_k: Arc<[usize]>,
    plan: Arc<OnceLock<Plan>>,
    table: DeviceTable,
}

impl LinearAttentionLayout {
    /// Creates the layout. `v_to_k` has the local key head of each local value head, in any order and group size.
    pub fn new(documents: Documents, v_to_k: impl Into<Arc<[usize]>>) -> Self {
        Self { documents, v_to_k: v_to_k.into(), plan: Arc::default(), table: DeviceTable::default() }
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
        let states = saved_states(self.documents.seq_len());
        [self.documents.batch(), self.v_to_k.len(), states, key_dim, value_dim]
    }

    /// Segments and chunks, for the CUDA kernels.
    pub(super) fn plan(&self) -> &Plan {
        self.plan.get_or_init(|| Plan::new(&self.documents, &self.v_to_k))
    }

    /// The words of the [plan](Self::plan) on `device`.
    pub(super) fn table(&self, device: &Device) -> candle_core::Result<Tensor> {
        let words = &self.plan().words;
        self.table.on(device, words.len(), || words)
    }

    /// Floating-point operations of a forward pass with heads of `key_dim` and `value_dim` elements: those of the matmuls
    /// with the states, and within chunks of 64 tokens. The delta rule has more of both than a sum.
    pub fn flops(&self, [key_dim, value_dim]: [usize; 2], rule: Rule) -> f64 {
        let tokens = (self.documents.batch() * self.documents.seq_len() * self.v_to_k.len()) as f64;
        let [with_states, in_chunks] = if rule.is_delta() { [3, 2] } else { [2, 1] };
        let multiply_adds = with_states * key_dim * value_dim + CHUNK * in_chunks * (key_dim + value_dim);
        2.0 * multiply_adds as f64 * tokens
    }
}

/// The most states that are saved of a sequence.
pub(super) fn saved_states(seq_len: usize) -> usize {
    seq_len.saturating_sub(1) / STATE_INTERVAL
}
