//! Reductions over ranks: combines elements of several tensors, always in rank order.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::OpError;
use super::arg_check::ArgCheck;
use super::cast::{cast, with_element_type};
use super::element::for_dtype;
use super::elementwise::accumulate;
use crate::device::Target;
use crate::tensor::{with_slice_mut, with_slices};
use candle_core::{DType, Tensor};

/// The operator of a reduction.
///
/// 16-bit floats are reduced in `f32` and rounded once; integer sums and products wrap; a NaN on any rank gives NaN. This
/// holds for [`reduce`], and so for the thread backend. NCCL's kernels add in their own order, may round
/// 16-bit floats at every step, and may drop a NaN in `Max` and `Min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum ReduceOp {
    /// Adds the ranks' elements, in rank order.
    Sum,
    /// Keeps the largest element.
    Max,
    /// Keeps the smallest element.
    Min,
    /// Adds the ranks' elements, in rank order, and divides the sum by the number of ranks. Floats only.
    Average,
    /// Multiplies the ranks' elements, in rank order.
    Product,
}

/// Overwrites `target` with elements `begin..` of all `sources`, combined as `((x₀ ∘ x₁) ∘ x₂) …`. A `target` in f32 takes
/// the sum of 16-bit sources as it is, without rounding.
///
/// # Shapes
/// Every source has at least `begin` elements more than `target`.
///
/// # Errors
/// No source, more than a GPU's kernel supports (256), a source that is too short, an average of integers, or dtypes,
/// devices or layouts that do not match.
pub fn reduce(op: ReduceOp, sources: &[&Tensor], begin: usize, target: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("rank_reduce::reduce");
    let is_unrounded = is_unrounded_sum(op, sources, target);
    let (computing, dtype) = match is_unrounded {
        true => call.unrounded(sources, target)?,
        false => call.carried(&[target], sources)?,
    };
    call.expect_value("sources", sources.len() as f64, !sources.is_empty(), "at least one")?;
    if op == ReduceOp::Average && !dtype.is_float() {
        return Err(OpError::ElementType { op: call.op, argument: "input", got: dtype });
    }
    let end = begin.saturating_add(target.elem_count());
    for source in sources {
        let elems = source.elem_count();
        call.expect_value(
            "begin",
            begin as f64,
            end <= elems,
            "a place from which on all sources fill the target",
        )?;
    }
    match computing {
        Target::Cpu if is_unrounded => {
            let summed = with_element_type!(dtype, T => {
                with_slice_mut::<f32, _>(target, |target| {
                    with_slices::<T, _>(sources, |sources| cpu::sum(sources, begin, target, |sum| sum))
                })
                .flatten()
            });
            summed.map_err(|source| OpError::Candle { op: call.op, source })
        }
        Target::Kernels(_) if is_unrounded => sum_by_accumulation(sources, begin, target),
        Target::Cpu => {
            let reduced: candle_core::Result<()> = for_dtype!(dtype, T => {
                with_slice_mut::<T, _>(target, |target| {
                    with_slices::<T, _>(sources, |sources| cpu::reduce(op, sources, begin, target))
                })
                .flatten()
            }, else Ok(()));
            reduced.map_err(|source| OpError::Candle { op: call.op, source })
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::reduce(&launcher, op, sources, begin, target)),
    }
}

/// Returns whether 16-bit elements are summed into an f32 tensor.
pub fn is_unrounded_sum(op: ReduceOp, sources: &[&Tensor], target: &Tensor) -> bool {
    let is_short = |source: &&Tensor| matches!(source.dtype(), DType::BF16 | DType::F16);
    op == ReduceOp::Sum && target.dtype() == DType::F32 && sources.first().is_some_and(is_short)
}

impl ArgCheck {
    /// As [`carried`](Self::carried), for 16-bit sources and an f32 target.
    fn unrounded(&self, sources: &[&Tensor], target: &Tensor) -> Result<(Target, DType), OpError> {
        let sources: Vec<_> = sources.iter().map(|&source| ("input", source)).collect();
        let computing = self.target(&[("output", target)], &sources)?;
        Ok((computing, self.element_type(&sources, &[("output", target)])?))
    }
}

/// The sum by kernels of other ops, which pass over `target` once per source.
fn sum_by_accumulation(sources: &[&Tensor], begin: usize, target: &Tensor) -> Result<(), OpError> {
    let candle = |source| OpError::Candle { op: "rank_reduce::reduce", source };
    for (rank, source) in sources.iter().enumerate() {
        let part = source.flatten_all().and_then(|flat| flat.narrow(0, begin, target.elem_count()));
        match rank {
            0 => cast(&part.map_err(candle)?, target)?,
            _ => accumulate(target, &part.map_err(candle)?)?,
        }
    }
    Ok(())
}
