//! Runs a call on CPU tensors: selects the precision of the matmuls, and runs the kernels.

use super::cpu::{self, Heads, InBf16, InF32, InPairs, Precision};
use super::operands::{Gradients, Operands, Problem, Upstream};
use super::{
    AttentionError,
    dims::{Dims, OutputDims},
};
use crate::OpError;
use crate::arg_check::ArgCheck;
use crate::cast::{Float, convert, with_element_type};
use crate::device::dry::DryCpu;
use crate::gemm::bf16::{Kernel, kernel_for};
use candle_core::{DType, Tensor};

type Result<T> = std::result::Result<T, AttentionError>;

/// Calls `$run` with the [`Precision`] of the matmuls and its kernel: in bf16 by `$kernel`, or in f32.
macro_rules! in_precision {
    ($kernel:expr, $dtype:expr, $run:ident($($argument:expr),+)) => {
        match $kernel {
            Some(Kernel::Avx512) => $run::<InPairs>((), $($argument),+),
            Some(kernel) => $run::<InBf16>(kernel, $($argument),+),
            None => with_element_type!($dtype, E => $run::<InF32<E>>((), $($argument),+)),
        }
    };
}

/// With bf16 matmuls by `kernel`, or with f32 matmuls.
pub(super) fn forward(
    kernel: Option<Kernel>,
    call: ArgCheck,
    problem: &Problem<'_>,
    o: &Tensor,
    lse: &Tensor,
) -> Result<()> {
    Ok(in_precision!(kernel, problem.dtype(), forward_with(call, problem, o, lse))?)
}

fn forward_with<T: Precision>(
    kernel: T::Kernel,
    call: ArgCheck,
    problem: &Problem<'_>,
    o: &Tensor,
    lse: &Tensor,
) -> std::result::Result<(), OpError> {
    let Operands { q, k, v, .. } = problem.operands;
    call.on_cpu([q, k, v], [o], |[q, k, v]: [&[T::Element]; 3], [o]| {
        let problem = on_slices::<T>(problem, kernel, q, k, v);
        call.on_cpu([], [lse], |[], [lse]| cpu::forward(&problem, o, lse))
    })?
}

/// As [`forward`].
pub(super) fn backward(
    kernel: Option<Kernel>,
    call: ArgCheck,
    problem: &Problem<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> Result<()> {
    Ok(in_precision!(kernel, problem.dtype(), backward_with(call, problem, upstream, gradients))?)
}

fn backward_with<T: Precision>(
    kernel: T::Kernel,
    call: ArgCheck,
    problem: &Problem<'_>,
    upstream: &Upstream<'_>,
    gradients: &Gradients<'_>,
) -> std::result::Result<(), OpError> {
    let Operands { q, k, v, .. } = problem.operands;
    let Upstream { dout, lse, delta } = *upstream;
    let Gradients { dq, dk, dv } = *gradients;
    call.on_cpu([q, k, v, dout], [dq, dk, dv], |inputs, [dq, dk, dv]| {
        let [q, k, v, dout]: [&[T::Element]; 4] = inputs;
        let problem = on_slices::<T>(problem, kernel, q, k, v);
        call.on_cpu([lse, delta], [], |[lse, delta], []| {
            let dout = queries(problem.dims.output(), dout);
            let upstream = cpu::Upstream { dout, lse, delta };
            in_f32(dq, |dq| cpu::backward(&problem, &upstream, cpu::Gradients { dq, dk, dv }));
        })
    })?
}

/// See [`super::delta`].
pub(super) fn delta(
    call: ArgCheck,
    o: &Tensor,
    dout: &Tensor,
    delta: &Tensor,
    dims: OutputDims,
) -> Result<()> {
    with_element_type!(o.dtype(), E => call.on_cpu([o, dout], [], |[o, dout]: [&[E]; 2], []| {
        call.on_cpu([], [delta], |[], [delta]| cpu::delta(&queries(dims, o), &queries(dims, dout), delta))
    })?)?;
    Ok(())
}

/// See [`super::merge`].
pub(super) fn merge(
    call: ArgCheck,
    o: &Tensor,
    lse: &Tensor,
    part: &Tensor,
    part_lse: &Tensor,
    dims: OutputDims,
) -> Result<()> {
    with_element_type!(part.dtype(), E => call.on_cpu([part], [], |[part]: [&[E]; 1], []| {
        call.on_cpu([part_lse], [o, lse], |[part_lse], [o, lse]| {
            cpu::merge(o, lse, part, part_lse, dims);
        })
    })?)?;
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
pub(super) fn bf16_kernel(problem: &Problem<'_>) -> Option<Kernel> {
    let Dims { num_queries, num_keys, head_dim, .. } = problem.dims;
    if problem.dtype() == DType::BF16 { kernel_for([num_queries, num_keys, head_dim]) } else { None }
}

/// Counts the scratch of a pass on a dry CPU: the buffers of its threads, and the f32 sums of the gradients
/// of 16-bit queries.
pub(super) fn alloc_scratch(cpu: DryCpu, problem: &Problem<'_>, is_backward: bool) {
    let Dims { batch, num_queries, num_heads, head_dim, .. } = problem.dims;
    let of_thread = match bf16_kernel(problem) {
        Some(Kernel::Avx512) => cpu::scratch_bytes::<InPairs>(num_queries, head_dim, is_backward),
        Some(_) => cpu::scratch_bytes::<InBf16>(num_queries, head_dim, is_backward),
        None => cpu::scratch_bytes::<InF32<f32>>(num_queries, head_dim, is_backward),
    };
    cpu.alloc_persistent("attention", cpu.threads * of_thread);
    if is_backward && problem.dtype() != DType::F32 {
        cpu.alloc_temporary(batch * num_queries * num_heads * head_dim * size_of::<f32>());
    }
}

fn on_slices<'a, T: Precision>(
    problem: &Problem<'a>,
    kernel: T::Kernel,
    q: &'a [T::Element],
    k: &'a [T::Element],
    v: &'a [T::Element],
) -> cpu::Problem<'a, T> {
    let Problem { operands: Operands { scale, layout, .. }, dims } = *problem;
    let keys = |elements| Heads::new(elements, dims.num_keys, dims.num_kv_heads, dims.head_dim);
    cpu::Problem { kernel, q: queries(dims.output(), q), k: keys(k), v: keys(v), dims, scale, layout }
}

fn queries<'a, E: Copy>(dims: OutputDims, elements: &'a [E]) -> Heads<'a, E> {
    Heads::new(elements, dims.num_queries, dims.num_heads, dims.head_dim)
}
