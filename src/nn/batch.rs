//! The contents of a micro batch.

use candle_core::{DType, Device, Result, Tensor, bail};
use std::collections::BTreeMap;
use ulysses_kernels::lm_head_loss::IGNORED;

/// This rank's tokens of a micro batch, as the input and the objective of a model read them. With tensor parallelism, each
/// tp rank has some of its sp rank's tokens here.
#[derive(Debug, Clone, Copy)]
pub struct LocalBatch<'a> {
    /// Number of sequences.
    pub batch_size: usize,
    /// Number of this rank's tokens per sequence.
    pub seq_len_local: usize,
    /// Token ids, `[batch, seq_local]`; none in a dry run.
    pub input_ids: &'a [u32],
    /// The next token of each token, or −100, `[batch, seq_local]`; none in a dry run.
    pub labels: &'a [i64],
    /// The token ids of all ranks of tp, `[batch, seq_len_of_tp_ranks]`; without tp those above.
    pub all_input_ids: &'a [u32],
    /// Their labels.
    pub all_labels: &'a [i64],
    /// Values by name, each `[batch, seq_local, width]`.
    pub values: &'a BTreeMap<String, Vec<f32>>,
}

impl LocalBatch<'_> {
    /// Number of this rank's tokens.
    pub fn num_tokens(&self) -> usize {
        self.batch_size * self.seq_len_local
    }

    /// Number of this rank's tokens that have a label, which padding does not.
    pub fn num_labels(&self) -> u64 {
        self.labels.iter().filter(|label| **label != IGNORED).count() as u64
    }

    /// 1 for each token that has a label, 0 for others, such as padding.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, 1]`.
    ///
    /// # Errors
    /// A device that fails.
    pub fn has_label(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let has_label = self.labels.iter().map(|label| f32::from(*label != IGNORED)).collect();
        let shape = (self.batch_size, self.seq_len_local, 1);
        Tensor::from_vec(has_label, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
    }

    /// The values called `name` on a device.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, width]`.
    ///
    /// # Errors
    /// A batch without values of this name.
    pub fn tensor(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(values) = self.values.get(name) else {
            let known: Vec<_> = self.values.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            bail!("the batch has no values called {name:?}; it has {known}")
        };
        let width = values.len() / self.num_tokens().max(1);
        let shape = (self.batch_size, self.seq_len_local, width);
        Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
    }
}
