//! Conversion between the element types of mixed precision: f32, bf16 and f16.

mod cpu;
mod cuda;
mod pieces;
pub mod reference;
#[cfg(test)]
mod tests;

pub(super) use cpu::{Float, convert, copy_rows};
pub(super) use pieces::{Before, PIECE, Pieces, rows_per_piece, with_element_type};

use super::OpError;
use super::call::Call;
use crate::device::Target;
use crate::tensor::with_slice;
use candle_core::Tensor;

/// target = source, element by element in memory order, rounded to nearest even if `target` is narrower.
///
/// Infinities and NaN are preserved; values too large for `target` become infinite.
///
/// # Shapes
/// source and target hold the same number of elements.
///
/// # Errors
/// Shapes, devices or layouts that do not match, an unsupported element type, or tensors that share storage.
pub fn cast(source: &Tensor, target: &Tensor) -> Result<(), OpError> {
    let call = Call::new("cast");
    call.expect(("target", target), &[source.elem_count()])?;
    let (output, input) = (("target", target), ("source", source));
    match call.elementwise(&[output], &[input])? {
        Target::Cpu => with_element_type!(source.dtype(), S => from::<S>(call, source, target)),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::cast(&launcher, source, target)),
    }
}

fn from<S: Float>(call: Call, source: &Tensor, target: &Tensor) -> Result<(), OpError> {
    with_element_type!(target.dtype(), T => between::<S, T>(call, source, target))
}

fn between<S: Float, T: Float>(call: Call, source: &Tensor, target: &Tensor) -> Result<(), OpError> {
    let converted = with_slice::<S, _>(source, |source| {
        crate::tensor::with_slice_mut::<T, _>(target, |target| convert(source, target))
    });
    converted.flatten().map_err(|source| OpError::Candle { op: call.op, source })
}
