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

use super::arg_check::{ArgCheck, Argument, RowSizes};
use super::cast::with_element_type;
use super::{OpError, TokenTable};
use crate::device::{Target, dry};
use crate::host_table::HostTable;
use candle_core::{Device, Tensor};

/// The id of a token whose row is in another slice of the table.
const ELSEWHERE: u32 = u32::MAX;

/// Indices of rows, for [`gather`].
pub type RowIndices = TokenTable<u32>;

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
    let call = ArgCheck::new("embedding::forward");
    check_rows(call, ids, ("weight", weight))?;
    copy_rows(call, ids, on_device, ("weight", weight), y)
}

/// `y[i] = x[rows[i]]`, bit for bit.
///
/// # Shapes
/// `rows: [n], x: [m, d], y: [n, d]`
///
/// # Errors
/// As [`forward`].
pub fn gather(rows: &RowIndices, x: &Tensor, y: &Tensor) -> Result<(), OpError> {
    let call = ArgCheck::new("embedding::gather");
    check_ids(call, rows, call.rows(("x", x))?.count)?;
    copy_rows(call, rows, |device| rows.on(device), ("x", x), y)
}

/// Copies rows `ids` of `from`, which are checked; `ids_on` returns them on the device, where more may follow them.
fn copy_rows(
    call: ArgCheck,
    ids: &HostTable<u32>,
    ids_on: impl FnOnce(&Device) -> candle_core::Result<Tensor>,
    from: Argument<'_>,
    y: &Tensor,
) -> Result<(), OpError> {
    let d = call.rows(from)?.width;
    call.expect(("y", y), &[ids.len(), d])?;
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
            let rows = RowSizes { count: ids.len(), width: d };
            call.kernels(cuda::copy_rows(&launcher, &on_device, rows, from, y))
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
    let d = call.rows(("dweight", dweight))?.width;
    call.expect(("dy", dy), &[ids.len(), d])?;
    check_rows(call, ids, ("dweight", dweight))?;
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
        Target::Kernels(launcher) => call.kernels(cuda::backward(&launcher, ids, dy, dweight, d)),
    }
}

/// Checks that ids are rows of a table, or elsewhere.
fn check_rows(call: ArgCheck, ids: &Ids, table: Argument<'_>) -> Result<(), OpError> {
    let is_row = |id: &u32| !ids.is_slice || *id != ELSEWHERE;
    check_each(call, ids.iter().copied().enumerate().filter(|(_, id)| is_row(id)), call.rows(table)?.count)
}

fn check_ids(call: ArgCheck, ids: &[u32], vocab_size: usize) -> Result<(), OpError> {
    check_each(call, ids.iter().copied().enumerate(), vocab_size)
}

/// Checks ids, each with its position.
fn check_each(
    call: ArgCheck,
    mut ids: impl Iterator<Item = (usize, u32)>,
    vocab_size: usize,
) -> Result<(), OpError> {
    match ids.find(|(_, id)| *id as usize >= vocab_size) {
        None => Ok(()),
        Some((position, id)) => Err(OpError::IdOutOfRange {
            op: call.op,
            argument: "ids",
            position,
            value: i64::from(id),
            vocab_size,
            also_valid: "",
        }),
    }
}
