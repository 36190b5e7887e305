//! Optimizers as rules for one element: a step reads a gradient and updates a parameter and its state.
//!
//! The driver in `elementwise.rs` checks the tensors, divides the elements among threads or CUDA blocks, and
//! vectorizes. A new rule needs two things. A file with its hyper-parameters, the constants of a step, the update of
//! one element, and for the tests its formula in f64. And a struct with the same constants and update in
//! `cuda/optimizer.cu`. LAMB, whose step depends on norms of whole parameter tensors, is in [`lamb`].

pub mod adagrad;
pub mod adamw;
mod elementwise;
pub mod lamb;
pub mod lion;
pub mod sgd;
#[cfg(test)]
mod tests;

use crate::OpError;
use crate::arg_check::ArgCheck;
use candle_core::Tensor;
use lamb::{Segments, SquaredNorms};

/// The parameters of a step, of any rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// t, counted from 1.
    pub number: u64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Factor on the gradient: loss unscaling and clipping in one.
    pub grad_scale: f64,
}

/// One step of a rule that updates elements independently of each other.
pub trait ElementStep {
    /// Updates parameters and state in place. The state has one tensor of each kind that the rule's documentation names, in
    /// its order.
    ///
    /// # Shapes
    /// All tensors hold the same number of elements.
    ///
    /// # Errors
    /// Hyper-parameters outside of their range, another number of state tensors, shapes, dtypes, devices or layouts that do not
    /// match, or two tensors that share storage.
    fn apply(&self, param: &Tensor, grad: &Tensor, state: &[Tensor]) -> Result<(), OpError>;

    /// The same on slices in host memory, with the same bits.
    ///
    /// # Errors
    /// As [`apply`](Self::apply); slices that do not have equal length.
    fn apply_on_host(&self, param: &mut [f32], grad: &[f32], state: &mut [&mut [f32]])
    -> Result<(), OpError>;
}

/// One step of a rule with norms of whole parameter tensors, in two passes. In between, the norms of a tensor's parts
/// are added.
pub trait TensorStep {
    /// Replaces the gradients by the directions of the step, and returns the norms of every segment.
    ///
    /// # Errors
    /// As the function of the rule's module.
    fn find_directions(
        &self,
        param: &Tensor,
        grad: &Tensor,
        state: &[Tensor],
        segments: &Segments,
    ) -> Result<Vec<SquaredNorms>, OpError>;

    /// Updates the parameters, with the norms of the whole tensor for every segment.
    ///
    /// # Errors
    /// As the function of the rule's module.
    fn apply_directions(
        &self,
        param: &Tensor,
        direction: &Tensor,
        segments: &Segments,
        norms: &[SquaredNorms],
    ) -> Result<(), OpError>;
}

/// Refuses another number of state tensors than a rule has.
fn refuse_state(op: &'static str, num_tensors: usize) -> Result<(), OpError> {
    ArgCheck::new(op).expect_value("state", num_tensors as f64, false, "one tensor of each kind")
}

/// Steps are counted from 1.
fn check_step(call: ArgCheck, step: Step) -> Result<(), OpError> {
    call.expect_value("step", step.number as f64, step.number > 0, "at least 1")
}

/// Decay rates of moving averages.
fn check_betas(call: ArgCheck, beta1: f64, beta2: f64) -> Result<(), OpError> {
    for (name, beta) in [("beta1", beta1), ("beta2", beta2)] {
        call.expect_value(name, beta, (0.0..1.0).contains(&beta), "at least 0 and below 1")?;
    }
    Ok(())
}
