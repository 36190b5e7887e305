//! The tensor-level functions: check the operands, then run the kernels of their device.

use super::{
    AttentionError,
    cuda::{self, Tiling},
    dims::OutputDims,
    fused, on_cpu,
    operands::{Gradients, Operands, Problem, Upstream, expect},
};
use crate::arg_check::ArgCheck;
use crate::device::Target;
use crate::device::dry::{self, MatmulOp};
use candle_core::Tensor;

/// Writes `o = softmax(scale * q k^T) v` over the visible keys, and the softmax's log-denominators.
///
/// A query without visible keys gets `o = 0` and `lse = -inf`.
///
/// # Shapes
/// [`Operands`] to `o [b, sq, hq, d]` and `lse [b, hq, sq]`. All have the element type of `q`, except `lse`,
/// which is f32.
///
/// # Errors
/// A tensor that is not contiguous, or whose shape, element type or device does not match; a `q_to_kv` with a
/// KV head that does not exist; an output that shares storage with another operand; a failure of the device.
pub fn forward(operands: &Operands<'_>, o: &Tensor, lse: &Tensor) -> Result<(), AttentionError> {
    let call = ArgCheck::new("attention::forward");
    let Operands { q, k, v, .. } = *operands;
    let problem = Problem::new(call, operands)?;
    expect(call, &problem.dims.q_shape(), &[("o", o)])?;
    expect(call, &problem.dims.row_shape(), &[("lse", lse)])?;
    let inputs = [("q", q), ("k", k), ("v", v)];
    let target = call.target(&[("o", o), ("lse", lse)], &inputs)?;
    call.element_type(&[("q", q), ("k", k), ("v", v), ("o", o)], &[("lse", lse)])?;
    report_flops(&problem, false);
    match target {
        Target::Cpu => on_cpu::forward(on_cpu::bf16_kernel(&problem), call, &problem, o, lse)?,
        Target::Dry(cpu) => on_cpu::alloc_scratch(cpu, &problem, false),
        Target::Kernels(launcher) => call.kernels(if fused::is_chosen(call.op, &problem, &[o])? {
            fused::forward(&launcher, &problem, o, lse)
        } else {
            cuda::forward(&launcher, &problem, o, lse, &Tiling::FORWARD)
        })?,
    }
    Ok(())
}

/// Writes `delta = rowsum(o * dout)`, which a query's keys share in the derivative of the softmax.
///
/// # Shapes
/// `o, dout [b, sq, hq, d]` of one element type to `delta [b, hq, sq]` in f32.
///
/// # Errors
/// As [`forward`].
pub fn delta(o: &Tensor, dout: &Tensor, delta: &Tensor) -> Result<(), AttentionError> {
    let call = ArgCheck::new("attention::delta");
    let dims = OutputDims::new(o)?;
    expect(call, &dims.shape(), &[("o", o), ("dout", dout)])?;
    expect(call, &dims.row_shape(), &[("delta", delta)])?;
    let target = call.elementwise(&[("delta", delta)], &[("o", o), ("dout", dout)])?;
    call.element_type(&[("o", o), ("dout", dout)], &[("delta", delta)])?;
    match target {
        Target::Cpu => on_cpu::delta(call, o, dout, delta, dims)?,
        Target::Dry(_) => {}
        Target::Kernels(launcher) => call.kernels(cuda::delta(&launcher, o, dout, delta, dims))?,
    }
    Ok(())
}

/// Merges attention over other keys into attention over some keys: `o` and `lse` become those over all of them.
///
/// `part` may have any element type; `o`, into which several parts can be merged, is f32. Where neither sees a key,
/// `o` is 0 and `lse` is -inf.
///
/// # Shapes
/// `o, part [b, sq, hq, d]`, `lse, part_lse [b, hq, sq]` in f32.
///
/// # Errors
/// As [`forward`].
pub fn merge(o: &Tensor, lse: &Tensor, part: &Tensor, part_lse: &Tensor) -> Result<(), AttentionError> {
    let call = ArgCheck::new("attention::merge");
    let dims = OutputDims::new(o)?;
    expect(call, &dims.shape(), &[("o", o), ("part", part)])?;
    expect(call, &dims.row_shape(), &[("lse", lse), ("part_lse", part_lse)])?;
    let target = call.elementwise(&[("o", o), ("lse", lse)], &[("part", part), ("part_lse", part_lse)])?;
    call.element_type(&[("part", part)], &[("o", o), ("lse", lse), ("part_lse", part_lse)])?;
    match target {
        Target::Cpu => on_cpu::merge(call, o, lse, part, part_lse, dims)?,
        Target::Dry(_) => {}
        Target::Kernels(launcher) => call.kernels(cuda::merge(&launcher, o, lse, part, part_lse, dims))?,
    }
    Ok(())
}

/// Writes the gradients of `q`, `k` and `v`.
///
/// The result has the same bits for any number of threads. A query without visible keys gets a zero gradient,
/// and so does a key that no query sees.
///
/// # Shapes
/// [`Operands`] and [`Upstream`] to [`Gradients`]. All have the element type of `q`, except `lse` and
/// `delta`, which are f32.
///
/// # Errors
/// As [`forward`].
pub fn backward(
    operands: &Operands<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> Result<(), AttentionError> {
    let call = ArgCheck::new("attention::backward");
    let Operands { q, k, v, .. } = *operands;
    let Upstream { dout, lse, delta } = *upstream;
    let Gradients { dq, dk, dv } = *gradients;
    let problem = Problem::new(call, operands)?;
    let outputs = [("dq", dq), ("dk", dk), ("dv", dv)];
    let elements = [("q", q), ("k", k), ("v", v), ("dout", dout)];
    let sums = [("lse", lse), ("delta", delta)];
    expect(call, &problem.dims.q_shape(), &[("dout", dout)])?;
    expect(call, &problem.dims.row_shape(), &sums)?;
    expect(call, &problem.dims.q_shape(), &[("dq", dq)])?;
    expect(call, &problem.dims.kv_shape(), &[("dk", dk), ("dv", dv)])?;
    let target = call.target(&outputs, &[&elements[..], &sums].concat())?;
    call.element_type(&[&elements[..], &outputs].concat(), &sums)?;
    report_flops(&problem, true);
    match target {
        Target::Cpu => {
            on_cpu::backward(on_cpu::bf16_kernel(&problem), call, &problem, upstream, gradients)?;
        }
        Target::Dry(cpu) => on_cpu::alloc_scratch(cpu, &problem, true),
        Target::Kernels(launcher) => {
            call.kernels(if fused::is_chosen(call.op, &problem, &[dout, dq, dk, dv])? {
                fused::backward(&launcher, &problem, upstream, gradients)
            } else {
                cuda::backward(&launcher, &problem, upstream, gradients, &Tiling::BACKWARD)
            })?;
        }
    }
    Ok(())
}

/// Reports the FLOPs of a dry run. A backward pass counts twice the forward pass; the recomputation of scores
/// within a kernel does not count.
fn report_flops(problem: &Problem<'_>, is_backward: bool) {
    if dry::is_dry() {
        let Problem { operands, dims } = problem;
        let of_pair = if is_backward { 8.0 } else { 4.0 } * (dims.num_heads * dims.head_dim) as f64;
        let pairs = operands.layout.num_visible_pairs() as f64;
        dry::report_flops(MatmulOp::Attention, is_backward, of_pair * pairs);
    }
}
