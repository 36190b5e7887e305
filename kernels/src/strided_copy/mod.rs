//! Copies of strided blocks between tensors, in whole lists: the transposes between sequence and head
//! sharding, and all other copies between ranks.
//!
//! A [`StridedBlock`] is a block of elements. A [`BlockCopy`] copies a block of a source to a block of a
//! target, or adds it. On a GPU the list is one launch, plus one for each time that a block is added to the
//! result of an earlier copy in the list. The gradient of a copy is the copy in the other direction.

mod block;
mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

pub use block::StridedBlock;

use super::OpError;
use super::arg_check::ArgCheck;
use super::element::for_dtype;
use crate::device::Target;
use crate::tensor::{with_slice, with_slice_mut};
use candle_core::Tensor;

/// One copy of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCopy {
    /// The source block; its `tensor` is an index into the sources.
    pub from: StridedBlock,
    /// The target block; its `tensor` is an index into the targets. It has the batch, rows and run of `from`.
    pub to: StridedBlock,
    /// Adds to the target (16-bit floats in f32, rounded once) instead of overwriting it.
    pub accumulate: bool,
}

/// Executes `copies` as if one after the other, in order.
///
/// # Shapes
/// Only element counts matter: every block lies within its tensor.
///
/// # Errors
/// Dtypes, devices or layouts that do not match, a source that shares storage with a target, or a block that
/// exceeds its tensor, differs in shape from its counterpart, or is written to and overlaps itself.
pub fn copy_blocks(sources: &[&Tensor], targets: &[&Tensor], copies: &[BlockCopy]) -> Result<(), OpError> {
    let call = ArgCheck::new("strided_copy::copy_blocks");
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

/// target = source, element by element in memory order.
///
/// # Shapes
/// Both have the same number of elements.
///
/// # Errors
/// As [`copy_blocks`].
pub fn copy(source: &Tensor, target: &Tensor) -> Result<(), OpError> {
    let whole = |tensor: &Tensor| StridedBlock::contiguous(0, 0, tensor.elem_count());
    let copy = BlockCopy { from: whole(source), to: whole(target), accumulate: false };
    copy_blocks(&[source], &[target], &[copy])
}

fn check(
    call: &ArgCheck,
    sources: &[&Tensor],
    targets: &[&Tensor],
    copies: &[BlockCopy],
) -> Result<(), OpError> {
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
