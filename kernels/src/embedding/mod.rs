//! Token embedding: looks up rows of a table, and sums gradients per row. [`gather`] looks up rows of any
//! matrix, without a gradient.

mod cpu;
mod cuda;
mod ids;
mod plan;
pub mod reference;
#[cfg(test)]
mod tests;

pub use ids::Ids;

use super::arg_check::{ArgCheck, Argument};
use super::cast::with_element_type;
use super::{OpError, TokenTable};
use crate::device::{Target, dry};
use crate::host_table::HostTable;
use candle_core::{Device, Tensor};

/// Indices of rows, for [`gather`].
pub type Rows = TokenTable<u32>;

/// `y[i] = weight[ids[i]]`.
///
/// # Shapes
/// `ids: [n], weight: [vocab, d], y: [n, d]`
///
/// # Errors
/// An id that is not below vocab, shapes, dtypes, devices or layouts that do not match, or an output that
/// shares storage with the weight.
pub fn forward(ids: &Ids, weight: &Tensor, y: &Tensor) -> Result<(), OpError> {
    let on_device = |device: &Device| Ok(ids.on(device)?.tables);
    copy_rows(ArgCheck::new("embedding::forward"), ids, on_device, ("weight", weight), y)
}

/// `y[i] = x[rows[i]]`, bit for bit.
///
/// # Shapes
/// `rows: [n], x: [m, d], y: [n, d]`
///
/// # Errors
/// As [`forward`].
pub fn gather(rows: &Rows, x: &Tensor, y: &Tensor) -> Result<(), OpError> {
    copy_rows(ArgCheck::new("embedding::gather"), rows, |device| rows.on(device), ("x", x), y)
}

/// Copies rows `ids` of `from`; `ids_on` returns them on the device, where more may follow them.
fn copy_rows(
    call: ArgCheck,
    ids: &HostTable<u32>,
    ids_on: impl FnOnce(&Device) -> candle_core::Result<Tensor>,
    from: Argument<'_>,
    y: &Tensor,
) -> Result<(), OpError> {
    let (vocab_size, d) = call.rows(from)?;
    call.expect(("y", y), &[ids.len(), d])?;
    check_ids(call, ids, vocab_size)?;
    // Reads as many elements as it writes.
    dry::report_elementwise([y, y]);
    let target = call.target(&[("y", y)], &[from])?;
    let dtype = call.element_type(&[from, ("y", y)], &[])?;
    let (_, from) = from;
    match target {
        Target::Cpu => with_element_type!(dtype, T => {
            call.on_cpu([from], [y], |[from], [y]| cpu::copy_rows::<T>(ids, from, y, d))
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(_) if ids.is_empty() => Ok(()),
        Target::Kernels(launcher) => {
            let on_device = ids_on(y.device()).map_err(|source| OpError::Candle { op: call.op, source })?;
            call.kernels(cuda::copy_rows(&launcher, dtype, (&on_device, ids.len()), [from, y], d))
        }
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
    let call = ArgCheck::new("embedding::backward");
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

fn check_ids(call: ArgCheck, ids: &[u32], vocab_size: usize) -> Result<(), OpError> {
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
