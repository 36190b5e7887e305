//! Sums over the blocks of a ring, in f32.

use candle_core::{DType, Tensor};
use ulysses_kernels::cast::cast;
use ulysses_kernels::elementwise::accumulate;
use ulysses_kernels::{OpError, Workspace};

/// The tensor in f32: itself, or a copy in its place.
pub(super) fn upcast(tensor: Tensor, workspace: &Workspace) -> Result<Tensor, OpError> {
    if tensor.dtype() == DType::F32 {
        return Ok(tensor);
    }
    let wide = workspace.alloc_f32(tensor.dims())?;
    cast(&tensor, &wide)?;
    workspace.recycle(tensor);
    Ok(wide)
}

/// A sum in the workspace's element type, which is `dtype`: itself, or a copy in its place.
pub(super) fn downcast(sum: Tensor, dtype: DType, workspace: &Workspace) -> Result<Tensor, OpError> {
    if sum.dtype() == dtype {
        return Ok(sum);
    }
    let narrow = workspace.alloc(sum.dims())?;
    cast(&sum, &narrow)?;
    workspace.recycle(sum);
    Ok(narrow)
}

/// Adds `part` to the f32 `sum`, or begins it.
pub(super) fn add(sum: Option<Tensor>, part: Tensor, workspace: &Workspace) -> Result<Tensor, OpError> {
    let Some(sum) = sum else { return upcast(part, workspace) };
    accumulate(&sum, &part)?;
    workspace.recycle(part);
    Ok(sum)
}
