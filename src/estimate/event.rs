//! The events of a rank's step.

use crate::comm::CollectiveOp;
use crate::comm::fake::ENDS;
use crate::mesh::{PP_AXIS, REPLICAS_AXIS, RING_AXIS, SHARD_AXIS, TOKENS_AXIS, TP_AXIS, ULYSSES_AXIS};
use std::fmt;
use std::sync::Arc;
use ulysses_kernels::device::dry::MatmulOp;

/// An event of a rank's step, in the order of its thread.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A collective is started.
    Collective(Transfer),
    /// The rank waits for the first pending collective of this purpose along this axis, one that it does not
    /// [wait for immediately](Transfer::is_awaited_at_once).
    Wait {
        /// The purpose.
        purpose: Purpose,
        /// The axis of the group.
        axis: Axis,
    },
    /// Matmuls or attention.
    Compute(Work),
    /// Element-wise operations, including norms.
    Elementwise {
        /// Bytes read and written.
        bytes: u64,
    },
    /// Offloaded tensors are written to or read from a file.
    File {
        /// Bytes in both directions.
        bytes: u64,
    },
    /// Offloaded tensors are copied between GPU and host memory.
    HostCopy {
        /// Bytes in both directions.
        bytes: u64,
    },
}

/// A collective of a rank along an axis of the mesh.
#[derive(Debug, Clone, PartialEq)]
pub struct Transfer {
    /// The operation.
    pub op: CollectiveOp,
    /// The purpose.
    pub purpose: Purpose,
    /// The axis of the group.
    pub axis: Axis,
    /// Bytes of the rank's input tensors.
    pub input_bytes: u64,
    /// Bytes that the rank sends to each member of the group, in group order.
    pub sent_to: Arc<[u64]>,
    /// Bytes that the rank receives from all members.
    pub received_bytes: u64,
}

impl Transfer {
    /// Returns the bytes that the rank sends to all members of the group.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_to.iter().sum()
    }

    /// Returns whether the rank waits for the collective immediately.
    pub fn is_awaited_at_once(&self) -> bool {
        self.purpose.is_awaited_at_once(self.op, self.axis)
    }
}

/// Purpose of a communication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Gathers the partitioned parameters of a unit before their use.
    GatherParameters,
    /// The Ulysses exchange of q, k, v and the output.
    ExchangeForward,
    /// The Ulysses exchange of their gradients.
    ExchangeBackward,
    /// Gathers the tokens of the tensor-parallel ranks before a module, and sums and scatters its outputs.
    ExchangeTokens,
    /// Passes activations to the next pipeline stage, and their gradients to the previous one.
    PassActivations,
    /// Reduces the gradients of a unit over dp, sp or the ranks with other tokens.
    ReduceGradients,
    /// Gathers the updated parameters of a unit.
    PublishParameters,
    /// Exchanges a few numbers: batch hashes, losses, token counts, norms.
    Agree,
}

impl Purpose {
    /// Returns whether a rank waits for such a collective immediately. Exchanges, and ZeRO's collectives between partitions
    /// except the gather of summed gradients, overlap with compute until an [`Event::Wait`].
    pub(super) fn is_awaited_at_once(self, op: CollectiveOp, axis: Axis) -> bool {
        match self {
            Self::GatherParameters
            | Self::PublishParameters
            | Self::ExchangeForward
            | Self::ExchangeBackward => false,
            Self::ReduceGradients => {
                op == CollectiveOp::AllGather
                    || matches!(
                        axis,
                        Axis::Sp | Axis::Replicas | Axis::Tp | Axis::Tokens | Axis::Pp | Axis::Tied
                    )
            }
            Self::Agree | Self::ExchangeTokens | Self::PassActivations => true,
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::GatherParameters => "gather parameters",
            Self::ExchangeForward => "exchange forward",
            Self::ExchangeBackward => "exchange backward",
            Self::ExchangeTokens => "exchange tokens",
            Self::PassActivations => "pass activations",
            Self::ReduceGradients => "reduce gradients",
            Self::PublishParameters => "publish parameters",
            Self::Agree => "losses and norms",
        })
    }
}

/// An axis of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Data parallel.
    Dp,
    /// Sequence parallel.
    Sp,
    /// ZeRO's partitions, if they are not exactly dp.
    Shard,
    /// Replicas of a partition, if they are not exactly sp.
    Replicas,
    /// The ring within sp.
    Ring,
    /// The Ulysses groups within sp, if there is a ring.
    Ulysses,
    /// Tensor parallel.
    Tp,
    /// Ranks with other tokens of the same sequences, those of sp and tp, if both have several.
    Tokens,
    /// Pipeline parallel.
    Pp,
    /// The first and the last stage of a pipeline, if they have tied parameters and are not all stages.
    Tied,
}

impl Axis {
    const ALL: [Self; 10] = [
        Self::Dp,
        Self::Sp,
        Self::Shard,
        Self::Replicas,
        Self::Ring,
        Self::Ulysses,
        Self::Tp,
        Self::Tokens,
        Self::Pp,
        Self::Tied,
    ];

    /// Returns the axis of the fake group with this name.
    pub(super) fn with_group(name: &str) -> Option<Self> {
        let group = |axis: Self| if axis == Self::Tied { ENDS } else { axis.name() };
        Self::ALL.into_iter().find(|axis| group(*axis) == name)
    }

    /// Returns the name of the axis in a mesh.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dp => "dp",
            Self::Sp => "sp",
            Self::Shard => SHARD_AXIS,
            Self::Replicas => REPLICAS_AXIS,
            Self::Ring => RING_AXIS,
            Self::Ulysses => ULYSSES_AXIS,
            Self::Tp => TP_AXIS,
            Self::Tokens => TOKENS_AXIS,
            Self::Pp | Self::Tied => PP_AXIS,
        }
    }
}

/// The FLOPs of an op in a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// The op.
    pub op: MatmulOp,
    /// The pass.
    pub pass: Pass,
    /// FLOPs; a multiply-add counts as two.
    pub flops: f64,
}

/// A pass over the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// Recomputation of a layer's forward pass.
    Recompute,
    /// The backward pass.
    Backward,
}
