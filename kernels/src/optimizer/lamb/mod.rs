//! LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2): Adam's direction, with a step
//! for each parameter tensor that is proportional to the tensor's norm.
//!
//! The norms are those of whole parameter tensors, while a partition of a flat tensor may hold parts of them.
//! So a step has two calls. [`direction`] updates the moments and returns each segment's squared norms, which
//! the caller sums over the partitions; [`apply`] updates the parameters. [`Segments`] has the elements of
//! each parameter tensor.

mod cpu;
mod cuda;
pub mod reference;
mod segments;
#[cfg(test)]
mod tests;

pub use segments::{Segments, SquaredNorms};

use super::{Step, TensorStep, check_betas, check_step, refuse_state};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::device::{Target, dry};
use candle_core::Tensor;

/// Hyper-parameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LambParams {
    /// The step, with its learning rate.
    pub step: Step,
    /// Decay of the mean of gradients, at least 0 and below 1.
    pub beta1: f64,
    /// Decay of the mean of squared gradients, at least 0 and below 1.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay: weight_decay · parameter is part of the direction, and so of its norm.
    pub weight_decay: f64,
    /// Whether the moments are divided by 1 − βᵗ.
    pub bias_correction: bool,
    /// Lower bound of the trust ratio (DeepSpeed's `min_coeff`).
    pub min_coeff: f64,
    /// Upper bound of the trust ratio (DeepSpeed's `max_coeff`).
    pub max_coeff: f64,
}

impl TensorStep for LambParams {
    fn find_directions(
        &self,
        param: &Tensor,
        grad: &Tensor,
        state: &[Tensor],
        segments: &Segments,
    ) -> Result<Vec<SquaredNorms>, OpError> {
        match state {
            [exp_avg, exp_avg_sq] => direction(param, grad, exp_avg, exp_avg_sq, segments, self),
            _ => refuse_state("lamb::direction", state.len()).map(|()| Vec::new()),
        }
    }

    fn apply_directions(
        &self,
        param: &Tensor,
        direction: &Tensor,
        segments: &Segments,
        norms: &[SquaredNorms],
    ) -> Result<(), OpError> {
        apply(param, direction, segments, norms, self)
    }
}

impl LambParams {
    /// ‖p‖ / ‖u‖ within the bounds, from the norms of a whole parameter tensor; 1 if either norm is 0.
    #[must_use]
    pub fn trust_ratio(&self, norms: SquaredNorms) -> f64 {
        if norms.param == 0.0 || norms.direction == 0.0 {
            return 1.0;
        }
        let ratio = (norms.param / norms.direction).sqrt();
        // Not `clamp`, which panics if the bounds are NaN; a NaN ratio stays NaN.
        if ratio < self.min_coeff {
            self.min_coeff
        } else if ratio > self.max_coeff {
            self.max_coeff
        } else {
            ratio
        }
    }
}

/// The first half of a step: updates exp_avg and exp_avg_sq, and overwrites grad with the direction. Returns
/// the squared norms of this part of each segment. Synchronizes with a GPU.
///
/// With g = grad · grad_scale: m ← m + (1 − β₁)(g − m); v ← β₂v + (1 − β₂)g²; u = m / (1 − β₁ᵗ) / (√v / √(1 −
/// β₂ᵗ) + ε) + weight_decay · p.
///
/// Elements outside of the segments are unchanged.
///
/// # Shapes
/// All tensors hold the same number of elements, and the segments lie within them.
///
/// # Errors
/// A `step` of 0, a β outside of [0, 1), shapes, dtypes, devices or layouts that do not match, or two tensors
/// that share storage.
pub fn direction(
    param: &Tensor,
    grad: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
    segments: &Segments,
    params: &LambParams,
) -> Result<Vec<SquaredNorms>, OpError> {
    let call = ArgCheck::new("lamb::direction");
    check_step(call, params.step)?;
    check_betas(call, params.beta1, params.beta2)?;
    for argument in [("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)] {
        call.expect(argument, &[param.elem_count()])?;
    }
    segments.expect_within(call, param)?;
    let outputs = [("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
    let target = call.elementwise(&outputs, &[("param", param)])?;
    dry::report_elementwise([grad, exp_avg, exp_avg_sq]);
    call.element_type(&[], &[&outputs[..], &[("param", param)]].concat())?;
    match target {
        Target::Cpu => {
            let param = call.read(param)?;
            call.write(grad, |grad| {
                call.write(exp_avg, |exp_avg| {
                    call.write(exp_avg_sq, |exp_avg_sq| {
                        Ok(cpu::direction(&param, [grad, exp_avg, exp_avg_sq], segments, params))
                    })
                })
            })
        }
        Target::Dry(_) => Ok(vec![SquaredNorms::default(); segments.len()]),
        Target::Kernels(launcher) => {
            let tensors = [param, grad, exp_avg, exp_avg_sq];
            call.kernels(cuda::direction(&launcher, tensors, segments, params))
        }
    }
}

/// The second half of a step: p ← p − lr · ratio · u, with the [trust ratio](LambParams::trust_ratio) of each
/// segment. `norms` are those of whole parameter tensors: the results of [`direction`], summed over all
/// partitions.
///
/// # Shapes
/// Both tensors have the same number of elements, the segments lie within them, and `norms` has one entry per
/// segment.
///
/// # Errors
/// `norms` of another length, bounds of the trust ratio that are not in order, shapes, dtypes, devices or
/// layouts that do not match, or tensors that share storage.
pub fn apply(
    param: &Tensor,
    direction: &Tensor,
    segments: &Segments,
    norms: &[SquaredNorms],
    params: &LambParams,
) -> Result<(), OpError> {
    let call = ArgCheck::new("lamb::apply");
    let are_ordered = 0.0 <= params.min_coeff && params.min_coeff <= params.max_coeff;
    call.expect_value("min_coeff", params.min_coeff, are_ordered, "between 0 and `max_coeff`")?;
    let of_each = norms.len() == segments.len();
    call.expect_value("norms", norms.len() as f64, of_each, "one for each segment")?;
    call.expect(("direction", direction), &[param.elem_count()])?;
    segments.expect_within(call, param)?;
    let target = call.elementwise(&[("param", param)], &[("direction", direction)])?;
    dry::report_elementwise([param]);
    call.element_type(&[], &[("param", param), ("direction", direction)])?;
    let step_size = |norms: &SquaredNorms| (params.step.lr * params.trust_ratio(*norms)) as f32;
    let step_sizes: Vec<f32> = norms.iter().map(step_size).collect();
    match target {
        Target::Cpu => {
            let direction = call.read(direction)?;
            call.write(param, |param| {
                cpu::apply(param, &direction, segments, &step_sizes);
                Ok(())
            })
        }
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => {
            call.kernels(cuda::apply(&launcher, [param, direction], segments, &step_sizes))
        }
    }
}

/// The constants of one step, computed in f64 and rounded once.
#[derive(Clone, Copy)]
struct Factors {
    grad_scale: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    /// 1 / (1 − β₁ᵗ)
    mean_scale: f32,
    /// 1 / √(1 − β₂ᵗ)
    root_scale: f32,
    eps: f32,
    weight_decay: f32,
}

impl Factors {
    fn new(params: &LambParams) -> Self {
        let LambParams { beta1, beta2, .. } = *params;
        let t = params.step.number as f64;
        let (correction1, correction2) = match params.bias_correction {
            true => (1.0 - beta1.powf(t), 1.0 - beta2.powf(t)),
            false => (1.0, 1.0),
        };
        Self {
            grad_scale: params.step.grad_scale as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            mean_scale: (1.0 / correction1) as f32,
            root_scale: (1.0 / correction2.sqrt()) as f32,
            eps: params.eps as f32,
            weight_decay: params.weight_decay as f32,
        }
    }
}
