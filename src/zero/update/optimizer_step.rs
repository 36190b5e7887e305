//! The optimizers' update rules and their state, for optimizers that treat every element independently. LAMB
//! needs norms of whole tensors and is in [`lamb`](super::lamb).

use crate::config::OptimizerConfig;
use crate::zero::ZeroError;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::optimizer::adagrad::{self, AdagradParams};
use ulysses_kernels::optimizer::adamw::{self, AdamParams};
use ulysses_kernels::optimizer::lion::{self, LionParams};
use ulysses_kernels::optimizer::sgd::{self, SgdParams};

/// The parameters of one update that change from step to step.
#[derive(Clone, Copy)]
pub(in crate::zero) struct Step {
    /// Number of the update, from 1.
    pub(in crate::zero) number: u64,
    pub(in crate::zero) lr: f64,
    /// Factor on the gradients.
    pub(in crate::zero) grad_scale: f64,
}

/// The elements to update, with their gradients and optimizer state: tensors of equal length.
pub(in crate::zero) struct UpdateTensors {
    /// Parameters, or their master copy if there is one.
    pub(in crate::zero) parameters: Tensor,
    pub(in crate::zero) gradients: Tensor,
    /// One tensor for each of [`state_kinds`].
    pub(in crate::zero) state: Vec<Tensor>,
}

impl UpdateTensors {
    /// A range of the elements.
    pub(in crate::zero) fn narrow(&self, elements: &Range<usize>) -> Result<Self, ZeroError> {
        let narrow = |tensor: &Tensor| tensor.narrow(0, elements.start, elements.len());
        Ok(Self {
            parameters: narrow(&self.parameters)?,
            gradients: narrow(&self.gradients)?,
            state: self.state.iter().map(narrow).collect::<Result<_, _>>()?,
        })
    }
}

/// The names of an optimizer's state tensors, as in checkpoints.
pub fn state_kinds(config: &OptimizerConfig) -> &'static [&'static str] {
    match *config {
        OptimizerConfig::Adam { .. } | OptimizerConfig::Lamb { .. } => &["exp_avg", "exp_avg_sq"],
        OptimizerConfig::Sgd { momentum, .. } if momentum != 0.0 => &["momentum"],
        OptimizerConfig::Sgd { .. } => &[],
        OptimizerConfig::Lion { .. } => &["exp_avg"],
        OptimizerConfig::Adagrad { .. } => &["sum"],
    }
}

/// Initial value of the optimizer's state.
pub(in crate::zero) fn initial_state(config: &OptimizerConfig) -> f64 {
    match *config {
        OptimizerConfig::Adagrad { initial_accumulator_value, .. } => initial_accumulator_value,
        _ => 0.0,
    }
}

/// Updates elements independently of each other.
pub(in crate::zero) fn update(
    config: &OptimizerConfig,
    tensors: &UpdateTensors,
    step: Step,
) -> Result<(), ZeroError> {
    let UpdateTensors { parameters, gradients, state } = tensors;
    match (Rule::of(config, step), state.as_slice()) {
        (Rule::Adam(params), [exp_avg, exp_avg_sq]) => {
            adamw::step(parameters, gradients, exp_avg, exp_avg_sq, &params)?;
        }
        (Rule::Sgd(params), buffer) => sgd::step(parameters, gradients, buffer.first(), &params)?,
        (Rule::Lion(params), [exp_avg]) => lion::step(parameters, gradients, exp_avg, &params)?,
        (Rule::Adagrad(params), [sum]) => adagrad::step(parameters, gradients, sum, &params)?,
        _ => unreachable!("the state follows `state_kinds`"),
    }
    Ok(())
}

/// Parameters, gradients and state in host memory: slices of equal length.
type HostSlices<'a> = (&'a mut [f32], &'a [f32], Vec<&'a mut [f32]>);

/// The same on the host.
pub(in crate::zero) fn update_on_host(
    config: &OptimizerConfig,
    (parameters, gradients, mut state): HostSlices<'_>,
    step: Step,
) -> Result<(), ZeroError> {
    match (Rule::of(config, step), state.as_mut_slice()) {
        (Rule::Adam(params), [exp_avg, exp_avg_sq]) => {
            adamw::step_on_host(parameters, gradients, exp_avg, exp_avg_sq, &params)?;
        }
        (Rule::Sgd(params), buffer) => {
            sgd::step_on_host(
                parameters,
                gradients,
                buffer.first_mut().map(|buffer| &mut **buffer),
                &params,
            )?;
        }
        (Rule::Lion(params), [exp_avg]) => lion::step_on_host(parameters, gradients, exp_avg, &params)?,
        (Rule::Adagrad(params), [sum]) => adagrad::step_on_host(parameters, gradients, sum, &params)?,
        _ => unreachable!("the state follows `state_kinds`"),
    }
    Ok(())
}

/// The update rule of one step.
enum Rule {
    Adam(AdamParams),
    Sgd(SgdParams),
    Lion(LionParams),
    Adagrad(AdagradParams),
}

impl Rule {
    fn of(config: &OptimizerConfig, Step { number: step, lr, grad_scale }: Step) -> Self {
        match *config {
            OptimizerConfig::Adam {
                betas: [beta1, beta2],
                eps,
                weight_decay,
                adam_w_mode: decoupled,
                bias_correction,
                ..
            } => Self::Adam(AdamParams {
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                decoupled,
                bias_correction,
                step,
                grad_scale,
            }),
            OptimizerConfig::Sgd { momentum, nesterov, weight_decay, .. } => {
                Self::Sgd(SgdParams { lr, momentum, nesterov, weight_decay, step, grad_scale })
            }
            OptimizerConfig::Lion { betas: [beta1, beta2], weight_decay, .. } => {
                Self::Lion(LionParams { lr, beta1, beta2, weight_decay, grad_scale })
            }
            OptimizerConfig::Adagrad { lr_decay, eps, weight_decay, .. } => {
                Self::Adagrad(AdagradParams { lr, lr_decay, eps, weight_decay, step, grad_scale })
            }
            OptimizerConfig::Lamb { .. } => unreachable!("LAMB has its own update"),
        }
    }
}
