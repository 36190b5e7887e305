//! Runs a call on CPU tensors: selects the precision of the matmuls, and runs the kernels.

use super::cpu::{self, Heads, InBf16, InF32, InPairs, Precision, Problem};
use super::dims::Dims;
use super::{AttentionError, AttentionLayout, Gradients, Operands, Upstream};
use crate::arg_check::ArgCheck;
use crate::cast::{Float, convert, with_element_type};
use crate::device::dry::DryCpu;
use crate::gemm::bf16::{Kernel, kernel_for};
use candle_core::{DType, Tensor};

type Result<T> = std::result::Result<T, AttentionError>;

/// With bf16 matmuls by `kernel`, or with f32 matmuls.
pub(super) fn forward(
    kernel: Option<Kernel>,
    call: &ArgCheck,
    dims: &Dims,
    operands: &Operands<'_>,
    outputs: [&Tensor; 2],
) -> Result<()> {
    match kernel {
        Some(Kernel::Avx512) => forward_with::<InPairs>((), call, dims, operands, outputs),
        Some(kernel) => forward_with::<InBf16>(kernel, call, dims, operands, outputs),
        None => with_element_type!(operands.q.dtype(), E => {
            forward_with::<InF32<E>>((), call, dims, operands, outputs)
        }),
    }
}

/// As [`forward`].
pub(super) fn backward(
    kernel: Option<Kernel>,
    call: &ArgCheck,
    dims: &Dims,
    operands: &Operands<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> Result<()> {
    match kernel {
        Some(Kernel::Avx512) => backward_with::<InPairs>((), call, dims, operands, upstream, gradients),
        Some(kernel) => backward_with::<InBf16>(kernel, call, dims, operands, upstream, gradients),
        None => with_element_type!(operands.q.dtype(), E => {
            backward_with::<InF32<E>>((), call, dims, operands, upstream, gradients)
        }),
    }
}

/// See [`super::delta`].
pub(super) fn delta([o, dout, delta]: [&Tensor; 3], call: &ArgCheck, [sq, hq, d]: [usize; 3]) -> Result<()> {
    with_element_type!(o.dtype(), E => call.on_cpu([o, dout], [], |[o, dout]: [&[E]; 2], []| {
        call.on_cpu([], [delta], |[], [delta]| {
            cpu::delta(&Heads::new(o, sq, hq, d), &Heads::new(dout, sq, hq, d), delta);
        })
    })?)?;
    Ok(())
}

/// See [`super::merge`].
pub(super) fn merge(
    [o, lse, part, part_lse]: [&Tensor; 4],
    call: &ArgCheck,
    sizes: [usize; 3],
) -> Result<()> {
    with_element_type!(part.dtype(), E => call.on_cpu([part], [], |[part]: [&[E]; 1], []| {
        call.on_cpu([part_lse], [o, lse], |[part_lse], [o, lse]| {
            cpu::merge((o, lse), (part, part_lse), sizes);
        })
    })?)?;
    Ok(())
}

fn forward_with<T: Precision>(
    kernel: T::Kernel,
    call: &ArgCheck,
    dims: &Dims,
    operands: &Operands<'_>,
    [o, lse]: [&Tensor; 2],
) -> Result<()> {
    let Operands { q, k, v, scale, layout, .. } = *operands;
    call.on_cpu([q, k, v], [o], |qkv: [&[T::Element]; 3], [o]| {
        let problem = problem::<T>(dims, kernel, qkv, scale, layout);
        call.on_cpu([], [lse], |[], [lse]| cpu::forward(&problem, o, lse))
    })??;
    Ok(())
}

fn backward_with<T: Precision>(
    kernel: T::Kernel,
    call: &ArgCheck,
    dims: &Dims,
    operands: &Operands<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> Result<()> {
    let Operands { q, k, v, scale, layout, .. } = *operands;
    let Upstream { dout, lse, delta } = *upstream;
    let Gradients { dq, dk, dv } = *gradients;
    call.on_cpu([q, k, v, dout], [dq, dk, dv], |[q, k, v, dout]: [&[T::Element]; 4], [dq, dk, dv]| {
        let problem = problem::<T>(dims, kernel, [q, k, v], scale, layout);
        call.on_cpu([lse, delta], [], |[lse, delta], []| {
            let upstream = cpu::Upstream { dout: queries(dims, dout), lse, delta };
            in_f32(dq, |dq| cpu::backward(&problem, &upstream, cpu::Gradients { dq, dk, dv }));
        })
    })??;
    Ok(())
}

/// Calls `write` with the elements, or with an f32 buffer that is rounded to them afterwards.
fn in_f32<E: Float>(elements: &mut [E], write: impl FnOnce(&mut [f32])) {
    if let Some(elements) = E::as_f32_mut(elements) {
        return write(elements);
    }
    let mut values = vec![0.0; elements.len()];
    write(&mut values);
    convert(&values, elements);
}

/// The kernel for bf16 matmuls; `None` if they are computed in f32. The choice depends on the
/// numbers of queries and keys: of the whole sequence, or of a ring's blocks.
pub(super) fn bf16_kernel(
    dtype: DType,
    num_queries: usize,
    num_keys: usize,
    head_dim: usize,
) -> Option<Kernel> {
    if dtype == DType::BF16 { kernel_for([num_queries, num_keys, head_dim]) } else { None }
}

/// Counts the scratch of a pass on a dry CPU: the buffers of its threads, and the f32 sums of the gradients
/// of 16-bit queries.
pub(super) fn alloc_scratch(cpu: DryCpu, dims: &Dims, dtype: DType, is_backward: bool) {
    let (num_tokens, head_dim) = (dims.num_queries, dims.head_dim);
    let of_thread = match bf16_kernel(dtype, num_tokens, dims.num_keys, head_dim) {
        Some(Kernel::Avx512) => cpu::scratch_bytes::<InPairs>(num_tokens, head_dim, is_backward),
        Some(_) => cpu::scratch_bytes::<InBf16>(num_tokens, head_dim, is_backward),
        None => cpu::scratch_bytes::<InF32<f32>>(num_tokens, head_dim, is_backward),
    };
    cpu.alloc_persistent("attention", cpu.threads * of_thread);
    if is_backward && dtype != DType::F32 {
        cpu.alloc_temporary(dims.batch * num_tokens * dims.num_heads * head_dim * size_of::<f32>());
    }
}

fn problem<'a, T: Precision>(
    dims: &Dims,
    kernel: T::Kernel,
    [q, k, v]: [&'a [T::Element]; 3],
    scale: f32,
    layout: &'a AttentionLayout,
) -> Problem<'a, T> {
    let keys = |elements| Heads::new(elements, dims.num_keys, dims.num_kv_heads, dims.head_dim);
    Problem { kernel, q: queries(dims, q), k: keys(k), v: keys(v), dims: *dims, scale, layout }
}

fn queries<'a, E: Copy>(dims: &Dims, elements: &'a [E]) -> Heads<'a, E> {
    Heads::new(elements, dims.num_queries, dims.num_heads, dims.head_dim)
}
