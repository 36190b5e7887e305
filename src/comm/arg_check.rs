//! Argument checks that need no peer, shared by the backends.

use super::reduce::is_unrounded_sum;
use super::{Call, CallSignature, CollectiveOp, CommError, Elements, ProcessGroup, ReduceOp};
use candle_core::{DType, Tensor};
use ulysses_kernels::device::Target;
use ulysses_kernels::tensor::{DTYPE_NAMES, DTYPES};

/// The argument checks of one call, which error messages name.
#[derive(Clone, Copy)]
pub(super) struct ArgCheck<'a> {
    group: &'a str,
    rank: usize,
    pub(super) world_size: usize,
    op: CollectiveOp,
}

impl<'a> ArgCheck<'a> {
    pub(super) fn new<G: ProcessGroup + ?Sized>(group: &'a G, op: CollectiveOp) -> Self {
        Self { group: group.name(), rank: group.rank(), world_size: group.world_size(), op }
    }

    pub(super) fn invalid(&self, reason: String) -> CommError {
        CommError::InvalidArgument { group: self.group.to_owned(), op: self.op, reason }
    }

    /// Checks that every tensor is contiguous and that all are on one device with one dtype.
    pub(super) fn tensors(&self, inputs: &[Tensor], outputs: &[Tensor]) -> Result<(), CommError> {
        let Some(first) = inputs.iter().chain(outputs).next() else {
            return Err(self.invalid("at least one tensor is required, to know the dtype".to_owned()));
        };
        let dtype = first.dtype();
        if !DTYPES.contains(&dtype) {
            return Err(self.invalid(format!("dtype {dtype:?} is not supported; use {DTYPE_NAMES}")));
        }
        Target::of(first.device()).map_err(|unsupported| self.invalid(unsupported.to_string()))?;
        for tensor in inputs.iter().chain(outputs) {
            if tensor.dtype() != dtype {
                return Err(
                    self.invalid(format!("tensors of dtype {dtype:?} and {:?} in one call", tensor.dtype()))
                );
            }
            self.device(first, tensor)?;
            if !tensor.is_contiguous() {
                let (shape, stride) = (tensor.shape(), tensor.stride());
                return Err(self
                    .invalid(format!("tensors must be contiguous, got shape {shape:?} strides {stride:?}")));
            }
        }
        Ok(())
    }

    /// Checks that two tensors are on one device.
    pub(super) fn device(&self, first: &Tensor, other: &Tensor) -> Result<(), CommError> {
        let (first, other) = (first.device().location(), other.device().location());
        if first == other {
            return Ok(());
        }
        Err(self.invalid(format!("tensors on {first:?} and {other:?} in one call")))
    }

    /// As [`tensors`](Self::tensors), for the input and the output of a reduction: a sum of 16-bit elements may be f32.
    pub(super) fn reduced(&self, op: ReduceOp, input: &[Tensor], output: &[Tensor]) -> Result<(), CommError> {
        if !is_unrounded_sum(op, &[&input[0]], &output[0]) {
            return self.tensors(input, output);
        }
        self.tensors(input, &[])?;
        self.tensors(output, &[])?;
        self.device(&input[0], &output[0])
    }

    /// Checks that the operator is defined for the elements.
    pub(super) fn operator(&self, op: ReduceOp, dtype: DType) -> Result<(), CommError> {
        if op != ReduceOp::Average || dtype.is_float() {
            return Ok(());
        }
        Err(self.invalid(format!("an average of {dtype:?} would be truncated; use a sum, or floats")))
    }

    /// Checks that the root, and no other rank, passes the tensor with the chunks of all ranks.
    pub(super) fn root_only(&self, name: &str, whole: &[Tensor], root: usize) -> Result<(), CommError> {
        self.rank("root", root)?;
        let rank = self.rank;
        match (whole, rank == root) {
            ([], true) => {
                Err(self.invalid(format!("rank {root} of the group is the root and needs an {name}")))
            }
            ([_, ..], false) => Err(self.invalid(format!(
                "only the root, rank {root} of the group, has an {name}, but rank {rank} passes one"
            ))),
            _ => Ok(()),
        }
    }

    /// Checks that `whole`, where it is passed, holds one chunk like the part per rank.
    pub(super) fn chunks(
        &self,
        whole_name: &str,
        whole: &[Tensor],
        part_name: &str,
        Elements { count, .. }: &Elements,
    ) -> Result<(), CommError> {
        let ranks = self.world_size;
        let expected = count * ranks;
        match whole.first().map(Tensor::elem_count) {
            Some(given) if given != expected => Err(self.invalid(format!(
                "{whole_name} has {given} elements, expected {expected}: {ranks} ranks × {count} elements of {part_name}"
            ))),
            _ => Ok(()),
        }
    }

    /// Checks that there is one count per rank and that they add up to the elements of `tensor`.
    pub(super) fn counts(&self, what: &str, counts: &[usize], tensor: &Tensor) -> Result<(), CommError> {
        if counts.len() != self.world_size {
            let (given, world_size) = (counts.len(), self.world_size);
            return Err(self.invalid(format!("{given} {what} counts for a group of {world_size} ranks")));
        }
        let sum = counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
        if sum != Some(tensor.elem_count()) {
            let elements = tensor.elem_count();
            return Err(self.invalid(format!(
                "{what} counts {counts:?} do not add up to the tensor's {elements} elements"
            )));
        }
        Ok(())
    }

    pub(super) fn rank(&self, what: &str, rank: usize) -> Result<(), CommError> {
        if rank < self.world_size {
            return Ok(());
        }
        Err(self
            .invalid(format!("{what} rank {rank} is out of range for a group of size {}", self.world_size)))
    }
}

impl Call<'_> {
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
                check.chunks("input", inputs, "output", chunk)
            }
            CallSignature::AllGather { chunk } => {
                check.tensors(inputs, outputs)?;
                check.chunks("output", outputs, "input", chunk)
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
                check.root_only("output", outputs, *root)?;
                check.tensors(inputs, outputs)?;
                check.chunks("output", outputs, "input", chunk)
            }
            CallSignature::Scatter { chunk, root } => {
                check.root_only("input", inputs, *root)?;
                check.tensors(inputs, outputs)?;
                check.chunks("input", inputs, "output", chunk)
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
}
