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
    let call = ArgCheck::new("gated_delta::backward");
    let Gradients { dq, dk, dv, dg, dbeta } = *gradients;
    let sizes = Sizes::check(call, operands)?;
    sizes.check_states(call, operands, Some(("states", states)))?;
    for argument in [("dout", dout), ("dv", dv)] {
        call.expect(argument, &sizes.value_shape())?;
    }
    for argument in [("dq", dq), ("dk", dk)] {
        call.expect(argument, &sizes.key_shape())?;
    }
    for argument in [("dg", dg), ("dbeta", dbeta)] {
        call.expect(argument, &sizes.gate_shape())?;
    }
    let elements = [("dq", dq), ("dk", dk), ("dv", dv)];
    let sums = [("dg", dg), ("dbeta", dbeta)];
    let inputs = [&operands.named()[..], &[("states", states), ("dout", dout)]].concat();
    let target = call.target(&[&elements[..], &sums].concat(), &inputs)?;
    let elements = [&operands.elements()[..], &[("dout", dout)], &elements].concat();
    let dtype =
        call.element_type(&elements, &[&operands.sums(Some(("states", states)))[..], &sums].concat())?;
    let Operands { q, k, v, g, beta, layout } = *operands;
    report_flops(layout, &sizes, true);
    match target {
        Target::Cpu => sizes.with_scratch(call, layout, workspace, true, |scratch| {
            with_element_type!(dtype, T => {
                call.on_cpu([q, k, v, dout], [dq, dk, dv], |[q, k, v, dout]: [&[T]; 4], [dq, dk, dv]| {
                    call.on_cpu([g, beta, states], [dg, dbeta], |[g, beta, states], [dg, dbeta]| {
                        let problem = cpu::Problem::new(sizes, layout, [q, k, v], [g, beta]);
                        let gradients = cpu::Gradients { dq, dk, dv, dg, dbeta };
                        cpu::backward(&problem, states, dout, gradients, scratch);
                    })
                })?
            })
        }),
        Target::Dry(cpu) => sizes.alloc_scratch(cpu, layout, workspace, true),
        Target::Kernels(launcher) => {
            let scratch = sizes.cuda_scratch(workspace, true)?;
            let inputs = [states, dout, &scratch];
            call.kernels(cuda::backward(&launcher, (dtype, &sizes), operands, inputs, gradients))?;
            workspace.recycle(scratch);
            Ok(())
        }
    }
}
