//! A call on CPU tensors: reads them as what the products are computed in, and runs the kernels.

use super::cpu::{self, Heads, Operand, Problem};
use super::dims::Dims;
use super::{AttentionError, Geometry, Gradients, Operands, Upstream};
use crate::ops::call::Call;
use crate::ops::gemm::bf16::{Kernel, kernel_for};
use candle_core::{DType, Tensor};
use half::bf16;

type Result<T> = std::result::Result<T, AttentionError>;

/// With products of bf16 elements by `kernel`, or of all elements in f32.
pub(super) fn forward(
    kernel: Option<Kernel>,
    call: &Call,
    dims: &Dims,
    operands: &Operands<'_>,
    [o, lse]: [&Tensor; 2],
) -> Result<()> {
    let Operands { q, k, v, scale, geometry } = *operands;
    if let Some(kernel) = kernel {
        return call.on_cpu([q, k, v], [], |qkv: [&[bf16]; 3], []| {
            write_output(call, &problem(dims, kernel, qkv, scale, geometry), o, lse)
        })?;
    }
    let (q, k, v) = (call.read(q)?, call.read(k)?, call.read(v)?);
    write_output(call, &problem::<f32>(dims, (), [&q, &k, &v], scale, geometry), o, lse)
}

/// As [`forward`].
pub(super) fn backward(
    kernel: Option<Kernel>,
    call: &Call,
    dims: &Dims,
    operands: &Operands<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> Result<()> {
    let Operands { q, k, v, scale, geometry } = *operands;
    let Upstream { dout, lse, delta } = *upstream;
    let (lse, delta) = (call.read(lse)?, call.read(delta)?);
    if let Some(kernel) = kernel {
        return call.on_cpu([q, k, v, dout], [], |[q, k, v, dout]: [&[bf16]; 4], []| {
            let upstream = cpu::Upstream { dout: queries(dims, dout), lse: &lse, delta: &delta };
            write_gradients(call, &problem(dims, kernel, [q, k, v], scale, geometry), &upstream, gradients)
        })?;
    }
    let (q, k, v, dout) = (call.read(q)?, call.read(k)?, call.read(v)?, call.read(dout)?);
    let upstream = cpu::Upstream { dout: queries(dims, &dout), lse: &lse, delta: &delta };
    write_gradients(call, &problem::<f32>(dims, (), [&q, &k, &v], scale, geometry), &upstream, gradients)
}

fn write_output<T: Operand>(call: &Call, problem: &Problem<'_, T>, o: &Tensor, lse: &Tensor) -> Result<()> {
    let written = call.write(o, |o| {
        call.write(lse, |lse| {
            cpu::forward(problem, o, lse);
            Ok(())
        })
    });
    Ok(written?)
}

fn write_gradients<T: Operand>(
    call: &Call,
    problem: &Problem<'_, T>,
    upstream: &cpu::Upstream<'_, T>,
    gradients: &Gradients<'_>,
) -> Result<()> {
    let written = call.write(gradients.dq, |dq| {
        call.write(gradients.dk, |dk| {
            call.write(gradients.dv, |dv| {
                cpu::backward(problem, upstream, cpu::Gradients { dq, dk, dv });
                Ok(())
            })
        })
    });
    Ok(written?)
}

/// What multiplies the elements as they are, if they are not widened to f32. That depends on the whole row, so it is
/// the same on every mesh.
pub(super) fn bf16_kernel(
    dtype: DType,
    num_queries: usize,
    num_keys: usize,
    head_dim: usize,
) -> Option<Kernel> {
    if dtype == DType::BF16 { kernel_for([num_queries, num_keys, head_dim]) } else { None }
}

/// See [`super::scratch_bytes`].
pub(super) fn scratch_bytes(num_tokens: usize, head_dim: usize, dtype: DType, backward: bool) -> usize {
    match bf16_kernel(dtype, num_tokens, num_tokens, head_dim) {
        Some(_) => cpu::scratch_bytes::<bf16>(num_tokens, head_dim, backward),
        None => cpu::scratch_bytes::<f32>(num_tokens, head_dim, backward),
    }
}

fn problem<'a, T: Operand>(
    dims: &Dims,
    kernel: T::Kernel,
    [q, k, v]: [&'a [T]; 3],
    scale: f32,
    geometry: &'a Geometry,
) -> Problem<'a, T> {
    let keys = |elements| Heads::new(elements, dims.num_keys, dims.num_kv_heads, dims.head_dim);
    Problem { kernel, q: queries(dims, q), k: keys(k), v: keys(v), dims: *dims, scale, geometry }
}

fn queries<'a, T: Operand>(dims: &Dims, elements: &'a [T]) -> Heads<'a, T> {
    Heads::new(elements, dims.num_queries, dims.num_heads, dims.head_dim)
}
