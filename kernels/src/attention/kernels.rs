//! The tensor-level functions: check the operands, then run the kernels of their device.

use super::{
    AttentionError, AttentionLayout,
    cuda::{self, Tiling},
    dims::Dims,
    fused, on_cpu,
    operands::{Gradients, Operands, Upstream},
};
use crate::arg_check::ArgCheck;
use crate::device::Target;
use crate::device::dry::{self, MatmulOp};
use crate::gemm::bf16::Kernel;
use candle_core::{DType, Tensor};

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
    let Operands { q, k, v, scale, layout, kernels } = *operands;
    let dims = dims_of(&call, operands)?;
    expect(&call, ("o", o), &dims.q_shape())?;
    expect(&call, ("lse", lse), &dims.row_shape())?;
    let inputs = [("q", q), ("k", k), ("v", v)];
    let target = call.target(&[("o", o), ("lse", lse)], &inputs)?;
    let dtype = call.element_type(&[("q", q), ("k", k), ("v", v), ("o", o)], &[("lse", lse)])?;
    report_flops(layout, &dims, false);
    match target {
        Target::Cpu => on_cpu::forward(bf16_kernel(dtype, &dims), &call, &dims, operands, [o, lse])?,
        Target::Dry(cpu) => on_cpu::alloc_scratch(cpu, &dims, dtype, false),
        Target::Kernels(launcher) => {
            let problem = cuda::Problem { q, k, v, dims, dtype, scale, layout };
            if fused::is_chosen(call.op, kernels, &problem, &[o])? {
                call.kernels(fused::forward(&launcher, kernels, &problem, [o, lse]))?;
            } else {
                call.kernels(cuda::forward(&launcher, &problem, [o, lse], &Tiling::FORWARD))?;
            }
        }
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
    let (b, sq, hq, d) = o.dims4()?;
    expect(&call, ("o", o), &[b, sq, hq, d.max(1)])?;
    expect(&call, ("dout", dout), &[b, sq, hq, d])?;
    expect(&call, ("delta", delta), &[b, hq, sq])?;
    let target = call.elementwise(&[("delta", delta)], &[("o", o), ("dout", dout)])?;
    let dtype = call.element_type(&[("o", o), ("dout", dout)], &[("delta", delta)])?;
    match target {
        Target::Cpu => on_cpu::delta([o, dout, delta], &call, [sq, hq, d])?,
        Target::Dry(_) => {}
        Target::Kernels(launcher) => {
            call.kernels(cuda::delta(&launcher, dtype, [o, dout, delta], [b, sq, hq, d]))?;
        }
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
pub fn merge([o, lse]: [&Tensor; 2], [part, part_lse]: [&Tensor; 2]) -> Result<(), AttentionError> {
    let call = ArgCheck::new("attention::merge");
    let (b, sq, hq, d) = o.dims4()?;
    expect(&call, ("o", o), &[b, sq, hq, d.max(1)])?;
    expect(&call, ("part", part), &[b, sq, hq, d])?;
    expect(&call, ("lse", lse), &[b, hq, sq])?;
    expect(&call, ("part_lse", part_lse), &[b, hq, sq])?;
    let target = call.elementwise(&[("o", o), ("lse", lse)], &[("part", part), ("part_lse", part_lse)])?;
    let dtype = call.element_type(&[("part", part)], &[("o", o), ("lse", lse), ("part_lse", part_lse)])?;
    match target {
        Target::Cpu => on_cpu::merge([o, lse, part, part_lse], &call, [sq, hq, d])?,
        Target::Dry(_) => {}
        Target::Kernels(launcher) => {
            call.kernels(cuda::merge(&launcher, dtype, [o, lse, part, part_lse], [b, sq, hq, d]))?;
        }
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
    let Operands { q, k, v, scale, layout, kernels } = *operands;
    let Upstream { dout, lse, delta } = *upstream;
    let Gradients { dq, dk, dv } = *gradients;
    let dims = dims_of(&call, operands)?;
    expect(&call, ("dout", dout), &dims.q_shape())?;
    expect(&call, ("lse", lse), &dims.row_shape())?;
    expect(&call, ("delta", delta), &dims.row_shape())?;
    expect(&call, ("dq", dq), &dims.q_shape())?;
    expect(&call, ("dk", dk), &dims.kv_shape())?;
    expect(&call, ("dv", dv), &dims.kv_shape())?;
    let outputs = [("dq", dq), ("dk", dk), ("dv", dv)];
    let elements = [("q", q), ("k", k), ("v", v), ("dout", dout)];
    let sums = [("lse", lse), ("delta", delta)];
    let target = call.target(&outputs, &[&elements[..], &sums].concat())?;
    let dtype = call.element_type(&[&elements[..], &outputs].concat(), &sums)?;
    report_flops(layout, &dims, true);
    match target {
        Target::Cpu => {
            on_cpu::backward(bf16_kernel(dtype, &dims), &call, &dims, operands, upstream, gradients)?;
        }
        Target::Dry(cpu) => on_cpu::alloc_scratch(cpu, &dims, dtype, true),
        Target::Kernels(launcher) => {
            let problem = cuda::Problem { q, k, v, dims, dtype, scale, layout };
            if fused::is_chosen(call.op, kernels, &problem, &[dout, dq, dk, dv])? {
                call.kernels(fused::backward(&launcher, kernels, &problem, upstream, gradients))?;
            } else {
                call.kernels(cuda::backward(&launcher, &problem, upstream, gradients, &Tiling::BACKWARD))?;
            }
        }
    }
    Ok(())
}

/// Reports the FLOPs of a dry run. A backward pass counts twice the forward pass; the recomputation of scores
/// within a kernel does not count.
fn report_flops(layout: &AttentionLayout, dims: &Dims, is_backward: bool) {
    if dry::is_dry() {
        let of_pair = if is_backward { 8.0 } else { 4.0 } * (dims.num_heads * dims.head_dim) as f64;
        let pairs = layout.num_visible_pairs() as f64;
        dry::report_flops(MatmulOp::Attention, is_backward, of_pair * pairs);
    }
}

fn bf16_kernel(dtype: DType, dims: &Dims) -> Option<Kernel> {
    on_cpu::bf16_kernel(dtype, dims.num_queries, dims.num_keys, dims.head_dim)
}

/// The sizes of a call, after checking `q`, `k` and `v` against each other and the layout.
pub(super) fn dims_of(call: &ArgCheck, operands: &Operands<'_>) -> Result<Dims, AttentionError> {
    let Operands { q, k, v, layout, .. } = *operands;
    let (_, _, num_kv_heads, _) = k.dims4()?;
    let (_, _, _, head_dim) = q.dims4()?;
    let dims = Dims {
        batch: layout.batch(),
        num_queries: layout.num_queries(),
        num_keys: layout.num_keys(),
        num_heads: layout.q_to_kv().len(),
        num_kv_heads,
        head_dim: head_dim.max(1),
    };
    expect(call, ("q", q), &dims.q_shape())?;
    expect(call, ("k", k), &dims.kv_shape())?;
    expect(call, ("v", v), &dims.kv_shape())?;
    for (q_head, &kv_head) in layout.q_to_kv().iter().enumerate() {
        if kv_head >= num_kv_heads {
            return Err(AttentionError::NoSuchKvHead { op: call.op, q_head, kv_head, num_kv_heads });
        }
    }
    Ok(dims)
}

/// Checks that the tensor has exactly this shape.
fn expect(
    call: &ArgCheck,
    (name, tensor): (&'static str, &Tensor),
    expected: &[usize],
) -> Result<(), AttentionError> {
    if tensor.dims() == expected {
        return Ok(());
    }
    Err(AttentionError::Shape {
        op: call.op,
        tensor: name,
        expected: expected.to_vec(),
        got: tensor.dims().to_vec(),
    })
}
