//! The driver of all rules: checks tensors, divides the elements among threads, and applies a rule to each.

use crate::OpError;
use crate::arg_check::{ArgCheck, Argument};
use crate::device::{Arg, DeviceError, Grid, Kernel, Launcher, Target, dry, sources::OPTIMIZER};
use crate::parallel::rows_per_block;
use crate::simd::{Isa, LANES, SimdKernel, dispatch, padded};
use bytemuck::NoUninit;
use candle_core::Tensor;
use rayon::prelude::*;

/// An optimizer that treats every element independently. A step updates `T` tensors: the parameters and `T −
/// 1` of state.
pub(super) trait Rule<const T: usize>: Copy {
    /// Name of the op for errors.
    const OP: &'static str;
    /// The entry point in `cuda/optimizer.cu`.
    const KERNEL: &'static str;
    /// The names of the updated tensors, parameters first.
    const TENSORS: [&'static str; T];
    /// The constants of one step, computed in f64 and rounded once. The kernel's parameter is the same
    /// struct.
    type Constants: NoUninit + Send + Sync;

    /// Refuses hyper-parameters outside of their range.
    fn check(&self, call: ArgCheck) -> Result<(), OpError>;

    fn constants(&self) -> Self::Constants;

    /// Updates one element of each tensor; called in vectorized loops, so `#[inline(always)]`.
    fn update<S: Isa>(constants: &Self::Constants, element: &mut [f32; T], grad: f32);
}

/// One step of a rule on `tensors`, parameters first.
pub(super) fn step<R: Rule<T>, const T: usize>(
    rule: &R,
    tensors: [&Tensor; T],
    grad: &Tensor,
) -> Result<(), OpError> {
    let call = ArgCheck::new(R::OP);
    rule.check(call)?;
    let updated: [Argument<'_>; T] = std::array::from_fn(|t| (R::TENSORS[t], tensors[t]));
    for argument in [("grad", grad)].iter().chain(&updated[1..]) {
        call.expect(*argument, &[tensors[0].elem_count()])?;
    }
    let target = call.elementwise(&updated, &[("grad", grad)])?;
    dry::report_elementwise(tensors);
    call.element_type(&[], &[&updated[..], &[("grad", grad)]].concat())?;
    match target {
        Target::Cpu => call.on_cpu([grad], tensors, |[grad], tensors| on_cpu(rule, tensors, grad)),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(launch(&launcher, rule, tensors, grad)),
    }
}

/// One step of a rule on the host, on elements of `tensors`, parameters first. Its bits are those of [`step`] on CPU
/// tensors.
pub(super) fn step_on_host<R: Rule<T>, const T: usize>(
    rule: &R,
    tensors: [&mut [f32]; T],
    grad: &[f32],
) -> Result<(), OpError> {
    let call = ArgCheck::new(R::OP);
    rule.check(call)?;
    for (name, tensor) in R::TENSORS.iter().zip(&tensors) {
        let len = tensor.len();
        call.expect_value(name, len as f64, len == grad.len(), "as many elements as `grad`")?;
    }
    on_cpu(rule, tensors, grad);
    Ok(())
}

/// Implements [`ElementStep`](super::ElementStep) for a [`Rule`] with these state tensors.
macro_rules! element_step {
    ($params:ty, $($state:ident),+) => {
        impl super::ElementStep for $params {
            fn apply(&self, param: &Tensor, grad: &Tensor, state: &[Tensor]) -> Result<(), OpError> {
                match state {
                    [$($state),+] => elementwise::step(self, [param, $($state),+], grad),
                    _ => super::refuse_state(Self::OP, state.len()),
                }
            }

            fn apply_on_host(
                &self,
                param: &mut [f32],
                grad: &[f32],
                state: &mut [&mut [f32]],
            ) -> Result<(), OpError> {
                match state {
                    [$($state),+] => elementwise::step_on_host(self, [param, $($state),+], grad),
                    _ => super::refuse_state(Self::OP, state.len()),
                }
            }
        }
    };
}

pub(super) use element_step;

fn on_cpu<R: Rule<T>, const T: usize>(rule: &R, mut tensors: [&mut [f32]; T], grad: &[f32]) {
    let constants = rule.constants();
    let block_elems = rows_per_block(grad.len(), 1);
    let mut block = |grad: &'_ [f32]| tensors.each_mut().map(|rest| split_off(rest, grad.len()));
    let blocks: Vec<_> = grad.chunks(block_elems).map(|grad| (block(grad), grad)).collect();
    blocks.into_par_iter().for_each(|(tensors, grad)| {
        dispatch(Block::<R, T> { tensors, grad, constants });
    });
}

fn split_off<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (block, after) = std::mem::take(rest).split_at_mut(len);
    *rest = after;
    block
}

/// The elements that one task updates: slices of equal length.
struct Block<'a, R: Rule<T>, const T: usize> {
    tensors: [&'a mut [f32]; T],
    grad: &'a [f32],
    constants: R::Constants,
}

impl<R: Rule<T>, const T: usize> SimdKernel for Block<'_, R, T> {
    #[inline(always)]
    fn run<S: Isa>(self) {
        let Self { tensors, grad, constants } = self;
        let (chunks, tail) = grad.as_chunks::<LANES>();
        for (chunk, grad) in chunks.iter().enumerate() {
            let start = chunk * LANES;
            let mut lanes = [[0.0; LANES]; T];
            for t in 0..T {
                lanes[t].copy_from_slice(&tensors[t][start..start + LANES]);
            }
            update_lanes::<R, S, T>(&constants, &mut lanes, grad);
            for t in 0..T {
                tensors[t][start..start + LANES].copy_from_slice(&lanes[t]);
            }
        }
        let start = grad.len() - tail.len();
        let mut lanes = [[0.0; LANES]; T];
        for t in 0..T {
            lanes[t] = padded(&tensors[t][start..], 0.0);
        }
        update_lanes::<R, S, T>(&constants, &mut lanes, &padded(tail, 0.0));
        for t in 0..T {
            tensors[t][start..].copy_from_slice(&lanes[t][..tail.len()]);
        }
    }
}

#[inline(always)]
fn update_lanes<R: Rule<T>, S: Isa, const T: usize>(
    constants: &R::Constants,
    lanes: &mut [[f32; LANES]; T],
    grad: &[f32; LANES],
) {
    for lane in 0..LANES {
        let mut element = [0.0; T];
        for t in 0..T {
            element[t] = lanes[t][lane];
        }
        R::update::<S>(constants, &mut element, grad[lane]);
        for t in 0..T {
            lanes[t][lane] = element[t];
        }
    }
}

fn launch<R: Rule<T>, const T: usize>(
    launcher: &Launcher,
    rule: &R,
    tensors: [&Tensor; T],
    grad: &Tensor,
) -> Result<(), DeviceError> {
    let (kernel, len) = (Kernel::new(&OPTIMIZER, R::KERNEL), grad.elem_count());
    let constants = rule.constants();
    launcher.open(tensors, [grad], |tensors, [grad]| {
        let scalars = [(len as u64).into(), Arg::Struct(bytemuck::bytes_of(&constants))];
        let args = [&tensors.map(Arg::from)[..], &[grad.into()], &scalars].concat();
        // SAFETY: all tensors have `len` elements, and the kernel's last parameter is this struct.
        unsafe { launcher.launch(&kernel, Grid::tiles(len), &args) }
    })
}
