//! A collective call with its arguments, and the argument checks that need no peer.

use super::arg_check::ArgCheck;
use super::call_signature::{CallSignature, Elements};
use super::{CollectiveOp, CommError, ReduceOp, StridedPlan};
use candle_core::Tensor;
use std::slice::from_ref;
use std::sync::Arc;
use ulysses_kernels::tensor::zeros;

/// A call of one of the `start_*` methods of [`ProcessGroup`](super::ProcessGroup), with its arguments.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the fields are the methods' arguments")]
pub enum CollectiveArgs<'a> {
    /// [`start_all_reduce`](super::ProcessGroup::start_all_reduce).
    AllReduce { tensor: &'a Tensor, op: ReduceOp },
    /// [`start_reduce_scatter`](super::ProcessGroup::start_reduce_scatter).
    ReduceScatter { input: &'a Tensor, output: &'a Tensor, op: ReduceOp },
    /// [`start_all_gather`](super::ProcessGroup::start_all_gather).
    AllGather { input: &'a Tensor, output: &'a Tensor },
    /// [`start_all_to_all`](super::ProcessGroup::start_all_to_all).
    AllToAll { input: &'a Tensor, output: &'a Tensor, send_counts: &'a [usize], recv_counts: &'a [usize] },
    /// [`start_all_to_all_strided`](super::ProcessGroup::start_all_to_all_strided).
    AllToAllStrided { inputs: &'a [Tensor], outputs: &'a [Tensor], plan: &'a Arc<StridedPlan> },
    /// [`start_broadcast`](super::ProcessGroup::start_broadcast).
    Broadcast { tensor: &'a Tensor, root: usize },
    /// [`start_reduce`](super::ProcessGroup::start_reduce).
    Reduce { tensor: &'a Tensor, op: ReduceOp, root: usize },
    /// [`start_gather`](super::ProcessGroup::start_gather).
    Gather { input: &'a Tensor, output: Option<&'a Tensor>, root: usize },
    /// [`start_scatter`](super::ProcessGroup::start_scatter).
    Scatter { input: Option<&'a Tensor>, output: &'a Tensor, root: usize },
    /// [`start_send`](super::ProcessGroup::start_send).
    Send { tensor: &'a Tensor, dst: usize },
    /// [`start_recv`](super::ProcessGroup::start_recv).
    Recv { tensor: &'a Tensor, src: usize },
    /// [`start_barrier`](super::ProcessGroup::start_barrier).
    Barrier,
}

impl<'a> CollectiveArgs<'a> {
    /// The operation that the call starts.
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
        }
    }

    /// The tensors that the call reads on this rank.
    pub fn inputs(&self) -> &'a [Tensor] {
        match *self {
            Self::AllReduce { tensor, .. }
            | Self::Broadcast { tensor, .. }
            | Self::Reduce { tensor, .. }
            | Self::Send { tensor, .. } => from_ref(tensor),
            Self::ReduceScatter { input, .. }
            | Self::AllGather { input, .. }
            | Self::AllToAll { input, .. }
            | Self::Gather { input, .. } => from_ref(input),
            Self::Scatter { input, .. } => input.map_or(&[], from_ref),
            Self::AllToAllStrided { inputs, .. } => inputs,
            Self::Recv { .. } | Self::Barrier => &[],
        }
    }

    /// The tensors that the call writes, including the root's tensor of a broadcast and those of all ranks of a reduce.
    pub fn outputs(&self) -> &'a [Tensor] {
        match *self {
            Self::AllReduce { tensor, .. }
            | Self::Broadcast { tensor, .. }
            | Self::Reduce { tensor, .. }
            | Self::Recv { tensor, .. } => from_ref(tensor),
            Self::ReduceScatter { output, .. }
            | Self::AllGather { output, .. }
            | Self::AllToAll { output, .. }
            | Self::Scatter { output, .. } => from_ref(output),
            Self::Gather { output, .. } => output.map_or(&[], from_ref),
            Self::AllToAllStrided { outputs, .. } => outputs,
            Self::Send { .. } | Self::Barrier => &[],
        }
    }

    /// Checks everything that needs no peer. Returns the signature that ranks compare, record and print.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`].
    pub(super) fn check(
        &self,
        group: &str,
        rank: usize,
        world_size: usize,
    ) -> Result<CallSignature, CommError> {
        let check = ArgCheck { group, world_size, op: self.op() };
        let elements = |tensor: &Tensor| check.tensors(&[tensor]).map(|_| Elements::of(tensor));
        Ok(match *self {
            Self::AllReduce { tensor, op } => {
                check.operator(op, tensor)?;
                CallSignature::AllReduce { op, elements: elements(tensor)? }
            }
            Self::ReduceScatter { input, output, op } => {
                check.operator(op, input)?;
                check.reduced(op, input, output)?;
                check.chunks(("input", input), ("output", output))?;
                let chunk = Elements { dtype: input.dtype(), count: output.elem_count() };
                CallSignature::ReduceScatter { op, chunk }
            }
            Self::AllGather { input, output } => {
                check.tensors(&[input, output])?;
                check.chunks(("output", output), ("input", input))?;
                CallSignature::AllGather { chunk: Elements::of(input) }
            }
            Self::AllToAll { input, output, send_counts, recv_counts } => {
                let dtype = check.tensors(&[input, output])?;
                check.counts("send", send_counts, input)?;
                check.counts("recv", recv_counts, output)?;
                CallSignature::AllToAll { dtype, send: send_counts.into(), recv: recv_counts.into() }
            }
            Self::AllToAllStrided { inputs, outputs, plan } => {
                let dtype = check.plan(inputs, outputs, plan)?;
                CallSignature::AllToAllStrided { dtype, plan: plan.clone() }
            }
            Self::Broadcast { tensor, root } => {
                let elements = elements(tensor)?;
                check.rank("root", root)?;
                CallSignature::Broadcast { elements, root }
            }
            Self::Reduce { tensor, op, root } => {
                check.operator(op, tensor)?;
                let elements = elements(tensor)?;
                check.rank("root", root)?;
                CallSignature::Reduce { op, elements, root }
            }
            Self::Gather { input, output, root } => {
                check.root_tensor(("output", output), ("input", input), (rank, root))?;
                CallSignature::Gather { chunk: Elements::of(input), root }
            }
            Self::Scatter { input, output, root } => {
                check.root_tensor(("input", input), ("output", output), (rank, root))?;
                CallSignature::Scatter { chunk: Elements::of(output), root }
            }
            Self::Send { tensor, dst } => {
                let elements = elements(tensor)?;
                check.rank("destination", dst)?;
                CallSignature::Send { elements, dst }
            }
            Self::Recv { tensor, src } => {
                let elements = elements(tensor)?;
                check.rank("source", src)?;
                CallSignature::Recv { elements, src }
            }
            Self::Barrier => CallSignature::Barrier,
        })
    }

    /// Describes a checked gather or scatter as an all-to-all, in which only the root sends or receives several chunks.
    /// Other calls have no such description.
    pub(super) fn as_all_to_all(
        &self,
        rank: usize,
        world_size: usize,
    ) -> Result<Option<RootedExchange>, CommError> {
        let (whole, chunk, root) = match *self {
            Self::Gather { input, output, root } => (output, input, root),
            Self::Scatter { input, output, root } => (input, output, root),
            _ => return Ok(None),
        };
        let count = chunk.elem_count();
        let mut with_root = vec![0; world_size];
        with_root[root] = count;
        let with_all = vec![if rank == root { count } else { 0 }; world_size];
        let chunk = chunk.clone();
        let whole =
            whole.map_or_else(|| zeros(0, chunk.dtype(), chunk.device()), |whole| Ok(whole.clone()))?;
        Ok(Some(match self {
            Self::Gather { .. } => {
                RootedExchange { input: chunk, output: whole, send_counts: with_root, recv_counts: with_all }
            }
            _ => {
                RootedExchange { input: whole, output: chunk, send_counts: with_all, recv_counts: with_root }
            }
        }))
    }
}

/// The arguments of an all-to-all that does what a gather or scatter does. Ranks other than the root have an empty
/// tensor in place of the one that they do not pass.
pub(super) struct RootedExchange {
    pub(super) input: Tensor,
    pub(super) output: Tensor,
    pub(super) send_counts: Vec<usize>,
    pub(super) recv_counts: Vec<usize>,
}
