//! A collective call: its signature, its tensors, and the argument checks that need no peer.

use super::arg_check::ArgCheck;
use super::call_signature::{CallSignature, Elements};
use super::{CollectiveOp, CommError, ProcessGroup, StridedPlan};
use candle_core::{DType, Device, Tensor};
use std::slice::from_ref;
use std::sync::Arc;
use ulysses_kernels::tensor::zeros;

/// A call of one of the `start_*` methods of [`ProcessGroup`], which create it. So signature and tensors fit together.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    pub(super) signature: CallSignature,
    pub(super) inputs: &'a [Tensor],
    pub(super) outputs: &'a [Tensor],
}

impl<'a> Call<'a> {
    /// [`start_send`](ProcessGroup::start_send).
    pub fn send(tensor: &'a Tensor, dst: usize) -> Self {
        let signature = CallSignature::Send { elements: Elements::of(tensor), dst };
        Self { signature, inputs: from_ref(tensor), outputs: &[] }
    }

    /// [`start_recv`](ProcessGroup::start_recv).
    pub fn recv(tensor: &'a Tensor, src: usize) -> Self {
        let signature = CallSignature::Recv { elements: Elements::of(tensor), src };
        Self { signature, inputs: &[], outputs: from_ref(tensor) }
    }

    /// [`start_barrier`](ProcessGroup::start_barrier).
    pub fn barrier() -> Self {
        Self { signature: CallSignature::Barrier, inputs: &[], outputs: &[] }
    }

    /// A call that reads and writes the same tensor.
    pub(super) fn in_place(signature: CallSignature, tensor: &'a Tensor) -> Self {
        Self { signature, inputs: from_ref(tensor), outputs: from_ref(tensor) }
    }

    /// [`start_all_to_all_strided`](ProcessGroup::start_all_to_all_strided).
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

    /// Checks everything that needs no peer.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`].
    pub(super) fn check<G: ProcessGroup + ?Sized>(&self, group: &G) -> Result<(), CommError> {
        let check = ArgCheck::new(group, self.op());
        let Self { signature, inputs, outputs } = self;
        match signature {
            CallSignature::AllReduce { op, elements } => {
                check.operator(*op, elements.dtype)?;
                check.tensors(inputs, outputs)
            }
            CallSignature::ReduceScatter { op, chunk } => {
                check.operator(*op, chunk.dtype)?;
                check.reduced(*op, inputs, outputs)?;
                check.chunks(("input", inputs), ("output", chunk))
            }
            CallSignature::AllGather { chunk } => {
                check.tensors(inputs, outputs)?;
                check.chunks(("output", outputs), ("input", chunk))
            }
            CallSignature::AllToAll { send, recv, .. } => {
                check.tensors(inputs, outputs)?;
                check.counts("send", send, &inputs[0])?;
                check.counts("recv", recv, &outputs[0])
            }
            CallSignature::AllToAllStrided { plan, .. } => check.plan(inputs, outputs, plan),
            CallSignature::Broadcast { root, .. } => {
                check.tensors(inputs, outputs)?;
                check.rank("root", *root)
            }
            CallSignature::Reduce { op, elements, root } => {
                check.operator(*op, elements.dtype)?;
                check.tensors(inputs, outputs)?;
                check.rank("root", *root)
            }
            CallSignature::Gather { chunk, root } => {
                check.root_only(("output", outputs), *root)?;
                check.tensors(inputs, outputs)?;
                check.chunks(("output", outputs), ("input", chunk))
            }
            CallSignature::Scatter { chunk, root } => {
                check.root_only(("input", inputs), *root)?;
                check.tensors(inputs, outputs)?;
                check.chunks(("input", inputs), ("output", chunk))
            }
            CallSignature::Send { dst, .. } => {
                check.tensors(inputs, outputs)?;
                check.rank("destination", *dst)
            }
            CallSignature::Recv { src, .. } => {
                check.tensors(inputs, outputs)?;
                check.rank("source", *src)
            }
            CallSignature::Barrier | CallSignature::Split { .. } => Ok(()),
        }
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
