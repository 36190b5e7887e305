//! What the ops of a rank take beside their operands and results, by the device that computes them.

use super::dims::{Dims, Heads};
use candle_core::DType;
use ulysses_kernels::attention::{self, grouped_heads};
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::linear::{self, ProductMemory};
use ulysses_kernels::{lm_head_loss, rms_norm};

/// Working memory that the matrix product keeps for each thread: as much as a core's second-level cache.
const PRODUCT_SCRATCH_BYTES: usize = 2 << 20;

/// Where and in what precision a rank computes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernels {
    pub(super) device: DeviceKind,
    /// Of parameters and activations.
    pub(super) dtype: DType,
    /// Of a rank on a CPU.
    pub(super) threads: usize,
}

/// Bytes that attention takes on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AttentionMemory {
    /// That the rank's threads keep.
    pub(super) kept: usize,
    /// While it runs.
    pub(super) taken: usize,
}

impl Kernels {
    /// What the threads keep for products of any size.
    pub(super) fn product_scratch_bytes(self) -> usize {
        match self.device {
            DeviceKind::Cpu if self.dtype == DType::F32 => self.threads * PRODUCT_SCRATCH_BYTES,
            // Other products say what they keep; on a GPU it is the matrix library's affair.
            DeviceKind::Cpu | DeviceKind::Cuda => 0,
        }
    }

    /// Of a product of `[tokens, inputs]` with a weight `[outputs, inputs]`.
    pub(super) fn product(self, sizes: [usize; 3]) -> ProductMemory {
        match self.device {
            DeviceKind::Cpu => linear::product_memory(self.dtype, sizes, self.threads),
            // Operands are read where they lie.
            DeviceKind::Cuda => ProductMemory::Packed(0),
        }
    }

    /// Of the sum over the tokens that is a weight's gradient.
    pub(super) fn weight_product(self, sizes: [usize; 3]) -> ProductMemory {
        match self.device {
            DeviceKind::Cpu => linear::weight_product_memory(self.dtype, sizes, self.threads),
            DeviceKind::Cuda => ProductMemory::Packed(0),
        }
    }

    /// Of the loss on a CPU: of the products that are the logits and the gradients of tokens and weight.
    pub(super) fn loss_products(self, dims: &Dims) -> [ProductMemory; 3] {
        let sizes = [dims.loss_tile, dims.hidden, dims.vocab];
        lm_head_loss::product_memory(self.dtype, sizes, self.threads)
    }

    pub(super) fn attention(self, heads: Heads, dims: &Dims, backward: bool) -> AttentionMemory {
        let (num_tokens, head_dim, dtype) = (dims.seq_len, dims.head_dim, self.dtype);
        match self.device {
            DeviceKind::Cpu => {
                let queries = dims.all_tokens() * heads.num_heads_local * head_dim;
                AttentionMemory {
                    kept: self.threads * attention::scratch_bytes(num_tokens, head_dim, dtype, backward),
                    taken: if backward { attention::backward_bytes(queries, dtype) } else { 0 },
                }
            }
            DeviceKind::Cuda => {
                let q_to_kv = grouped_heads(heads.num_heads_local, heads.num_kv_heads_local);
                let taken = attention::device_scratch_bytes(num_tokens, &q_to_kv, head_dim, dtype, backward);
                AttentionMemory { kept: 0, taken }
            }
        }
    }

    /// Of a norm's backward pass over `rows` rows of `width` elements.
    pub(super) fn norm_backward_bytes(self, rows: usize, width: usize) -> usize {
        rms_norm::backward_scratch_bytes(self.device, rows, width)
    }

    /// Of the loss of a tile of tokens on a GPU, while it runs.
    pub(super) fn device_loss_bytes(self, dims: &Dims, backward: bool) -> usize {
        lm_head_loss::device_scratch_bytes(dims.loss_tile, dims.vocab, self.dtype, backward)
    }

    /// Of an exchange of blocks: NCCL sends from one piece of memory and receives into another, where the other backends
    /// take the blocks from where they lie.
    pub(super) fn exchange_bytes(self, sent: usize, received: usize) -> usize {
        match self.device {
            DeviceKind::Cpu => 0,
            DeviceKind::Cuda => (sent + received) * self.dtype.size_in_bytes(),
        }
    }
}
