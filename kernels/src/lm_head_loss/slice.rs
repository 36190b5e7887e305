//! Head and loss of a slice of the vocabulary, for ranks that divide it (Megatron's vocabulary-parallel cross-entropy, arXiv
//! 1909.08053, section 3). Every token has a label, which is in one of the slices.
//!
//! No rank has all logits of a token. Two numbers per token and slice are enough: the logsumexp of the slice's logits, and the logit
//! of the label, −∞ in the slices that do not have it.

use super::{
    ArgCheck, ELSEWHERE, Labels, LogitTiles, LossSum, Losses, OpError, Operands, Projection, Workspace, cpu,
    cuda, with_element_type, with_tile_logits,
};
use crate::device::Target;
use candle_core::Tensor;
use std::ops::Range;

/// The labels, as the slice of the classes `classes` has them.
pub fn labels(labels: &[i64], classes: &Range<usize>) -> Labels {
    let in_slice = |label: &i64| match usize::try_from(*label) {
        Ok(label) if classes.contains(&label) => (label - classes.start) as i64,
        _ => ELSEWHERE,
    };
    Labels::new(labels.iter().map(in_slice).collect::<Vec<_>>())
}

/// Computes the statistics of a slice: the logsumexp of each token, then the logit of each token's label.
///
/// # Shapes
/// Those of the [`Operands`], with a projection to the classes of the slice; `statistics: [2, n]`
///
/// # Errors
/// As [`forward`](super::forward); valid labels are [`ELSEWHERE`] and those of the slice.
pub fn forward(
    operands: &Operands<'_>,
    tiles: impl Into<LogitTiles>,
    statistics: &Tensor,
    workspace: &Workspace,
) -> Result<(), OpError> {
    let Operands { x, projection: Projection { weight, bias }, labels } = *operands;
    let call = ArgCheck::new("lm_head_loss::slice::forward");
    let shape = operands.check(call, LogitTiles { is_slice: true, ..tiles.into() })?;
    call.expect(("statistics", statistics), &[2, shape.tokens])?;
    let inputs = operands.named();
    let target = call.target(&[("statistics", statistics)], &inputs)?;
    let dtype = call.element_type(&inputs, &[("statistics", statistics)])?;
    shape.report(false, 1.0);
    match target {
        Target::Cpu => {
            let bias = bias.map(|bias| call.read(bias)).transpose()?;
            with_element_type!(dtype, T => with_tile_logits(call, shape, workspace, |logits| {
                call.write(statistics, |statistics| call.on_cpu([x, weight], [], |[x, weight]: [&[T]; 2], []| {
                    let (lse, of_labels) = statistics.split_at_mut(shape.tokens);
                    let weights = cpu::Weights { weight, bias: bias.as_deref() };
                    cpu::forward(shape, x, weights, labels, lse, logits, |token, _, logit| {
                        of_labels[token] = logit;
                    })
                })?)
            }))
        }
        Target::Dry(cpu) => shape.alloc_dry(cpu, operands.projection, workspace),
        Target::Kernels(launcher) => call.kernels(cuda::statistics(&launcher, shape, operands, statistics)),
    }
}

/// Combines the statistics of all slices: writes each token's logsumexp over the whole vocabulary, for
/// [`backward`](super::backward), and returns the losses of the tokens `own`. Slices are added in their order.
///
/// # Shapes
/// `statistics: [slices, 2, n], lse_out: [n]`
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not match, or tokens `own` that are not below n.
pub fn combine(statistics: &Tensor, lse_out: &Tensor, own: Range<usize>) -> Result<Losses, OpError> {
    let call = ArgCheck::new("lm_head_loss::slice::combine");
    let tokens = lse_out.elem_count();
    let slices = statistics.elem_count() / (2 * tokens).max(1);
    call.expect(("statistics", statistics), &[slices, 2, tokens])?;
    call.expect_value(
        "own",
        own.end as f64,
        own.start <= own.end && own.end <= tokens,
        "a range of the tokens",
    )?;
    let target = call.elementwise(&[("lse_out", lse_out)], &[("statistics", statistics)])?;
    call.element_type(&[("statistics", statistics), ("lse_out", lse_out)], &[("lse_out", lse_out)])?;
    let valid_tokens = own.len() as u64;
    match target {
        Target::Cpu => {
            let statistics = call.read(statistics)?;
            let sum = call.write(lse_out, |lse| Ok(cpu::combine(&statistics, lse, own)))?;
            Ok(Losses::summed(LossSum { sum, valid_tokens }))
        }
        Target::Dry(_) => Ok(Losses::summed(LossSum { sum: 0.0, valid_tokens })),
        Target::Kernels(launcher) => call.kernels(cuda::combine(&launcher, slices, statistics, lse_out, own)),
    }
}
