//! Reductions over ranks: combines elements of several tensors, always in rank order.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::OpError;
use super::call::Call;
use super::element::for_dtype;
use crate::device::Target;
use crate::tensor::{with_slice_mut, with_slices};
use candle_core::Tensor;

/// The operator of a reduction.
///
/// 16-bit floats are reduced in `f32` and rounded once; integer sums wrap; a NaN on any rank gives NaN. This
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
}

/// Overwrites `target` with elements `begin..` of all `sources`, combined as `((x₀ ∘ x₁) ∘ x₂) …`.
///
/// # Shapes
/// Every source has at least `begin` elements more than `target`.
///
/// # Errors
/// No source, more than a GPU's kernel supports (256), a source that is too short, or dtypes, devices or
/// layouts that do not match.
pub fn reduce(op: ReduceOp, sources: &[&Tensor], begin: usize, target: &Tensor) -> Result<(), OpError> {
    let call = Call::new("rank_reduce::reduce");
    let (computing, dtype) = call.carried(&[target], sources)?;
    call.expect_value("sources", sources.len() as f64, !sources.is_empty(), "at least one")?;
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
