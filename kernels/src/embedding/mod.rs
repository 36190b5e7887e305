//! Token embedding: looks up rows of a table, and sums gradients per row.

mod cpu;
mod cuda;
mod ids;
mod plan;
pub mod reference;
#[cfg(test)]
mod tests;

pub use ids::Ids;

use super::OpError;
use super::call::Call;
use super::cast::with_element_type;
use crate::device::{Target, dry};
use candle_core::Tensor;

/// `y[i] = weight[ids[i]]`.
///
/// # Shapes
/// `ids: [n], weight: [vocab, d], y: [n, d]`
///
/// # Errors
/// An id that is not below vocab, shapes, dtypes, devices or layouts that do not match, or an output that
/// shares storage with the weight.
pub fn forward(ids: &Ids, weight: &Tensor, y: &Tensor) -> Result<(), OpError> {
    let call = Call::new("embedding::forward");
    let (vocab_size, d) = call.rows(("weight", weight))?;
    call.expect(("y", y), &[ids.len(), d])?;
    check_ids(call, ids, vocab_size)?;
    // Reads as many elements of the weight as it writes.
    dry::report_elementwise([y, y]);
    let target = call.target(&[("y", y)], &[("weight", weight)])?;
    let dtype = call.element_type(&[("weight", weight), ("y", y)], &[])?;
    match target {
        Target::Cpu => with_element_type!(dtype, T => {
            call.on_cpu([weight], [y], |[weight], [y]| cpu::forward::<T>(ids, weight, y, d))
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::forward(&launcher, dtype, ids, [weight, y], d)),
    }
}

/// `dweight[ids[i]] += dy[i]`. Gradients are added in token order for any number of threads; on a GPU, those
/// of an id with more than 128 tokens in groups of 128. dweight is always f32.
///
/// # Shapes
/// `ids: [n], dy: [n, d], dweight: [vocab, d]`
///
/// # Errors
/// As [`forward`].
pub fn backward(ids: &Ids, dy: &Tensor, dweight: &Tensor) -> Result<(), OpError> {
    let call = Call::new("embedding::backward");
    let (vocab_size, d) = call.rows(("dweight", dweight))?;
    call.expect(("dy", dy), &[ids.len(), d])?;
    check_ids(call, ids, vocab_size)?;
    dry::report_elementwise([dy, dy, dy]);
    let target = call.target(&[("dweight", dweight)], &[("dy", dy)])?;
    let dtype = call.element_type(&[("dy", dy)], &[("dweight", dweight)])?;
    match target {
        Target::Cpu => call.write(dweight, |dweight| {
            with_element_type!(dtype, T => {
                call.on_cpu([dy], [], |[dy], []| cpu::backward::<T>(ids, dy, dweight, d))
            })
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::backward(&launcher, dtype, ids, [dy, dweight], d)),
    }
}

fn check_ids(call: Call, ids: &[u32], vocab_size: usize) -> Result<(), OpError> {
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size) {
        None => Ok(()),
        Some((position, &id)) => Err(OpError::IdOutOfRange {
            op: call.op,
            argument: "ids",
            position,
            value: i64::from(id),
            vocab_size,
            also_valid: "",
        }),
    }
}
