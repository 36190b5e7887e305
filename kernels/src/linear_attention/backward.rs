//! The backward pass on each device.

use super::{Gradients, Operands, Sizes, cpu, cuda, report_flops};
use crate::arg_check::ArgCheck;
use crate::cast::with_element_type;
use crate::device::Target;
use crate::{OpError, Workspace};
use candle_core::Tensor;

/// Writes the gradients. The result has the same bits for any number of threads.
///
/// # Shapes
/// [`Operands`], the `states` of [`forward`](super::forward()) and `dout [B, S, Hv, Dv]` to [`Gradients`].
///
/// # Errors
/// As [`forward`](super::forward()).
pub fn backward(
    operands: &Operands<'_>,
    states: &Tensor,
    dout: &Tensor,
    gradients: &Gradients<'_>,
    workspace: &Workspace,
) -> Result<(), OpError> {
    let call = ArgCheck::new("linear_attention::backward");
    let Gradients { dq, dk, dv, dg, dbeta, dskip } = *gradients;
    let sizes = Sizes::check(call, operands)?;
    sizes.check_states(call, operands, Some(("states", states)))?;
    for argument in [("dout", dout), ("dv", dv)] {
        call.expect(argument, &sizes.value_shape())?;
    }
    for argument in [("dq", dq), ("dk", dk)] {
        call.expect(argument, &sizes.key_shape())?;
    }
    let dskip = dskip.filter(|_| !sizes.rule.is_delta());
    let of_gates: Vec<_> =
        [("dbeta", dbeta)].into_iter().chain(dskip.map(|dskip| ("dskip", dskip))).collect();
    of_gates.iter().try_for_each(|argument| call.expect(*argument, &sizes.gate_shape()))?;
    call.expect(("dg", dg), &sizes.decay_shape())?;
    let sums = [&[("dg", dg)], &of_gates[..]].concat();
    let elements = [("dq", dq), ("dk", dk), ("dv", dv)];
    let inputs = [&operands.named()[..], &[("states", states), ("dout", dout)]].concat();
    let target = call.target(&[&elements[..], &sums].concat(), &inputs)?;
    let elements = [&operands.elements()[..], &[("dout", dout)], &elements].concat();
    let dtype =
        call.element_type(&elements, &[&operands.sums(Some(("states", states)))[..], &sums].concat())?;
    let Operands { q, k, v, g, beta, layout, .. } = *operands;
    report_flops(layout, &sizes, true);
    match target {
        Target::Cpu => sizes.with_scratch(call, layout, workspace, true, |scratch| {
            let skip = operands.read_skip(call)?;
            with_element_type!(dtype, T => {
                call.on_cpu([q, k, v, dout], [dq, dk, dv], |[q, k, v, dout]: [&[T]; 4], [dq, dk, dv]| {
                    call.on_cpu([g, beta, states], [dg, dbeta], |[g, beta, states], [dg, dbeta]| {
                        let operands = cpu::Operands { q, k, v, g, beta, skip: skip.as_deref() };
                        let problem = cpu::Problem::new(sizes, layout, operands);
                        let mut run = |dskip: Option<&mut [f32]>| {
                            let gradients = cpu::Gradients { dq, dk, dv, dg, dbeta, dskip };
                            cpu::backward(&problem, states, dout, gradients, scratch);
                            Ok(())
                        };
                        match dskip {
                            Some(dskip) => call.write(dskip, |dskip| run(Some(dskip))),
                            None => run(None),
                        }
                    })?
                })?
            })
        }),
        Target::Dry(cpu) => sizes.alloc_scratch(cpu, layout, workspace, true),
        Target::Kernels(launcher) => {
            let scratch = sizes.cuda_scratch(workspace, true)?;
            let gradients = Gradients { dskip, ..*gradients };
            call.kernels(cuda::backward(&launcher, &sizes, operands, states, dout, &gradients, &scratch))?;
            workspace.recycle(scratch);
            Ok(())
        }
    }
}
