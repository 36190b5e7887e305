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
use super::arg_check::ArgCheck;
use crate::device::Target;
use crate::tensor::with_slice;
use candle_core::{DType, Tensor};
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};

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
    let call = ArgCheck::new("cast");
    call.expect(("target", target), &[source.elem_count()])?;
    let (output, input) = (("target", target), ("source", source));
    match call.elementwise(&[output], &[input])? {
        Target::Cpu => with_element_type!(source.dtype(), S => from::<S>(call, source, target)),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::cast(&launcher, source, target)),
    }
}

/// Rounds f32 values on the host to the elements of type `dtype` whose bytes are `target`, aligned for them.
///
/// # Errors
/// A `target` of another length, or an unsupported element type.
pub fn round_on_host(source: &[f32], target: &mut [u8], dtype: DType) -> Result<(), OpError> {
    let call = ArgCheck::new("cast::round_on_host");
    let halves = bytemuck::cast_slice_mut::<u8, u16>;
    let fits = target.len() == source.len() * dtype.size_in_bytes();
    call.expect_value("target", target.len() as f64, fits, "the bytes of as many elements as `source`")?;
    match dtype {
        DType::BF16 => convert(source, halves(target).reinterpret_cast_mut::<bf16>()),
        DType::F16 => convert(source, halves(target).reinterpret_cast_mut::<f16>()),
        DType::F32 => convert::<f32, f32>(source, bytemuck::cast_slice_mut(target)),
        _ => return call.expect_value("dtype", dtype.size_in_bytes() as f64, false, "f32, bf16 or f16"),
    }
    Ok(())
}

fn from<S: Float>(call: ArgCheck, source: &Tensor, target: &Tensor) -> Result<(), OpError> {
    with_element_type!(target.dtype(), T => between::<S, T>(call, source, target))
}

fn between<S: Float, T: Float>(call: ArgCheck, source: &Tensor, target: &Tensor) -> Result<(), OpError> {
    let converted = with_slice::<S, _>(source, |source| {
        crate::tensor::with_slice_mut::<T, _>(target, |target| convert(source, target))
    });
    converted.flatten().map_err(|source| OpError::Candle { op: call.op, source })
}
