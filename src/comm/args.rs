//! A collective call with its arguments, and the argument checks that need no peer.

use super::arg_check::ArgCheck;
use super::call_signature::{CallSignature, Elements};
use super::{CollectiveOp, CommError, ReduceOp, StridedPlan};
use candle_core::Tensor;
use std::slice::from_ref;
use std::sync::Arc;

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
            Self::Send { .. } => CollectiveOp::Send,
            Self::Recv { .. } => CollectiveOp::Recv,
            Self::Barrier => CollectiveOp::Barrier,
        }
    }

    /// The tensors that the call reads on this rank.
    pub fn inputs(&self) -> &'a [Tensor] {
        match *self {
            Self::AllReduce { tensor, .. } | Self::Broadcast { tensor, .. } | Self::Send { tensor, .. } => {
                from_ref(tensor)
            }
            Self::ReduceScatter { input, .. }
            | Self::AllGather { input, .. }
            | Self::AllToAll { input, .. } => from_ref(input),
            Self::AllToAllStrided { inputs, .. } => inputs,
            Self::Recv { .. } | Self::Barrier => &[],
        }
    }

    /// The tensors that the call writes, including the root's tensor of a broadcast.
    pub fn outputs(&self) -> &'a [Tensor] {
        match *self {
            Self::AllReduce { tensor, .. } | Self::Broadcast { tensor, .. } | Self::Recv { tensor, .. } => {
                from_ref(tensor)
            }
            Self::ReduceScatter { output, .. }
            | Self::AllGather { output, .. }
            | Self::AllToAll { output, .. } => from_ref(output),
            Self::AllToAllStrided { outputs, .. } => outputs,
            Self::Send { .. } | Self::Barrier => &[],
        }
    }

    /// Checks everything that needs no peer. Returns the signature that ranks compare, record and print.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`].
    pub(super) fn check(&self, group: &str, world_size: usize) -> Result<CallSignature, CommError> {
        let check = ArgCheck { group, world_size, op: self.op() };
        let elements = |tensor: &Tensor| check.tensors(&[tensor]).map(|_| Elements::of(tensor));
        Ok(match *self {
            Self::AllReduce { tensor, op } => CallSignature::AllReduce { op, elements: elements(tensor)? },
            Self::ReduceScatter { input, output, op } => {
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
}
