//! The signature of a collective call, without its data: ranks compare it before data moves, the flight recorder stores
//! it, errors print it, and processes send it.

use super::{CollectiveOp, ReduceOp, StridedPlan};
use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// A collective call without its data. Cloning it allocates nothing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum CallSignature {
    AllReduce {
        op: ReduceOp,
        elements: Elements,
    },
    ReduceScatter {
        op: ReduceOp,
        chunk: Elements,
    },
    AllGather {
        chunk: Elements,
    },
    AllToAll {
        #[serde(with = "dtype_name")]
        dtype: DType,
        #[serde(with = "super::serde_arc")]
        send: Arc<[usize]>,
        #[serde(with = "super::serde_arc")]
        recv: Arc<[usize]>,
    },
    AllToAllStrided {
        #[serde(with = "dtype_name")]
        dtype: DType,
        #[serde(with = "super::serde_arc")]
        plan: Arc<StridedPlan>,
    },
    Broadcast {
        elements: Elements,
        root: usize,
    },
    Reduce {
        op: ReduceOp,
        elements: Elements,
        root: usize,
    },
    Gather {
        chunk: Elements,
        root: usize,
    },
    Scatter {
        chunk: Elements,
        root: usize,
    },
    Send {
        elements: Elements,
        dst: usize,
    },
    Recv {
        elements: Elements,
        src: usize,
    },
    Barrier,
    Split {
        #[serde(with = "super::serde_arc")]
        name: Arc<str>,
        color: Option<usize>,
        key: usize,
    },
}

/// Element count and dtype of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Elements {
    #[serde(with = "dtype_name")]
    pub(super) dtype: DType,
    pub(super) count: usize,
}

impl Elements {
    pub(super) fn of(tensor: &Tensor) -> Self {
        Self { dtype: tensor.dtype(), count: tensor.elem_count() }
    }
}

impl CallSignature {
    pub(super) fn op(&self) -> CollectiveOp {
        match self {
            Self::AllReduce { .. } => CollectiveOp::AllReduce,
            Self::ReduceScatter { .. } => CollectiveOp::ReduceScatter,
            Self::AllGather { .. } => CollectiveOp::AllGather,
            Self::AllToAll { .. } => CollectiveOp::AllToAll,
            Self::AllToAllStrided { .. } => CollectiveOp::AllToAllStrided,
            Self::Broadcast { .. } => CollectiveOp::Broadcast,
            Self::Reduce { .. } => CollectiveOp::Reduce,
            Self::Gather { .. } => CollectiveOp::Gather,
            Self::Scatter { .. } => CollectiveOp::Scatter,
            Self::Send { .. } => CollectiveOp::Send,
            Self::Recv { .. } => CollectiveOp::Recv,
            Self::Barrier => CollectiveOp::Barrier,
            Self::Split { .. } => CollectiveOp::Split,
        }
    }
}

impl fmt::Display for Elements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.count, self.dtype.as_str())
    }
}

impl fmt::Display for CallSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.op();
        match self {
            Self::AllReduce { op, elements } => write!(f, "{name}({op:?}, {elements})"),
            Self::ReduceScatter { op, chunk } => write!(f, "{name}({op:?}, {chunk} per rank)"),
            Self::AllGather { chunk } => write!(f, "{name}({chunk} per rank)"),
            Self::AllToAll { dtype, send, recv } => {
                write!(f, "{name}({}, sending {send:?}, expecting {recv:?})", dtype.as_str())
            }
            Self::AllToAllStrided { dtype, .. } => write!(f, "{name}({})", dtype.as_str()),
            Self::Broadcast { elements, root } => {
                write!(f, "{name}({elements} from rank {root} of the group)")
            }
            Self::Reduce { op, elements, root } => {
                write!(f, "{name}({op:?}, {elements} to rank {root} of the group)")
            }
            Self::Gather { chunk, root } => {
                write!(f, "{name}({chunk} per rank to rank {root} of the group)")
            }
            Self::Scatter { chunk, root } => {
                write!(f, "{name}({chunk} per rank from rank {root} of the group)")
            }
            Self::Send { elements, dst: peer } | Self::Recv { elements, src: peer } => {
                write!(f, "{name}({elements}) with rank {peer} of the group")
            }
            Self::Barrier => write!(f, "{name}"),
            Self::Split { name: group, color, key } => {
                write!(f, "{name}(\"{group}\", color {color:?}, key {key})")
            }
        }
    }
}

/// Serializes a dtype as its name.
mod dtype_name {
    use candle_core::DType;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.as_str())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DType, D::Error> {
        let name = String::deserialize(from)?;
        name.parse().map_err(|_| Error::custom(format!("no dtype `{name}`")))
    }
}
