//! The strided all-to-all by packing, for backends that cannot address their peers'
//! memory, and the validation of plans, for all.

use super::arguments::Arguments;
use super::block::copy_block;
use super::dtype::for_dtype;
use super::{CollectiveOp, CommError, Pending, ProcessGroup, RecvBlock, StridedBlock, StridedPlan};
use crate::tensor::{with_slice, with_slice_mut};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// Checks a plan against the tensors of this rank; returns their dtype.
///
/// # Errors
/// [`CommError::InvalidArgument`] when the plan is not for this group's size, names a
/// tensor that was not given, leaves a tensor's bounds or writes an element twice
/// within a block.
pub(super) fn validate(
    group: &str,
    world_size: usize,
    inputs: &[Tensor],
    outputs: &[Tensor],
    plan: &StridedPlan,
) -> Result<DType, CommError> {
    let arguments = Arguments { group, world_size, op: CollectiveOp::AllToAllStrided };
    let dtype = arguments.tensors(&inputs.iter().chain(outputs).collect::<Vec<_>>())?;
    for (what, ranks) in [("send", plan.send.len()), ("recv", plan.recv.len())] {
        if ranks != world_size {
            return Err(
                arguments.invalid(format!("the plan has {what} blocks for {ranks} ranks, not {world_size}"))
            );
        }
    }
    for (rank, blocks) in plan.send.iter().enumerate() {
        for (index, block) in blocks.iter().enumerate() {
            let fault = fault(block, inputs, "inputs");
            fault.map_or(Ok(()), |fault| {
                Err(arguments.invalid(format!("send block {index} for rank {rank} {fault}: {block:?}")))
            })?;
        }
    }
    for (rank, blocks) in plan.recv.iter().enumerate() {
        for (index, RecvBlock { block, .. }) in blocks.iter().enumerate() {
            let overlap = || block.overlaps_itself().then(|| "writes an element more than once".to_owned());
            fault(block, outputs, "outputs").or_else(overlap).map_or(Ok(()), |fault| {
                Err(arguments.invalid(format!("recv block {index} from rank {rank} {fault}: {block:?}")))
            })?;
        }
    }
    Ok(dtype)
}

/// What is wrong with the place of a block, if anything.
fn fault(block: &StridedBlock, tensors: &[Tensor], what: &str) -> Option<String> {
    let Some(tensor) = tensors.get(block.tensor) else {
        return Some(format!("names tensor {} of {} {what}", block.tensor, tensors.len()));
    };
    let elements = tensor.elem_count();
    match block.end() {
        Some(end) if end <= elements => None,
        Some(end) => Some(format!("ends at element {end} of {elements}")),
        None => Some("overflows".to_owned()),
    }
}

/// The default of
/// [`start_all_to_all_strided`](ProcessGroup::start_all_to_all_strided): packs the
/// send blocks into one buffer, exchanges it, and unpacks when that has completed.
///
/// # Errors
/// As the trait's method.
pub(super) fn pack_exchange_unpack<G: ProcessGroup + ?Sized>(
    group: &G,
    inputs: &[Tensor],
    outputs: &[Tensor],
    plan: &Arc<StridedPlan>,
) -> Result<Pending, CommError> {
    let dtype = validate(group.name(), group.world_size(), inputs, outputs, plan)?;
    let (send_counts, recv_counts) = counts(plan);
    let packed = pack(dtype, inputs, plan, send_counts.iter().sum())?;
    let received = Tensor::zeros(recv_counts.iter().sum::<usize>(), dtype, &Device::Cpu)?;
    let pending = group.start_all_to_all(&packed, &received, &send_counts, &recv_counts)?;
    let (outputs, plan) = (outputs.to_vec(), plan.clone());
    Ok(pending.then(move || unpack(dtype, &received, &outputs, &plan)))
}

/// Elements for and from every rank. The blocks were validated, so nothing overflows.
fn counts(plan: &StridedPlan) -> (Vec<usize>, Vec<usize>) {
    let elements = |block: &StridedBlock| block.batch * block.rows * block.run;
    let send = plan.send.iter().map(|blocks| blocks.iter().map(elements).sum());
    let recv = plan.recv.iter().map(|blocks| blocks.iter().map(|recv| elements(&recv.block)).sum());
    (send.collect(), recv.collect())
}

fn pack(dtype: DType, inputs: &[Tensor], plan: &StridedPlan, elements: usize) -> Result<Tensor, CommError> {
    let packed = Tensor::zeros(elements, dtype, &Device::Cpu)?;
    for_dtype!(dtype, T => with_slice_mut::<T, _>(&packed, |packed| {
        let mut cursor = 0;
        for block in plan.send.iter().flatten() {
            let to = block.packed_at(cursor);
            cursor += with_slice(&inputs[block.tensor], |input| copy_block(input, block, packed, &to, false))?;
        }
        Ok(())
    })?)?;
    Ok(packed)
}

fn unpack(dtype: DType, received: &Tensor, outputs: &[Tensor], plan: &StridedPlan) -> Result<(), CommError> {
    for_dtype!(dtype, T => with_slice::<T, _>(received, |received| {
        let mut cursor = 0;
        for RecvBlock { block, accumulate } in plan.recv.iter().flatten() {
            let from = block.packed_at(cursor);
            cursor += with_slice_mut(&outputs[block.tensor], |output| {
                copy_block(received, &from, output, block, *accumulate)
            })?;
        }
        Ok(())
    })?)
}
