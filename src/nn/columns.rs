//! Columns of tensors: some elements of the last dimension, in every row.

use super::LayerError;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::Workspace;
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};

/// Some columns of a tensor, which is the one with this index.
pub(super) fn columns(index: usize, tensor: &Tensor, columns: Range<usize>) -> StridedBlock {
    let width = width(tensor);
    StridedBlock {
        tensor: index,
        offset: columns.start,
        batch: 1,
        batch_stride: 0,
        rows: tensor.elem_count() / width.max(1),
        row_stride: width,
        run: columns.len(),
    }
}

/// All columns.
pub(super) fn all_columns(index: usize, tensor: &Tensor) -> StridedBlock {
    columns(index, tensor, 0..width(tensor))
}

fn width(tensor: &Tensor) -> usize {
    tensor.dims().last().copied().unwrap_or_default()
}

/// Copies a block over another.
pub(super) fn copy(from: StridedBlock, to: StridedBlock) -> BlockCopy {
    BlockCopy { from, to, accumulate: false }
}

/// Splits columns into equal parts, and recycles the tensor, unless it is the only part.
///
/// # Shapes
/// `[…, width]` → `[…, width / parts]`.
pub(super) fn split(joint: Tensor, parts: usize, ws: &Workspace) -> Result<Vec<Tensor>, LayerError> {
    if parts == 1 {
        return Ok(vec![joint]);
    }
    let mut dims = joint.dims().to_vec();
    dims[joint.rank() - 1] /= parts;
    let split = (0..parts).map(|_| ws.alloc(dims.clone()));
    let split = split.collect::<Result<Vec<_>, _>>()?;
    let copies: Vec<_> = parts_of(&joint, &split).map(|(part, within)| copy(within, part)).collect();
    copy_blocks(&[&joint], &split.iter().collect::<Vec<_>>(), &copies)?;
    ws.recycle(joint);
    Ok(split)
}

/// The inverse of [`split`].
pub(super) fn join(mut parts: Vec<Tensor>, ws: &Workspace) -> Result<Tensor, LayerError> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    let mut dims = parts[0].dims().to_vec();
    dims[parts[0].rank() - 1] *= parts.len();
    let joint = ws.alloc(dims)?;
    let copies: Vec<_> = parts_of(&joint, &parts).map(|(part, within)| copy(part, within)).collect();
    copy_blocks(&parts.iter().collect::<Vec<_>>(), &[&joint], &copies)?;
    parts.into_iter().for_each(|part| ws.recycle(part));
    Ok(joint)
}

/// Each part, by itself and within the joint tensor.
fn parts_of(joint: &Tensor, parts: &[Tensor]) -> impl Iterator<Item = (StridedBlock, StridedBlock)> {
    let run = width(joint) / parts.len();
    parts.iter().enumerate().map(move |(index, part)| {
        (all_columns(index, part), columns(0, joint, index * run..(index + 1) * run))
    })
}
