//! The launches of `cuda/linear_attention_forward.cu` and `cuda/linear_attention_backward.cu`: the steps of the [CPU's](super::cpu), each one
//! launch for all heads.

mod plan;

pub(super) use plan::Plan;

use super::{Gradients, Operands, Rule, Sizes};
use crate::device::sources::{LINEAR_ATTENTION_BACKWARD, LINEAR_ATTENTION_FORWARD};
use crate::device::{Address, Arg, DeviceError, Grid, Kernel, Launcher};
use bytemuck::NoUninit;
use candle_core::{DType, Tensor};
use plan::PlanStep;

/// `kChunk` and `kColumns` of the kernels: tokens of a chunk, and columns of a state that one block of a scan has.
const CHUNK: usize = super::segments::CHUNK;
const COLUMNS: usize = 32;

/// `Sizes` of the kernels.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelSizes {
    seq_len: u32,
    rows: u32,
    key_heads: u32,
    value_heads: u32,
    key_dim: u32,
    value_dim: u32,
    key_row: u32,
    value_row: u32,
    slots: u32,
    saved: u32,
}

/// Elements of the parts of the working memory, in their order.
struct Memory {
    /// `KeyRows` of the kernels, for all key heads.
    keys: usize,
    /// `ValueRows`, for all value heads.
    values: usize,
    /// `KeyGradients`.
    key_gradients: usize,
    /// `GradientRows`.
    gradients: usize,
}

impl Memory {
    fn new(sizes: &Sizes, is_backward: bool) -> Self {
        let Sizes { batch, key_heads, value_heads, key_dim, value_dim, .. } = *sizes;
        let (rows, states) = (sizes.segment_tokens(), (1 + sizes.slots()) * key_dim * value_dim);
        let in_backward = usize::from(is_backward);
        Self {
            keys: batch * key_heads * rows * key_row(sizes),
            values: batch * value_heads * (rows * value_row(sizes) + states),
            key_gradients: in_backward
                * batch
                * key_heads
                * rows
                * (3 * key_dim + sizes.of_channels(2 * key_dim)),
            gradients: in_backward * batch * value_heads * (2 * rows * value_dim + states),
        }
    }
}

/// Elements of `KeyRows` of the kernels, per token.
fn key_row(sizes: &Sizes) -> usize {
    2 * sizes.key_dim + CHUNK + sizes.of_delta(2 + CHUNK) + sizes.of_channels(4 * sizes.key_dim)
}

/// Elements of `ValueRows`, per token.
fn value_row(sizes: &Sizes) -> usize {
    2 + 2 * sizes.value_dim + sizes.of_delta(CHUNK)
}

/// A kernel that exists for each rule.
macro_rules! of_rule {
    ($sizes:expr, $name:literal) => {
        match $sizes.rule {
            Rule::Delta => concat!($name, "_delta"),
            Rule::ChannelDelta => concat!($name, "_channel_delta"),
            Rule::Sum { .. } => concat!($name, "_sum"),
        }
    };
}

/// Number of f32 elements of the working memory of a call.
pub(super) fn scratch_elems(sizes: &Sizes, is_backward: bool) -> usize {
    let Memory { keys, values, key_gradients, gradients } = Memory::new(sizes, is_backward);
    keys + values + key_gradients + gradients
}

/// Writes the output, and the states if there is memory for them.
pub(super) fn forward(
    launcher: &Launcher,
    sizes: &Sizes,
    operands: &Operands<'_>,
    o: &Tensor,
    states: Option<&Tensor>,
    scratch: &Tensor,
) -> Result<(), DeviceError> {
    let dtype = o.dtype();
    let output =
        Kernel::of_dtype(&LINEAR_ATTENTION_FORWARD, of_rule!(sizes, "linear_attention_output"), dtype)?;
    let again = Again::new(sizes, dtype)?;
    let layout = operands.layout;
    let table = layout.table(o.device())?;
    let outputs: Vec<_> = [o, scratch].into_iter().chain(states).collect();
    let Operands { q, k, v, g, beta, .. } = *operands;
    let inputs: Vec<_> = [q, k, v, g, beta, &table].into_iter().chain(operands.rule.skip()).collect();
    launcher.open_slices(&outputs, &inputs, |addresses| {
        let (outputs, inputs) = addresses.split_at(outputs.len());
        let [q, k, v, g, beta, table] = std::array::from_fn(|i| inputs[i]);
        let skip = inputs.get(6).copied().unwrap_or(Address::null(dtype));
        let tensors = OperandsAt { q, k, v, g, beta };
        let run = Run::new(launcher, sizes, outputs[1], table, false);
        let saved = outputs.get(2).copied().unwrap_or(Address::null_output(DType::F32));
        for step in &layout.plan().steps {
            again.launch(&run, step, tensors, saved, Address::null(DType::F32))?;
            let tensors = [outputs[0], run.values, run.keys, skip, run.table, run.chunks(step)];
            // SAFETY: the tensors of the kernel. The plan's tokens, heads and slots are within the tensors.
            unsafe { run.launch(&output, run.of_chunks(step, sizes.value_heads), &tensors)? };
        }
        Ok(())
    })
}

/// Writes the gradients.
pub(super) fn backward(
    launcher: &Launcher,
    sizes: &Sizes,
    operands: &Operands<'_>,
    states: &Tensor,
    dout: &Tensor,
    &Gradients { dq, dk, dv, dg, dbeta, dskip }: &Gradients<'_>,
    scratch: &Tensor,
) -> Result<(), DeviceError> {
    let dtype = dout.dtype();
    let of_dtype = |name| Kernel::of_dtype(&LINEAR_ATTENTION_BACKWARD, name, dtype);
    let output = of_dtype("linear_attention_output_backward")?;
    let chunks = of_dtype(of_rule!(sizes, "linear_attention_backward"))?;
    let scan = Kernel::new(&LINEAR_ATTENTION_BACKWARD, of_rule!(sizes, "linear_attention_scan_backward"));
    let again = Again::new(sizes, dtype)?;
    let layout = operands.layout;
    let table = layout.table(dq.device())?;
    let Operands { q, k, v, g, beta, .. } = *operands;
    let outputs: Vec<_> = [dq, dk, dv, dg, dbeta, scratch].into_iter().chain(dskip).collect();
    let inputs = [q, k, v, g, beta, &table, states, dout].into_iter().chain(operands.rule.skip());
    launcher.open_slices(&outputs, &inputs.collect::<Vec<_>>(), |addresses| {
        let (outputs, inputs) = addresses.split_at(outputs.len());
        let [dq, dk, dv, dg, dbeta, scratch] = std::array::from_fn(|i| outputs[i]);
        let [q, k, v, g, beta, table, states, dout] = std::array::from_fn(|i| inputs[i]);
        let dskip = outputs.get(6).copied().unwrap_or(Address::null_output(DType::F32));
        let skip = inputs.get(8).copied().unwrap_or(Address::null(dtype));
        let tensors = OperandsAt { q, k, v, g, beta };
        let run = Run::new(launcher, sizes, scratch, table, true);
        let Run { keys, values, key_gradients, gradients, table, .. } = run;
        for step in layout.plan().steps.iter().rev() {
            again.launch(&run, step, tensors, Address::null_output(DType::F32), states)?;
            let (of_values, of_keys) =
                (run.of_chunks(step, sizes.value_heads), run.of_chunks(step, sizes.key_heads));
            let at = run.chunks(step);
            // SAFETY: the tensors of each kernel. The plan's tokens, heads and slots are within the tensors.
            unsafe {
                run.launch(&output, of_values, &[gradients, values, keys, dout, table, at])?;
                let tensors = [gradients, values, keys, table, at, run.segments(step)];
                run.launch(&scan, run.of_columns(), &tensors)?;
                let outputs = [dq, dk, dv, dg, dbeta, dskip, key_gradients];
                let tensors = [&outputs[..], &[keys, values, gradients, skip, table, at]].concat();
                run.launch(&chunks, of_keys, &tensors)?;
            }
        }
        Ok(())
    })
}

/// The addresses of [`Operands`].
#[derive(Clone, Copy)]
struct OperandsAt {
    q: Address,
    k: Address,
    v: Address,
    g: Address,
    beta: Address,
}

/// The kernels that compute a segment, which the backward pass does again.
struct Again {
    keys: Kernel,
    values: Kernel,
    scan: Kernel,
}

impl Again {
    fn new(sizes: &Sizes, dtype: DType) -> Result<Self, DeviceError> {
        let of_dtype = |name| Kernel::of_dtype(&LINEAR_ATTENTION_FORWARD, name, dtype);
        Ok(Self {
            keys: of_dtype(of_rule!(sizes, "linear_attention_prepare_keys"))?,
            values: Kernel::new(
                &LINEAR_ATTENTION_FORWARD,
                of_rule!(sizes, "linear_attention_prepare_values"),
            ),
            scan: of_dtype(of_rule!(sizes, "linear_attention_scan"))?,
        })
    }

    /// Writes `saved`, or reads `restored`.
    fn launch(
        &self,
        run: &Run<'_>,
        step: &PlanStep,
        OperandsAt { q, k, v, g, beta }: OperandsAt,
        saved: Address,
        restored: Address,
    ) -> Result<(), DeviceError> {
        let Run { keys, values, table, sizes, .. } = *run;
        let (chunks, segments) = (run.chunks(step), run.segments(step));
        let [key_heads, value_heads] = [sizes.key_heads, sizes.value_heads].map(|heads| heads as usize);
        // SAFETY: the tensors of each kernel. The plan's tokens, heads and slots are within the tensors.
        unsafe {
            run.launch(&self.keys, run.of_chunks(step, key_heads), &[keys, q, k, g, chunks])?;
            let tensors = [values, keys, g, beta, table, chunks];
            run.launch(&self.values, run.of_chunks(step, value_heads), &tensors)?;
            let tensors = [values, saved, restored, keys, v, table, chunks, segments];
            run.launch(&self.scan, run.of_columns(), &tensors)
        }
    }
}

/// The tensors of all launches of a call.
#[derive(Clone, Copy)]
struct Run<'a> {
    launcher: &'a Launcher,
    batch: usize,
    sizes: KernelSizes,
    /// The parts of the working memory.
    keys: Address,
    values: Address,
    key_gradients: Address,
    gradients: Address,
    /// The table of the plan, which begins with the key head of each value head.
    table: Address,
}

impl<'a> Run<'a> {
    fn new(
        launcher: &'a Launcher,
        sizes: &Sizes,
        scratch: Address,
        table: Address,
        is_backward: bool,
    ) -> Self {
        let memory = Memory::new(sizes, is_backward);
        let values = scratch.offset(memory.keys);
        let key_gradients = values.offset(memory.values);
        let word = |size: usize| size as u32;
        let kernel_sizes = KernelSizes {
            seq_len: word(sizes.seq_len),
            rows: word(sizes.segment_tokens()),
            key_heads: word(sizes.key_heads),
            value_heads: word(sizes.value_heads),
            key_dim: word(sizes.key_dim),
            value_dim: word(sizes.value_dim),
            key_row: word(key_row(sizes)),
            value_row: word(value_row(sizes)),
            slots: word(sizes.slots()),
            saved: word(super::layout::saved_states(sizes.seq_len)),
        };
        Self {
            launcher,
            batch: sizes.batch,
            sizes: kernel_sizes,
            keys: scratch,
            values,
            key_gradients,
            gradients: key_gradients.offset(memory.key_gradients),
            table,
        }
    }

    fn chunks(&self, step: &PlanStep) -> Address {
        self.table.offset(step.chunks_at)
    }

    fn segments(&self, step: &PlanStep) -> Address {
        self.table.offset(step.segments_at)
    }

    /// One block per chunk and head.
    fn of_chunks(&self, step: &PlanStep, heads: usize) -> [usize; 3] {
        [step.num_chunks, heads, 1]
    }

    /// One block per sequence, value head and columns of the state.
    fn of_columns(&self) -> [usize; 3] {
        let KernelSizes { value_heads, value_dim, .. } = self.sizes;
        [self.batch, value_heads as usize, (value_dim as usize).div_ceil(COLUMNS)]
    }

    /// Starts a kernel, whose last parameter are the sizes.
    ///
    /// # Safety
    /// As [`Launcher::launch`] for these tensors.
    unsafe fn launch(
        &self,
        kernel: &Kernel,
        blocks: [usize; 3],
        tensors: &[Address],
    ) -> Result<(), DeviceError> {
        let sizes = Arg::Struct(bytemuck::bytes_of(&self.sizes));
        let args: Vec<_> = tensors.iter().map(|address| Arg::from(*address)).chain([sizes]).collect();
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.launcher.launch(kernel, Grid { blocks, ..Grid::blocks(0) }, &args) }
    }
}
