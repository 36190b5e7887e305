//! Reductions over ranks: the same place of several tensors becomes one element, always in rank order.

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

/// How a reduction combines the ranks' elements.
///
/// 16-bit floats are reduced in `f32` and rounded once; integer sums wrap; a NaN on
/// any rank gives NaN. All of this is what [`reduce`] does, and so what the thread
/// backend does. NCCL's kernels add in an order of their own, may round 16-bit floats
/// at every step, and of a number and a NaN they may keep the number in `Max` and `Min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum ReduceOp {
    /// Adds the ranks' elements, in rank order.
    Sum,
    /// Keeps the largest element.
    Max,
    /// Keeps the smallest element.
    Min,
}

/// Overwrites `target` with elements `begin..` of all `sources`, combined: `((x₀ ∘ x₁) ∘ x₂) …`.
///
/// # Shapes
/// Every source holds at least `begin` elements more than `target`.
///
/// # Errors
/// No source, more of them than a GPU's kernel takes (256), one that is too short, or dtypes, devices or layouts that
/// do not fit.
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
