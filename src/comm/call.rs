//! The one description of a collective call: its tensors, and its signature, which is the call without its data. Ranks
//! compare signatures before data moves, the flight recorder stores them, errors print them, and processes send them.

use super::membership::SplitPlace;
use super::{CollectiveOp, CommError, ReduceOp, StridedPlan};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::slice::from_ref;
use std::sync::Arc;
use ulysses_kernels::tensor::zeros;

/// A call of one of the `start_*` methods of [`ProcessGroup`](super::ProcessGroup), which create it. So signature and tensors fit together.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    pub(super) signature: CallSignature,
    pub(super) inputs: &'a [Tensor],
    pub(super) outputs: &'a [Tensor],
}

impl<'a> Call<'a> {
    /// [`start_send`](super::ProcessGroup::start_send).
    pub fn send(tensor: &'a Tensor, dst: usize) -> Self {
        let signature = CallSignature::Send { elements: Elements::of(tensor), dst };
        Self { signature, inputs: from_ref(tensor), outputs: &[] }
    }

    /// [`start_recv`](super::ProcessGroup::start_recv).
    pub fn recv(tensor: &'a Tensor, src: usize) -> Self {
        let signature = CallSignature::Recv { elements: Elements::of(tensor), src };
        Self { signature, inputs: &[], outputs: from_ref(tensor) }
    }

    /// [`start_barrier`](super::ProcessGroup::start_barrier).
    pub fn barrier() -> Self {
        Self { signature: CallSignature::Barrier, inputs: &[], outputs: &[] }
    }

    /// A call that reads and writes the same tensor.
    pub(super) fn in_place(signature: CallSignature, tensor: &'a Tensor) -> Self {
        Self { signature, inputs: from_ref(tensor), outputs: from_ref(tensor) }
    }

    /// [`start_all_to_all_strided`](super::ProcessGroup::start_all_to_all_strided).
    pub(super) fn strided(inputs: &'a [Tensor], outputs: &'a [Tensor], plan: &Arc<StridedPlan>) -> Self {
        // Without tensors, the call is refused.
        let dtype = inputs.iter().chain(outputs).next().map_or(DType::F32, Tensor::dtype);
        Self { signature: CallSignature::AllToAllStrided { dtype, plan: plan.clone() }, inputs, outputs }
    }

    /// The operation that the call starts.
    pub fn op(&self) -> CollectiveOp {
        self.signature.op()
    }

    /// The call without its data.
    pub fn signature(&self) -> &CallSignature {
        &self.signature
    }

    /// The tensors that the call reads on this rank.
    pub fn inputs(&self) -> &'a [Tensor] {
        self.inputs
    }

    /// The tensors that the call writes, including the root's tensor of a broadcast and those of all ranks of a reduce.
    pub fn outputs(&self) -> &'a [Tensor] {
        self.outputs
    }

    /// The inputs, then the outputs.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &'a Tensor> {
        self.inputs.iter().chain(self.outputs)
    }

    /// The input and the output of a call with one of each; an empty tensor in place of one that this rank does not pass.
    #[cfg_attr(
        not(any(feature = "mpi", feature = "nccl")),
        allow(dead_code, reason = "threads read the tensors in place")
    )]
    pub(super) fn input_and_output(&self) -> Result<[Tensor; 2], CommError> {
        let like = self.tensors().next();
        let (dtype, device) = like.map_or((DType::F32, &Device::Cpu), |like| (like.dtype(), like.device()));
        let or_empty =
            |passed: &[Tensor]| passed.first().cloned().map_or_else(|| zeros(0, dtype, device), Ok);
        Ok([or_empty(self.inputs)?, or_empty(self.outputs)?])
    }
}

/// A collective call without its data: the operation with its operator, counts, and root or peer, a rank of the group.
/// Cloning it allocates nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are the methods' arguments")]
pub enum CallSignature {
    /// [`start_all_reduce`](super::ProcessGroup::start_all_reduce).
    AllReduce { op: ReduceOp, elements: Elements },
    /// [`start_reduce_scatter`](super::ProcessGroup::start_reduce_scatter): the input's dtype, and elements per rank.
    ReduceScatter { op: ReduceOp, chunk: Elements },
    /// [`start_all_gather`](super::ProcessGroup::start_all_gather).
    AllGather { chunk: Elements },
    /// [`start_all_to_all`](super::ProcessGroup::start_all_to_all).
    AllToAll {
        #[serde(with = "dtype_name")]
        dtype: DType,
        send: Arc<[usize]>,
        recv: Arc<[usize]>,
    },
    /// [`start_all_to_all_strided`](super::ProcessGroup::start_all_to_all_strided).
    AllToAllStrided {
        #[serde(with = "dtype_name")]
        dtype: DType,
        plan: Arc<StridedPlan>,
    },
    /// [`start_broadcast`](super::ProcessGroup::start_broadcast).
    Broadcast { elements: Elements, root: usize },
    /// [`start_reduce`](super::ProcessGroup::start_reduce).
    Reduce { op: ReduceOp, elements: Elements, root: usize },
    /// [`start_gather`](super::ProcessGroup::start_gather).
    Gather { chunk: Elements, root: usize },
    /// [`start_scatter`](super::ProcessGroup::start_scatter).
    Scatter { chunk: Elements, root: usize },
    /// [`start_send`](super::ProcessGroup::start_send).
    Send { elements: Elements, dst: usize },
    /// [`start_recv`](super::ProcessGroup::start_recv).
    Recv { elements: Elements, src: usize },
    /// [`start_barrier`](super::ProcessGroup::start_barrier).
    Barrier,
    /// [`split`](super::ProcessGroup::split), which is compared like the others, but has a method of its own.
    Split { name: Arc<str>, color: Option<usize>, key: usize },
}

/// Element count and dtype of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Elements {
    /// The dtype.
    #[serde(with = "dtype_name")]
    pub dtype: DType,
    /// The number of elements.
    pub count: usize,
}

impl Elements {
    pub(super) fn of(tensor: &Tensor) -> Self {
        Self { dtype: tensor.dtype(), count: tensor.elem_count() }
    }
}

impl CallSignature {
    /// The operation.
    pub fn op(&self) -> CollectiveOp {
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

    /// The place that a split asks for; no color in another call.
    pub(super) fn split_place(&self) -> SplitPlace {
        match *self {
            Self::Split { color, key, .. } => SplitPlace { color, key },
            _ => SplitPlace { color: None, key: 0 },
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
