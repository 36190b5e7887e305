//! Copies of strided blocks between tensors, a whole list at a time: the transposes between sequence and head
//! sharding, and all else that moves elements between ranks.
//!
//! A [`StridedBlock`] is a box of elements; a [`BlockCopy`] takes one from a source to one of a target, or adds it
//! there. On a GPU the list is one launch, and one more for every time that a block is added to what another copy of
//! the list has written. The gradient of a copy is the copy of the blocks the other way round.

mod block;
mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

pub use block::StridedBlock;

use super::OpError;
use super::call::Call;
use super::element::for_dtype;
use crate::device::Target;
use crate::tensor::{with_slice, with_slice_mut};
use candle_core::Tensor;

/// One copy of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCopy {
    /// What is copied; its `tensor` is an index into the sources.
    pub from: StridedBlock,
    /// Where to; its `tensor` is an index into the targets. Of the same batch, rows and run as `from`.
    pub to: StridedBlock,
    /// Adds to what is there (16-bit floats in f32, rounded once) instead of overwriting it.
    pub accumulate: bool,
}

/// Carries out `copies` as if one after the other, in order.
///
/// # Shapes
/// Only element counts matter: every block lies within its tensor.
///
/// # Errors
/// When dtypes, devices or layouts do not fit, a source shares storage with a target, or a block leaves its tensor,
/// differs from its partner in shape, or is written and overlaps itself.
pub fn copy_blocks(sources: &[&Tensor], targets: &[&Tensor], copies: &[BlockCopy]) -> Result<(), OpError> {
    let call = Call::new("strided_copy::copy_blocks");
    let (target, dtype) = call.carried(targets, sources)?;
    check(&call, sources, targets, copies)?;
    match target {
        Target::Cpu => {
            let copied: candle_core::Result<()> = for_dtype!(dtype, T => copies.iter().try_for_each(|copy| {
                let BlockCopy { from, to, accumulate } = copy;
                with_slice_mut::<T, _>(targets[to.tensor], |target| {
                    with_slice(sources[from.tensor], |source| cpu::copy_block(source, from, target, to, *accumulate))
                })?
            }), else Ok(()));
            copied.map_err(|source| OpError::Candle { op: call.op, source })
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => {
            call.kernels(cuda::copy_blocks(&launcher, dtype, sources, targets, copies))
        }
    }
}

/// target = source, element for element in memory order.
///
/// # Shapes
/// Both hold the same number of elements.
///
/// # Errors
/// As [`copy_blocks`].
pub fn copy(source: &Tensor, target: &Tensor) -> Result<(), OpError> {
    let whole = |tensor: &Tensor| StridedBlock::contiguous(0, 0, tensor.elem_count());
    let copy = BlockCopy { from: whole(source), to: whole(target), accumulate: false };
    copy_blocks(&[source], &[target], &[copy])
}

fn check(call: &Call, sources: &[&Tensor], targets: &[&Tensor], copies: &[BlockCopy]) -> Result<(), OpError> {
    let elems = |tensors: &[&Tensor]| tensors.iter().map(|tensor| tensor.elem_count()).collect::<Vec<_>>();
    let (source_elems, target_elems) = (elems(sources), elems(targets));
    for (index, BlockCopy { from, to, .. }) in copies.iter().enumerate() {
        let refuse = |block: &StridedBlock, fault| {
            Err(OpError::Block { op: call.op, index, fault, block: Box::new(block.clone()) })
        };
        if let Some(fault) = from.fault(&source_elems, "sources") {
            return refuse(from, fault);
        }
        if let Some(fault) = to.fault(&target_elems, "targets") {
            return refuse(to, fault);
        }
        if to.overlaps_itself() {
            return refuse(to, "writes an element more than once".to_owned());
        }
        if from.shape() != to.shape() {
            return refuse(to, format!("does not have the shape {:?} of its source", from.shape()));
        }
    }
    Ok(())
}
