//! Values with fewer elements per head than queries and keys, as in latent attention. The kernels have one size for all: values are
//! widened with zeros right before them, and the output is cut right after them, so that neither exchange nor saved state has the zeros.

use crate::elementwise::fill;
use crate::strided_copy::{BlockCopy, StridedBlock, copy_blocks};
use crate::{OpError, Workspace};
use candle_core::Tensor;

/// A tensor with zeros after the elements of each head, up to `width`; the tensor itself if it has as many. One that has more is
/// left for the kernels to refuse.
///
/// # Shapes
/// `[b, s, h, dv]` → `[b, s, h, width]`.
pub(super) fn widened(narrow: &Tensor, width: usize, workspace: &Workspace) -> Result<Tensor, OpError> {
    let [leading @ .., own] = narrow.dims() else { return Ok(narrow.clone()) };
    if *own >= width {
        return Ok(narrow.clone());
    }
    let wide = workspace.alloc([leading, &[width]].concat())?;
    fill(&wide, 0.0)?;
    copy_heads(narrow, &wide, *own)?;
    Ok(wide)
}

/// The first `width` elements of each head, in place of the tensor; the tensor itself if it has no more.
pub(super) fn narrowed(wide: Tensor, width: usize, workspace: &Workspace) -> Result<Tensor, OpError> {
    let [leading @ .., own] = wide.dims() else { return Ok(wide) };
    if *own <= width {
        return Ok(wide);
    }
    let narrow = workspace.alloc([leading, &[width]].concat())?;
    copy_heads(&wide, &narrow, width)?;
    workspace.recycle(wide);
    Ok(narrow)
}

/// Recycles the result of [`widened`], unless it is the tensor itself.
pub(super) fn recycle_copy(wide: Tensor, narrow: &Tensor, workspace: &Workspace) {
    if wide.id() != narrow.id() {
        workspace.recycle(wide);
    }
}

/// Copies the first `run` elements of each head.
fn copy_heads(from: &Tensor, to: &Tensor, run: usize) -> Result<(), OpError> {
    let heads = |tensor: &Tensor| {
        let row_stride = tensor.dims().last().copied().unwrap_or_default();
        let rows = tensor.elem_count() / row_stride.max(1);
        StridedBlock { tensor: 0, offset: 0, batch: 1, batch_stride: 0, rows, row_stride, run }
    };
    copy_blocks(&[from], &[to], &[BlockCopy { from: heads(from), to: heads(to), accumulate: false }])
}
