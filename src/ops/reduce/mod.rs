//! Whole-tensor reductions and the elementwise arithmetic of gradient buffers.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use super::OpError;
use super::call::Call;
use candle_core::{Device, Tensor};

/// Σ x², accumulated in f64 in an order that depends on the number of elements only.
///
/// # Errors
/// When the dtype, device or layout does not fit.
pub fn sum_of_squares(x: &Tensor) -> Result<f64, OpError> {
    let call = Call::new("reduce::sum_of_squares");
    match call.device(&[], &[("x", x)])? {
        Device::Cpu => Ok(cpu::sum_of_squares(&call.read(x)?)),
        other => call.unsupported(other),
    }
}

/// Whether no element is infinite or NaN.
///
/// # Errors
/// When the dtype, device or layout does not fit.
pub fn all_finite(x: &Tensor) -> Result<bool, OpError> {
    let call = Call::new("reduce::all_finite");
    match call.device(&[], &[("x", x)])? {
        Device::Cpu => Ok(cpu::all_finite(&call.read(x)?)),
        other => call.unsupported(other),
    }
}

/// dst += src.
///
/// # Shapes
/// dst and src hold the same number of elements.
///
/// # Errors
/// When shapes, dtypes, devices or layouts do not fit, or the tensors share storage.
pub fn accumulate(dst: &Tensor, src: &Tensor) -> Result<(), OpError> {
    let call = Call::new("reduce::accumulate");
    call.expect(("src", src), &[dst.elem_count()])?;
    match call.device(&[("dst", dst)], &[("src", src)])? {
        Device::Cpu => {
            let src = call.read(src)?;
            call.write(dst, |dst| {
                cpu::accumulate(dst, &src);
                Ok(())
            })
        }
        other => call.unsupported(other),
    }
}

/// dst *= factor.
///
/// # Errors
/// When the dtype, device or layout does not fit.
pub fn scale(dst: &Tensor, factor: f32) -> Result<(), OpError> {
    let call = Call::new("reduce::scale");
    match call.device(&[("dst", dst)], &[])? {
        Device::Cpu => call.write(dst, |dst| {
            cpu::scale(dst, factor);
            Ok(())
        }),
        other => call.unsupported(other),
    }
}

/// Sets every element to `value`.
///
/// # Errors
/// When the dtype, device or layout does not fit.
pub fn fill(dst: &Tensor, value: f32) -> Result<(), OpError> {
    let call = Call::new("reduce::fill");
    match call.device(&[("dst", dst)], &[])? {
        Device::Cpu => call.write(dst, |dst| {
            cpu::fill(dst, value);
            Ok(())
        }),
        other => call.unsupported(other),
    }
}

/// dst = src, element for element in memory order.
///
/// # Shapes
/// dst and src hold the same number of elements.
///
/// # Errors
/// As [`accumulate`].
pub fn copy(dst: &Tensor, src: &Tensor) -> Result<(), OpError> {
    let call = Call::new("reduce::copy");
    call.expect(("src", src), &[dst.elem_count()])?;
    match call.device(&[("dst", dst)], &[("src", src)])? {
        Device::Cpu => {
            let src = call.read(src)?;
            call.write(dst, |dst| {
                cpu::copy(dst, &src);
                Ok(())
            })
        }
        other => call.unsupported(other),
    }
}
