//! Passes tensors to other ranks of a ring, while this rank computes.

use crate::comm::{ProcessGroup, RecvBlock, StridedBlock, StridedPlan};
use crate::sequence_parallel::{PendingExchange, SequenceParallelError};
use candle_core::Tensor;
use std::array::from_ref;
use std::sync::Arc;
use tracing::Span;
use ulysses_kernels::device::dry;

/// Keys and values of a block, or their gradients.
pub(super) type Pair = [Tensor; 2];

/// A pair of tensors for a rank, or from one.
pub(super) type Addressed<'a> = (usize, &'a Pair);

/// Starts to send and to receive whole pairs. Collective: every rank calls it, with or without a pair. `like` is any
/// tensor with the element type of the pairs.
///
/// It is one all-to-all, in which each rank sends to one other rank at most. So every backend moves it during computation
/// as it moves an exchange; NCCL copies it through a buffer on both sides.
pub(super) fn start_transfer(
    group: &dyn ProcessGroup,
    like: &Tensor,
    sent: Option<Addressed<'_>>,
    received: &[Addressed<'_>],
    (span, is_backward): (Span, bool),
) -> Result<PendingExchange<()>, SequenceParallelError> {
    let mut plan = StridedPlan::default();
    plan.send.resize_with(group.world_size(), Vec::new);
    plan.recv.resize_with(group.world_size(), Vec::new);
    if let Some((to, pair)) = sent {
        plan.send[to].extend(pair.iter().enumerate().map(|(index, tensor)| whole(index, tensor)));
    }
    let mut outputs = Vec::new();
    for (from, pair) in received {
        for tensor in *pair {
            let block = whole(outputs.len(), tensor);
            plan.recv[*from].push(RecvBlock { block, accumulate: false });
            outputs.push(tensor.clone());
        }
    }
    let inputs = sent.map_or(from_ref(like).as_slice(), |(_, pair)| pair.as_slice());
    dry::report_exchange(is_backward);
    let pending = span.in_scope(|| group.start_all_to_all_strided(inputs, &outputs, &Arc::new(plan)))?;
    Ok(PendingExchange { pending, received: (), span })
}

/// All elements of a tensor.
fn whole(index: usize, tensor: &Tensor) -> StridedBlock {
    let run = tensor.elem_count();
    StridedBlock { tensor: index, offset: 0, batch: 1, batch_stride: 0, rows: 1, row_stride: run, run }
}
