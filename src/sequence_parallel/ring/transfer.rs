//! Passes tensors to other ranks of a ring, while this rank computes.

use crate::comm::{ProcessGroup, RecvBlock, StridedBlock, StridedPlan};
use crate::sequence_parallel::{PendingExchange, SequenceParallelError};
use candle_core::Tensor;
use std::array::from_ref;
use std::sync::Arc;
use ulysses_kernels::device::dry;

/// Keys and values of a block, or their gradients.
pub(super) type Pair = [Tensor; 2];

/// A pair of tensors for a rank, or from one.
pub(super) struct Addressed<'a> {
    pub(super) rank: usize,
    pub(super) pair: &'a Pair,
}

/// Whole pairs that a rank sends and receives at once.
pub(super) struct Transfer<'a> {
    /// Any tensor with the element type of the pairs, for a rank without one.
    pub(super) like: &'a Tensor,
    pub(super) sent: &'a [Addressed<'a>],
    pub(super) received: &'a [Addressed<'a>],
    pub(super) is_backward: bool,
}

impl Transfer<'_> {
    /// Starts the transfer. Collective: every rank calls it, with or without a pair. Its span is the current one.
    ///
    /// It is one all-to-all, in which each rank sends to two other ranks at most. So every backend moves it during
    /// computation as it moves an exchange; NCCL copies it through a buffer on both sides.
    pub(super) fn start(
        &self,
        group: &dyn ProcessGroup,
    ) -> Result<PendingExchange<()>, SequenceParallelError> {
        let whole = |index, tensor: &Tensor| StridedBlock::contiguous(index, 0, tensor.elem_count());
        let mut plan = StridedPlan::default();
        plan.send.resize_with(group.world_size(), Vec::new);
        plan.recv.resize_with(group.world_size(), Vec::new);
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for Addressed { rank, pair } in self.sent {
            for tensor in *pair {
                plan.send[*rank].push(whole(inputs.len(), tensor));
                inputs.push(tensor.clone());
            }
        }
        for Addressed { rank, pair } in self.received {
            for tensor in *pair {
                let block = whole(outputs.len(), tensor);
                plan.recv[*rank].push(RecvBlock { block, accumulate: false });
                outputs.push(tensor.clone());
            }
        }
        let inputs = if inputs.is_empty() { from_ref(self.like) } else { inputs.as_slice() };
        dry::report_exchange(self.is_backward);
        let pending = group.start_all_to_all_strided(inputs, &outputs, &Arc::new(plan))?;
        Ok(PendingExchange { pending, received: (), span: tracing::Span::current() })
    }
}
