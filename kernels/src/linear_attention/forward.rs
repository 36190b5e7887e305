//! The forward pass on each device.

use super::{Operands, Sizes, cpu, cuda, report_flops};
use crate::arg_check::ArgCheck;
use crate::cast::with_element_type;
use crate::device::Target;
use crate::{OpError, Workspace};
use candle_core::Tensor;

/// Writes the output, and the states at some tokens for [`backward`](super::backward()), if it will be called.
///
/// # Shapes
/// [`Operands`] to `o [B, S, Hv, Dv]`, and `states` of [`LinearAttentionLayout::states_shape`](super::LinearAttentionLayout::states_shape) in f32.
///
/// # Errors
/// A tensor that is not contiguous, or whose shape, element type or device does not match; a `v_to_k` with a key head that
/// does not exist; an output that shares storage with another argument; a device without kernels in this build.
pub fn forward<'a>(
    operands: &Operands<'_>,
    o: &Tensor,
    states: impl Into<Option<&'a Tensor>>,
    workspace: &Workspace,
) -> Result<(), OpError> {
    let call = ArgCheck::new("linear_attention::forward");
    let states = states.into().map(|states| ("states", states));
    let sizes = Sizes::check(call, operands)?;
    call.expect(("o", o), &sizes.value_shape())?;
    sizes.check_states(call, operands, states)?;
    let outputs: Vec<_> = [("o", o)].into_iter().chain(states).collect();
    let target = call.target(&outputs, &operands.named())?;
    let dtype =
        call.element_type(&[&operands.elements()[..], &[("o", o)]].concat(), &operands.sums(states))?;
    let Operands { q, k, v, g, beta, layout, .. } = *operands;
    report_flops(layout, &sizes, false);
    match target {
        Target::Cpu => sizes.with_scratch(call, layout, workspace, false, |scratch| {
            let skip = operands.read_skip(call)?;
            with_element_type!(dtype, T => call.on_cpu([q, k, v], [o], |[q, k, v]: [&[T]; 3], [o]| {
                call.on_cpu([g, beta], [], |[g, beta], []| {
                    let operands = cpu::Operands { q, k, v, g, beta, skip: skip.as_deref() };
                    let problem = cpu::Problem::new(sizes, layout, operands);
                    let mut run = |states: Option<&mut [f32]>| {
                        cpu::forward(&problem, o, states, scratch);
                        Ok(())
                    };
                    match states {
                        Some((_, states)) => call.write(states, |states| run(Some(states))),
                        None => run(None),
                    }
                })?
            })?)
        }),
        Target::Dry(cpu) => sizes.alloc_scratch(cpu, layout, workspace, false),
        Target::Kernels(launcher) => {
            let (states, scratch) = (states.map(|(_, states)| states), sizes.cuda_scratch(workspace, false)?);
            call.kernels(cuda::forward(&launcher, &sizes, operands, o, states, &scratch))?;
            workspace.recycle(scratch);
            Ok(())
        }
    }
}
