//! Optimizers as rules for one element: a step reads a gradient and updates a parameter and its state.
//!
//! | rule | state per element | decay |
//! |---|---|---|
//! | [`adamw`] | `exp_avg`, `exp_avg_sq` | decoupled (AdamW) or added to the gradient (Adam) |
//! | [`sgd`] | `momentum_buffer`, or none | added to the gradient |
//! | [`lion`] | `exp_avg` | decoupled |
//! | [`adagrad`] | `state_sum` | added to the gradient |
//!
//! The driver in `elementwise.rs` checks the tensors, divides the elements among threads or CUDA blocks, and
//! vectorizes. A new rule needs three things. A file with its hyper-parameters, the constants of a step and
//! the update of one element. A struct with the same constants and update in `cuda/optimizer.cu`. And its
//! formula in f64 in `reference.rs`. LAMB, whose step depends on norms of whole parameter tensors, is in
//! [`lamb`].

pub mod adagrad;
pub mod adamw;
mod elementwise;
pub mod lamb;
pub mod lion;
pub mod reference;
pub mod sgd;
#[cfg(test)]
mod tests;

use crate::OpError;
use crate::arg_check::ArgCheck;

/// Steps are counted from 1.
fn check_step(call: ArgCheck, step: u64) -> Result<(), OpError> {
    call.expect_value("step", step as f64, step > 0, "at least 1")
}

/// Decay rates of moving averages.
fn check_betas(call: ArgCheck, beta1: f64, beta2: f64) -> Result<(), OpError> {
    for (name, beta) in [("beta1", beta1), ("beta2", beta2)] {
        call.expect_value(name, beta, (0.0..1.0).contains(&beta), "at least 0 and below 1")?;
    }
    Ok(())
}
