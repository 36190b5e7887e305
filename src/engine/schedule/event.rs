//! What happens on a rank in a step.

use crate::comm::CollectiveOp;
use crate::mesh::{REPLICAS_AXIS, SHARD_AXIS};
use std::fmt;
use std::sync::Arc;
use ulysses_kernels::memory::Category;

/// One thing that happens on a rank, in the order in which its thread does it.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The micro batch that follows stands for `times` equal ones in a row. Only a
    /// [counted](super::Schedule::counted) schedule has such events, before every micro batch.
    MicroBatches {
        /// How many there are, at least 1.
        times: u64,
    },
    /// A part of the step begins.
    Begin(Moment),
    /// A collective is started.
    Collective(Transfer),
    /// The rank waits for the first collective of this purpose that is still under way: one that it does not
    /// [await at once](Transfer::is_awaited_at_once).
    Wait(Purpose),
    /// Arithmetic of products and of attention.
    Compute(Work),
    /// Operations on single elements, norms among them.
    Sweep {
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
    /// Tensors wait elsewhere than where the rank computes, in a file or in the host's memory (positive), or no more.
    Offloaded {
        /// Bytes more, or less.
        bytes: i64,
    },
    /// Memory is taken (positive) or freed, where the rank computes.
    Memory {
        /// What it holds.
        category: Category,
        /// Bytes more, or less.
        bytes: i64,
    },
}

/// A part of a step. Layers are counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Moment {
    /// A micro batch and its embedding.
    Embedding,
    /// A layer's forward.
    Forward {
        /// Which layer.
        layer: usize,
    },
    /// The head with the loss, forward and backward.
    Head,
    /// A layer's backward, after its forward once more where that is recomputed.
    Backward {
        /// Which layer.
        layer: usize,
    },
    /// The embedding's backward.
    EmbeddingBackward,
    /// The norm, the update, and the parameters of the others.
    Update,
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Forward { layer } => write!(f, "forward of layer {layer}"),
            Self::Head => f.write_str("LM head and loss"),
            Self::Backward { layer } => write!(f, "backward of layer {layer}"),
            Self::EmbeddingBackward => f.write_str("embedding backward"),
            Self::Update => f.write_str("optimizer step"),
        }
    }
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

    /// Whether the rank goes on only when it has arrived. What ZeRO moves between partitions is under way while the
    /// rank computes, until an [`Event::Wait`] for its purpose.
    pub fn is_awaited_at_once(&self) -> bool {
        match (self.purpose, self.axis) {
            (Purpose::GatherParameters | Purpose::PublishParameters, _) => false,
            (Purpose::ReduceGradients, axis) => matches!(axis, Axis::Sp | Axis::Replicas),
            (Purpose::ExchangeForward | Purpose::ExchangeBackward | Purpose::Agree, _) => true,
        }
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

/// Floating-point operations of a piece of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Which piece.
    pub piece: Piece,
    /// Which pass.
    pub pass: Pass,
    /// Operations; a multiplication with an addition is two.
    pub flops: f64,
}

/// A piece of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Piece {
    /// Projections to and from the heads of a layer.
    Projections,
    /// Attention of this rank's heads over all tokens.
    Attention,
    /// The MLP of a layer.
    Mlp,
    /// The output projection with its loss.
    Head,
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
