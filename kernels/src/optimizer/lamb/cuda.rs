//! The launches of `cuda/lamb.cu`.

use super::segments::{Segments, SquaredNorms};
use super::{Factors, LambParams};
use crate::device::{Arg, DeviceError, Grid, Kernel, Launcher, sources::LAMB};
use crate::tensor::{from_slice, to_vec};
use candle_core::{DType, Tensor};

/// The chunks' sums of squares are added on the host in f64: the only synchronization.
pub(super) fn direction(
    launcher: &Launcher,
    [param, grad, exp_avg, exp_avg_sq]: [&Tensor; 4],
    segments: &Segments,
    params: &LambParams,
) -> Result<Vec<SquaredNorms>, DeviceError> {
    let Some(table) = segments.table() else { return Ok(segments.sum([])) };
    let kernel = Kernel::new(&LAMB, "lamb_direction");
    let chunks = segments.chunks().len();
    let partial = crate::tensor::empty((chunks, 2), DType::F32, param.device())?;
    launcher.open([grad, exp_avg, exp_avg_sq, &partial], [param, table], |outputs, inputs| {
        let tensors = [&outputs[..], &inputs[..]].concat().into_iter().map(Arg::from);
        let factors = Factors::new(params).in_order().map(Arg::from);
        let args: Vec<_> = tensors.chain(factors).collect();
        // SAFETY: the chunks lie within the four tensors of equal size; `partial` has two elements for each.
        unsafe { launcher.launch(&kernel, Grid::blocks(chunks), &args) }
    })?;
    let partial = to_vec::<f32>(&partial)?;
    let of_chunk =
        |&[param, direction]: &[f32; 2]| SquaredNorms { param: param.into(), direction: direction.into() };
    Ok(segments.sum(partial.as_chunks().0.iter().map(of_chunk)))
}

pub(super) fn apply(
    launcher: &Launcher,
    [param, direction]: [&Tensor; 2],
    segments: &Segments,
    step_sizes: &[f32],
) -> Result<(), DeviceError> {
    let Some(table) = segments.table() else { return Ok(()) };
    let kernel = Kernel::new(&LAMB, "lamb_apply");
    let of_chunks: Vec<_> = segments.chunks().iter().map(|chunk| step_sizes[chunk.segment]).collect();
    let of_chunks = from_slice(&of_chunks, param.device())?;
    launcher.open([param], [direction, table, &of_chunks], |[param], [direction, table, of_chunks]| {
        let args = [param.into(), direction.into(), table.into(), of_chunks.into()];
        // SAFETY: the chunks lie within both tensors, and each has a step size.
        unsafe { launcher.launch(&kernel, Grid::blocks(segments.chunks().len()), &args) }
    })
}

impl Factors {
    /// In the order of the kernel's parameters.
    fn in_order(self) -> [f32; 8] {
        [
            self.grad_scale,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.mean_scale,
            self.root_scale,
            self.eps,
            self.weight_decay,
        ]
    }
}
