//! The collectives as messages between pairs of ranks: the steps of one rank.
//!
//! Reductions are implemented here, in rank order, whatever the order of arrival: `MPI_Reduce` guarantees no
//! order, and does not support 16-bit floats. A rank's own data is copied, not sent.

use super::operation::{Step, peers};
use super::staging::Staged;
use super::transfers::{Members, Transfers};
use crate::comm::buffer::{StorageId, copy_into, copy_of};
use crate::comm::traffic::{DIRECT_REDUCE_MAX_ELEMS, all_reduce_chunk};
use crate::comm::{CommError, ElementCounts, ReduceOp, reduce};
use candle_core::Tensor;
use std::ops::Range;

pub(super) type StepResult = Result<Option<Step>, CommError>;

/// Returns a `range` of the elements of a contiguous tensor.
pub(super) fn part(tensor: &Tensor, range: Range<usize>) -> Result<Tensor, CommError> {
    Ok(tensor.flatten_all()?.narrow(0, range.start, range.len())?)
}

/// Reduces into `target`. The elements of rank `r` are at `r · n` of `received`; this rank's
/// are `own`, which shares no memory with `target`.
fn reduce_into(
    members: &Members,
    op: ReduceOp,
    own: &Tensor,
    received: &Tensor,
    target: &Tensor,
) -> Result<(), CommError> {
    let count = target.elem_count();
    let source = |rank: usize| {
        if rank == members.rank() {
            Ok(own.clone())
        } else {
            part(received, rank * count..(rank + 1) * count)
        }
    };
    let sources = (0..members.world_size()).map(source).collect::<Result<Vec<_>, _>>()?;
    Ok(reduce::reduce(op, &sources.iter().collect::<Vec<_>>(), 0, target)?)
}

/// Allocates a buffer for `count` elements of every rank, with the dtype of `like`.
fn staging_buffer(members: &Members, count: usize, like: &Tensor) -> Result<Staged, CommError> {
    members.staging.alloc(members.world_size() * count, like.dtype())
}

/// Reduces on every rank, or on `root` only. For small tensors, a rank collects all ranks' elements and reduces them. For
/// large ones, each rank reduces one chunk, then collects the other chunks.
pub(super) fn reduce_to(
    transfers: &mut Transfers,
    members: &Members,
    tensor: Tensor,
    op: ReduceOp,
    root: Option<usize>,
) -> StepResult {
    let count = tensor.elem_count();
    if members.world_size() == 1 || count == 0 {
        return Ok(None);
    }
    if count > DIRECT_REDUCE_MAX_ELEMS {
        return reduce_in_chunks(transfers, members, tensor, op, root);
    }
    for peer in peers(members).filter(|&peer| is_target(root, peer)) {
        transfers.send(members, &tensor, peer)?;
    }
    if !is_target(root, members.rank()) {
        return Ok(None);
    }
    let staged = staging_buffer(members, count, &tensor)?;
    let received = staged.tensor()?;
    for peer in peers(members) {
        transfers.receive(members, &part(&received, peer * count..(peer + 1) * count)?, peer)?;
    }
    Ok(Some(Step::last(move |members| {
        let own = copy_of(&tensor)?;
        reduce_into(members, op, &own, &received, &tensor)?;
        members.staging.recycle(staged);
        Ok(())
    })))
}

/// Returns whether a rank gets the result of a reduction.
fn is_target(root: Option<usize>, rank: usize) -> bool {
    root.is_none_or(|root| root == rank)
}

fn reduce_in_chunks(
    transfers: &mut Transfers,
    members: &Members,
    tensor: Tensor,
    op: ReduceOp,
    root: Option<usize>,
) -> StepResult {
    let (ranks, count) = (members.world_size(), tensor.elem_count());
    let own = all_reduce_chunk(ranks, members.rank(), count);
    let staged = staging_buffer(members, own.len(), &tensor)?;
    let received = staged.tensor()?;
    for peer in peers(members) {
        let from_peer = peer * own.len()..(peer + 1) * own.len();
        transfers.receive(members, &part(&received, from_peer)?, peer)?;
        transfers.send(members, &part(&tensor, all_reduce_chunk(ranks, peer, count))?, peer)?;
    }
    // All sends from this rank's tensor are complete when this step begins, so it may be written.
    Ok(Some(Step::new(move |transfers, members| {
        let staged_sum = members.staging.alloc(own.len(), tensor.dtype())?;
        let reduced = staged_sum.tensor()?;
        reduce_into(members, op, &part(&tensor, own.clone())?, &received, &reduced)?;
        members.staging.recycle(staged);
        let is_given_the_result = is_target(root, members.rank());
        if is_given_the_result {
            copy_into(&reduced, &part(&tensor, own)?)?;
        }
        transfers.next_phase();
        for peer in peers(members) {
            if is_given_the_result {
                transfers.receive(members, &part(&tensor, all_reduce_chunk(ranks, peer, count))?, peer)?;
            }
            if is_target(root, peer) {
                transfers.send(members, &reduced, peer)?;
            }
        }
        Ok(Some(Step::last(move |members| {
            members.staging.recycle(staged_sum);
            Ok(())
        })))
    })))
}

pub(super) fn reduce_scatter(
    transfers: &mut Transfers,
    members: &Members,
    input: Tensor,
    output: Tensor,
    op: ReduceOp,
) -> StepResult {
    let count = output.elem_count();
    let staged = staging_buffer(members, count, &input)?;
    let received = staged.tensor()?;
    for peer in peers(members) {
        transfers.receive(members, &part(&received, peer * count..(peer + 1) * count)?, peer)?;
        transfers.send(members, &part(&input, peer * count..(peer + 1) * count)?, peer)?;
    }
    Ok(Some(Step::last(move |members| {
        let own = part(&input, members.rank() * count..(members.rank() + 1) * count)?;
        let is_shared = StorageId::of(&own) == StorageId::of(&output);
        let own = if is_shared { copy_of(&own)? } else { own };
        reduce_into(members, op, &own, &received, &output)?;
        members.staging.recycle(staged);
        Ok(())
    })))
}

/// `input` must not share memory with `output`.
pub(super) fn all_gather(
    transfers: &mut Transfers,
    members: &Members,
    input: &Tensor,
    output: &Tensor,
) -> StepResult {
    let count = input.elem_count();
    for peer in peers(members) {
        transfers.receive(members, &part(output, peer * count..(peer + 1) * count)?, peer)?;
        transfers.send(members, input, peer)?;
    }
    copy_into(input, &part(output, members.rank() * count..(members.rank() + 1) * count)?)?;
    Ok(None)
}

/// `input` must not share memory with `output`.
pub(super) fn all_to_all(
    transfers: &mut Transfers,
    members: &Members,
    input: &Tensor,
    output: &Tensor,
    ElementCounts { send: send_counts, recv: recv_counts }: &ElementCounts,
) -> StepResult {
    let of_rank = |counts: &[usize], rank: usize| {
        let begin: usize = counts[..rank].iter().sum();
        begin..begin + counts[rank]
    };
    for peer in peers(members) {
        transfers.receive(members, &part(output, of_rank(recv_counts, peer))?, peer)?;
        transfers.send(members, &part(input, of_rank(send_counts, peer))?, peer)?;
    }
    let own = members.rank();
    if send_counts[own] != recv_counts[own] {
        return Err(CommError::Tensor(format!(
            "the rank sends {} elements to itself but expects {}",
            send_counts[own], recv_counts[own]
        )));
    }
    copy_into(&part(input, of_rank(send_counts, own))?, &part(output, of_rank(recv_counts, own))?)?;
    Ok(None)
}

pub(super) fn broadcast(
    transfers: &mut Transfers,
    members: &Members,
    tensor: &Tensor,
    root: usize,
) -> StepResult {
    if root == members.rank() {
        peers(members).try_for_each(|peer| transfers.send(members, tensor, peer))?;
    } else {
        transfers.receive(members, tensor, root)?;
    }
    Ok(None)
}
