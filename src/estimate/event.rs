//! What a rank does in a step.

use crate::comm::CollectiveOp;
use crate::mesh::{REPLICAS_AXIS, SHARD_AXIS};
use std::fmt;
use std::sync::Arc;
use ulysses_kernels::device::dry::MatmulOp;

/// One thing that happens on a rank, in the order in which its thread does it.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A collective is started.
    Collective(Transfer),
    /// The rank waits for the first collective of this purpose that is still under way: one that it does not
    /// [await at once](Transfer::is_awaited_at_once).
    Wait(Purpose),
    /// Matrix products.
    Compute(Work),
    /// Operations on single elements, norms among them.
    Elementwise {
        /// Bytes that they read, and bytes that they write.
        bytes: u64,
    },
    /// Tensors go to or come from a file.
    File {
        /// Bytes in both directions.
        bytes: u64,
    },
    /// Tensors go from a GPU to the host's memory, or come back.
    HostCopy {
        /// Bytes in both directions.
        bytes: u64,
    },
}

/// A collective of this rank with a group along an axis of the mesh.
#[derive(Debug, Clone, PartialEq)]
pub struct Transfer {
    /// The operation.
    pub op: CollectiveOp,
    /// What for.
    pub purpose: Purpose,
    /// The group.
    pub axis: Axis,
    /// Bytes of the tensors that this rank puts in.
    pub input_bytes: u64,
    /// Bytes that this rank sends to each member of the group, in group order.
    pub sent_to: Arc<[u64]>,
    /// Bytes that this rank receives from all of them.
    pub received_bytes: u64,
}

impl Transfer {
    /// Bytes that this rank sends to all members of the group.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_to.iter().sum()
    }

    /// Whether the rank goes on only when it has arrived.
    pub fn is_awaited_at_once(&self) -> bool {
        self.purpose.is_awaited_at_once(self.axis)
    }
}

/// Why ranks communicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Partitioned parameters of a unit, before its use.
    GatherParameters,
    /// The Ulysses exchange of q, k, v and the output.
    ExchangeForward,
    /// The same of their gradients.
    ExchangeBackward,
    /// Gradients of a unit, over dp or over sp.
    ReduceGradients,
    /// Updated parameters of a unit.
    PublishParameters,
    /// Some numbers: hashes of rows, losses, tokens, norms.
    Agree,
}

impl Purpose {
    /// Whether a rank waits as soon as it has started such a collective. What ZeRO moves between partitions is under way
    /// while the rank computes, until an [`Event::Wait`].
    pub(super) fn is_awaited_at_once(self, axis: Axis) -> bool {
        match self {
            Self::GatherParameters | Self::PublishParameters => false,
            Self::ReduceGradients => matches!(axis, Axis::Sp | Axis::Replicas),
            Self::ExchangeForward | Self::ExchangeBackward | Self::Agree => true,
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::GatherParameters => "gather parameters",
            Self::ExchangeForward => "exchange forward",
            Self::ExchangeBackward => "exchange backward",
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
    /// ZeRO's partitions, where they are not over all of dp.
    Shard,
    /// Replicas of a partition, where there are more than the sp group.
    Replicas,
}

impl Axis {
    /// Its name in a mesh.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dp => "dp",
            Self::Sp => "sp",
            Self::Shard => SHARD_AXIS,
            Self::Replicas => REPLICAS_AXIS,
        }
    }
}

/// Floating-point operations of an op in a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Of which op.
    pub op: MatmulOp,
    /// Which pass.
    pub pass: Pass,
    /// Operations; a multiplication with an addition is two.
    pub flops: f64,
}

/// A pass over the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pass {
    /// From tokens to loss.
    Forward,
    /// A layer's forward once more, because its state was dropped.
    Recompute,
    /// From loss to gradients.
    Backward,
}
