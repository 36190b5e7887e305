//! Whole-tensor reductions and the elementwise arithmetic of gradient buffers.

mod cpu;
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

pub(crate) use cuda::{add_blocks, fill as fill_on};

use super::OpError;
use super::arg_check::ArgCheck;
use super::cast::with_element_type;
use crate::device::{Target, dry};
use candle_core::{DType, Tensor};

/// Σ x², accumulated in f64, in an order that depends only on the number of elements.
///
/// On a GPU this synchronizes, and reads at most 1024 partial sums.
///
/// # Errors
/// A dtype, device or layout that is not supported.
pub fn sum_of_squares(x: &Tensor) -> Result<f64, OpError> {
    Ok(sums_of_squares(&[x])?.into_iter().sum())
}

/// [`sum_of_squares`] of each tensor, with the same bits. On a GPU this synchronizes once for all of them.
///
/// # Errors
/// As [`sum_of_squares`]; tensors on several devices.
pub fn sums_of_squares(tensors: &[&Tensor]) -> Result<Vec<f64>, OpError> {
    let call = ArgCheck::new("elementwise::sum_of_squares");
    let arguments: Vec<_> = tensors.iter().map(|&x| ("x", x)).collect();
    match call.elementwise(&[], &arguments)? {
        Target::Cpu => tensors
            .iter()
            .map(|x| {
                with_element_type!(x.dtype(), T => call.on_cpu([x], [], |[x], []| cpu::sum_of_squares::<T>(x)))
            })
            .collect(),
        Target::Dry(_) => Ok(vec![0.0; tensors.len()]),
        Target::Kernels(launcher) => call.kernels(cuda::sums_of_squares(&launcher, tensors)),
    }
}

/// Returns whether no element is infinite or NaN. On a GPU this synchronizes.
///
/// # Errors
/// A dtype, device or layout that is not supported.
pub fn all_finite(x: &Tensor) -> Result<bool, OpError> {
    let call = ArgCheck::new("elementwise::all_finite");
    match call.elementwise(&[], &[("x", x)])? {
        Target::Cpu => {
            with_element_type!(x.dtype(), T => call.on_cpu([x], [], |[x], []| cpu::all_finite::<T>(x)))
        }
        Target::Dry(_) => Ok(true),
        Target::Kernels(launcher) => call.kernels(cuda::all_finite(&launcher, x)),
    }
}

/// dst += src. 16-bit elements may be added to an f32 `dst`.
///
/// # Shapes
/// dst and src hold the same number of elements.
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, or tensors that share storage.
pub fn accumulate(dst: &Tensor, src: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("elementwise::accumulate");
    call.expect(("src", src), &[dst.elem_count()])?;
    let target = call.elementwise(&[("dst", dst)], &[("src", src)])?;
    dry::report_elementwise([dst]);
    if dst.dtype() != DType::F32 {
        call.element_type(&[("dst", dst), ("src", src)], &[])?;
    }
    match target {
        Target::Cpu => with_element_type!(src.dtype(), S => call.on_cpu([src], [], |[src], []| {
            with_element_type!(dst.dtype(), D => {
                call.on_cpu([], [dst], |[], [dst]| cpu::accumulate::<D, S>(dst, src))
            })
        }))?,
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::accumulate(&launcher, dst, src)),
    }
}

/// dst *= factor.
///
/// # Errors
/// A dtype, device or layout that is not supported.
pub fn scale(dst: &Tensor, factor: f32) -> Result<(), OpError> {
    let call = ArgCheck::new("elementwise::scale");
    dry::report_elementwise([dst]);
    match call.elementwise(&[("dst", dst)], &[])? {
        Target::Cpu => with_element_type!(dst.dtype(), T => {
            call.on_cpu([], [dst], |[], [dst]| cpu::scale::<T>(dst, factor))
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::scale(&launcher, dst, factor)),
    }
}

/// dst *= factor, a tensor of one element.
///
/// # Errors
/// A factor of another size, or dtypes, devices or layouts that do not match.
pub fn scale_by(dst: &Tensor, factor: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("elementwise::scale_by");
    call.expect(("factor", factor), &[1])?;
    let target = call.elementwise(&[("dst", dst)], &[("factor", factor)])?;
    call.element_type(&[("dst", dst), ("factor", factor)], &[])?;
    match target {
        Target::Cpu => scale(dst, call.read(factor)?[0]),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::scale_by(&launcher, dst, factor)),
    }
}

/// dst = cap · tanh(dst / cap), which stays within ±cap.
///
/// # Errors
/// A cap that is not positive, or a dtype, device or layout that is not supported.
pub fn softcap(dst: &Tensor, cap: f32) -> Result<(), OpError> {
    let call = ArgCheck::new("elementwise::softcap");
    call.expect_value("cap", f64::from(cap), cap > 0.0 && cap.is_finite(), "a positive finite number")?;
    dry::report_elementwise([dst]);
    match call.elementwise(&[("dst", dst)], &[])? {
        Target::Cpu => with_element_type!(dst.dtype(), T => {
            call.on_cpu([], [dst], |[], [dst]| cpu::softcap::<T>(dst, cap))
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::softcap(&launcher, dst, cap)),
    }
}

/// Sets every element to `value`.
///
/// # Errors
/// A dtype, device or layout that is not supported.
pub fn fill(dst: &Tensor, value: f32) -> Result<(), OpError> {
    let call = ArgCheck::new("elementwise::fill");
    match call.elementwise(&[("dst", dst)], &[])? {
        Target::Cpu => with_element_type!(dst.dtype(), T => {
            call.on_cpu([], [dst], |[], [dst]| cpu::fill::<T>(dst, value))
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::fill(&launcher, dst, value)),
    }
}
