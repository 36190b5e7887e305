//! The language-model head and its loss in one op: `logits = x·Wᵀ`, plus a bias if there is one, and
//! `loss = Σ (logsumexp(logits) − logits[label])`.
//!
//! Tokens are processed in tiles, so at most `tile_tokens × vocab` logits exist at any time (the idea of
//! Liger's fused linear cross-entropy and of DeepSpeed's tiled logits loss). [`backward`] recomputes each
//! tile's logits from the `lse` of [`forward`], which costs one matmul more than storing them.
//!
//! The label [`IGNORED`] excludes a token: no loss, zero gradient, and an `lse` of 0. A tile with only such
//! labels is skipped. All sums over tokens run in token order.
//!
//! A rank with a [`mod@slice`] of the vocabulary computes the statistics of its logits; those of all slices combine
//! to the losses, and [`backward`] takes the combined `lse`.

mod cpu;
mod cuda;
mod losses;
mod operands;
pub mod reference;
pub mod slice;
#[cfg(test)]
mod tests;

pub use losses::Losses;
pub use operands::{Gradients, Operands, Projection, ProjectionGradients};

use super::arg_check::ArgCheck;
use super::cast::with_element_type;
use super::gemm::bf16::Stored;
use super::gemm::dispatch::{alloc_matmul_scratch, alloc_token_sum_scratch};
use super::{OpError, TokenTable, Workspace, linear};
use crate::device::Target;
use crate::device::dry::{self, DryCpu, MatmulOp};
use crate::tensor::Element;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// The label of a token that has no loss (PyTorch's `ignore_index`).
pub const IGNORED: i64 = -100;

/// The label of a token whose label is in another [`mod@slice`] of the vocabulary.
pub const ELSEWHERE: i64 = -1;

/// The labels of a micro batch.
pub type Labels = TokenTable<i64>;

/// A sum of token losses, with the number of tokens. Sums of shards and micro batches can be added.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSum {
    /// Sum of the losses of the tokens with a label.
    pub sum: f64,
    /// Number of these tokens.
    pub valid_tokens: u64,
}

/// Tokens in a tile on a CPU, where larger ones are no faster, and at least so many on a GPU.
const TILE_TOKENS: usize = 1024;

/// The logits of a tile on a GPU have at most as many bytes, if the vocabulary allows. Every tile reads and writes the
/// whole weight gradient, which takes a large part of its time on a GPU.
const TILE_BYTES: usize = 1 << 30;

/// The tile size that suits a device.
///
/// # Errors
/// A device that this build has no kernels for.
pub fn default_tile_tokens(vocab_size: usize, device: &Device) -> Result<usize, OpError> {
    let fits = |tokens: &usize| tokens * vocab_size * size_of::<f32>() <= TILE_BYTES;
    let call = ArgCheck::new("lm_head_loss::default_tile_tokens");
    Ok(match call.kernels(Target::of(device))? {
        Target::Kernels(_) => {
            [8, 4, 2].map(|times| times * TILE_TOKENS).into_iter().find(fits).unwrap_or(TILE_TOKENS)
        }
        Target::Cpu | Target::Dry(_) => TILE_TOKENS,
    })
}

/// How the logits are computed, from a number of tokens or with a cap as well.
#[derive(Clone, Copy, Debug)]
pub struct LogitTiles {
    /// Number of tokens whose logits exist at a time.
    pub tokens: usize,
    /// The logits' soft cap, `cap · tanh(logit / cap)`, which is positive; `None` without one.
    pub softcap: Option<f32>,
    /// Whether the weight is a [`mod@slice`] of the vocabulary, so that labels may be [`ELSEWHERE`].
    pub is_slice: bool,
}

impl From<usize> for LogitTiles {
    fn from(tokens: usize) -> Self {
        Self { tokens, softcap: None, is_slice: false }
    }
}

/// Computes the losses, and writes each token's logsumexp for [`backward`]. Does not synchronize with a GPU;
/// their sum does. The buffer for logits has room for a tile of `tiles`, even if there are fewer tokens; on a CPU
/// it is allocated from the `workspace`, which must be one of CPU tensors.
///
/// # Shapes
/// Those of the [`Operands`]; `lse_out: [n]`
///
/// # Errors
/// A label that is neither [`IGNORED`] nor in 0..vocab, tiles of 0 tokens, shapes, dtypes, devices or
/// layouts that do not match, or an `lse_out` that shares storage with an input.
pub fn forward(
    operands: &Operands<'_>,
    tiles: impl Into<LogitTiles>,
    lse_out: &Tensor,
    workspace: &Workspace,
) -> Result<Losses, OpError> {
    let Operands { x, projection: Projection { weight, bias }, labels } = *operands;
    let call = ArgCheck::new("lm_head_loss::forward");
    let shape = operands.check(call, tiles.into())?;
    call.expect(("lse_out", lse_out), &[shape.tokens])?;
    let inputs = operands.named();
    let target = call.target(&[("lse_out", lse_out)], &inputs)?;
    call.element_type(&inputs, &[("lse_out", lse_out)])?;
    shape.report(false, 1.0);
    match target {
        Target::Cpu => {
            let bias = bias.map(|bias| call.read(bias)).transpose()?;
            let sum = with_element_type!(x.dtype(), T => with_tile_logits(call, shape, workspace, |logits| {
                call.write(lse_out, |lse| call.on_cpu([x, weight], [], |[x, weight]: [&[T]; 2], []| {
                    let mut loss = LossSum::default();
                    let weights = cpu::Weights { weight, bias: bias.as_deref() };
                    cpu::forward(shape, x, weights, labels, lse, logits, |_, lse, logit| {
                        loss.sum += f64::from(lse) - f64::from(logit);
                        loss.valid_tokens += 1;
                    })?;
                    Ok(loss)
                })?)
            }))?;
            Ok(Losses::summed(sum))
        }
        Target::Dry(cpu) => {
            shape.alloc_dry(cpu, operands.projection, workspace)?;
            Ok(Losses::summed(LossSum { sum: 0.0, valid_tokens: shape.tokens as u64 }))
        }
        Target::Kernels(launcher) => call.kernels(cuda::losses(&launcher, shape, operands, lse_out)),
    }
}

/// Gradients of `scale` · the sum of [`forward`].
///
/// # Shapes
/// Those of the [`Operands`] and the [`Gradients`]; `lse: [n]`
///
/// # Errors
/// As [`forward`].
pub fn backward(
    operands: &Operands<'_>,
    lse: &Tensor,
    scale: f32,
    gradients: &Gradients<'_>,
    tiles: impl Into<LogitTiles>,
    workspace: &Workspace,
) -> Result<(), OpError> {
    let (Operands { x, projection, .. }, dx) = (*operands, gradients.dx);
    let call = ArgCheck::new("lm_head_loss::backward");
    let shape = operands.check(call, tiles.into())?;
    call.expect(("lse", lse), &[shape.tokens])?;
    call.expect(("dx", dx), &[shape.tokens, shape.dim])?;
    let (dweight, dbias) = (gradients.projection.weight_argument(), gradients.projection.bias_argument());
    dweight.map_or(Ok(()), |argument| call.expect(argument, &[shape.vocab_size, shape.dim]))?;
    dbias.map_or(Ok(()), |argument| call.expect(argument, &[shape.vocab_size]))?;
    let outputs: Vec<_> = [("dx", dx)].into_iter().chain(dweight).collect();
    let target = call.target(&outputs, &projection.with([("x", x), ("lse", lse)]))?;
    if let Some(dbias) = dbias {
        // Apart from dweight, which may be part of the same flat gradient.
        call.target(&[dbias], &projection.with([("x", x), ("lse", lse), ("dx", dx)]))?;
    }
    let sums: Vec<_> = [("lse", lse)].into_iter().chain(dweight).chain(dbias).collect();
    let dtype = call.element_type(&projection.with([("x", x), ("dx", dx)]), &sums)?;
    shape.report(true, 1.0 + f64::from(u8::from(dweight.is_some())));
    match target {
        Target::Cpu => with_element_type!(dtype, T => {
            backward_on_cpu::<T>(call, shape, operands, lse, scale, gradients, workspace)
        }),
        Target::Dry(cpu) => {
            let logits = workspace.alloc_f32((shape.tile_tokens, shape.vocab_size))?;
            let Sizes { dim, vocab_size, tile_tokens, .. } = shape;
            let f32 = DType::F32;
            let sums = if dbias.is_some() { vocab_size * size_of::<f64>() } else { 0 };
            cpu.alloc_temporary(sums + projection.widened_bytes());
            alloc_matmul_scratch(cpu, [dtype, dtype, f32], [tile_tokens, vocab_size, dim]);
            alloc_matmul_scratch(cpu, [f32, dtype, dtype], [tile_tokens, dim, vocab_size]);
            if dweight.is_some() {
                alloc_token_sum_scratch(cpu, [f32, dtype, f32], [vocab_size, dim, tile_tokens]);
            }
            workspace.recycle(logits);
            Ok(())
        }
        Target::Kernels(launcher) => {
            call.kernels(cuda::backward(&launcher, shape, operands, lse, scale, gradients))
        }
    }
}

fn backward_on_cpu<T: Stored + Element>(
    call: ArgCheck,
    shape: Sizes,
    &Operands { x, projection: Projection { weight, bias }, labels }: &Operands<'_>,
    lse: &Tensor,
    scale: f32,
    &Gradients { dx, projection: gradients }: &Gradients<'_>,
    workspace: &Workspace,
) -> Result<(), OpError> {
    let (lse, bias) = (call.read(lse)?, bias.map(|bias| call.read(bias)).transpose()?);
    // Added at the end, since the gradients of weight and bias may be parts of one tensor.
    let mut sums = gradients.bias.map(|_| vec![0.0; shape.vocab_size]);
    with_tile_logits(call, shape, workspace, |logits| {
        call.on_cpu([x, weight], [dx], |[x, weight], [dx]| {
            let weights = cpu::Weights { weight, bias: bias.as_deref() };
            let inputs = cpu::BackwardInputs::<T> { x, weights, labels, lse: &lse, scale };
            let sums = sums.as_deref_mut();
            match gradients.weight {
                Some(dweight) => call
                    .write(dweight, |dweight| cpu::backward(shape, inputs, dx, Some(dweight), sums, logits)),
                None => cpu::backward(shape, inputs, dx, None, sums, logits),
            }
        })?
    })?;
    match (gradients.bias, sums) {
        (Some(dbias), Some(sums)) => call.add_sums(dbias, &sums),
        _ => Ok(()),
    }
}

/// Calls `work` with a buffer for a tile's logits from the workspace.
fn with_tile_logits<R>(
    call: ArgCheck,
    shape: Sizes,
    workspace: &Workspace,
    work: impl FnOnce(&mut [f32]) -> Result<R, OpError>,
) -> Result<R, OpError> {
    let logits = workspace.alloc_f32((shape.tile_tokens, shape.vocab_size))?;
    let result = call.on_cpu([], [&logits], |[], [logits]| work(logits))??;
    workspace.recycle(logits);
    Ok(result)
}

/// Checks labels before some of them are passed to [`forward`], so that an error names the position among
/// all of them.
///
/// # Errors
/// A label that is neither [`IGNORED`] nor in `0..vocab_size`.
pub fn validate_labels(labels: &[i64], vocab_size: usize) -> Result<(), OpError> {
    check_labels(ArgCheck::new("lm_head_loss::forward"), labels, vocab_size, false)
}

/// Computes all logits at once, without a bias, for evaluation and checks.
///
/// # Shapes
/// `x: [n, d], weight: [vocab, d], out: [n, vocab]`
///
/// # Errors
/// As [`linear::forward`].
pub fn logits(x: &Tensor, weight: &Tensor, out: &Tensor) -> Result<(), OpError> {
    linear::forward(x, weight, out, false)
}

/// The sizes of one call.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    dim: usize,
    vocab_size: usize,
    tile_tokens: usize,
    softcap: Option<f32>,
    is_slice: bool,
}

impl Sizes {
    /// The memory of a forward pass in a dry run.
    fn alloc_dry(
        self,
        cpu: DryCpu,
        projection: Projection<'_>,
        workspace: &Workspace,
    ) -> Result<(), OpError> {
        let Self { dim, vocab_size, tile_tokens, .. } = self;
        let dtype = projection.weight.dtype();
        cpu.alloc_temporary(projection.widened_bytes());
        workspace.recycle(workspace.alloc_f32((tile_tokens, vocab_size))?);
        alloc_matmul_scratch(cpu, [dtype, dtype, DType::F32], [tile_tokens, vocab_size, dim]);
        Ok(())
    }

    /// Reports the matmuls, and the softmax or its gradient, which read and write the logits, in a dry run.
    fn report(self, is_backward: bool, products: f64) {
        let logits = self.tokens as f64 * self.vocab_size as f64;
        dry::report_flops(MatmulOp::LmHead, is_backward, products * 2.0 * self.dim as f64 * logits);
        dry::report_elementwise_bytes(2 * (self.tokens * self.vocab_size * size_of::<f32>()) as u64);
    }

    /// The tokens of each tile.
    fn tiles(self) -> impl Iterator<Item = Range<usize>> {
        let Self { tokens, tile_tokens, .. } = self;
        (0..tokens).step_by(tile_tokens).map(move |start| start..(start + tile_tokens).min(tokens))
    }
}

fn all_ignored(labels: &[i64]) -> bool {
    labels.iter().all(|label| *label == IGNORED)
}

/// Checks labels, of which some are no class of the vocabulary or of its slice.
fn check_labels(call: ArgCheck, labels: &[i64], vocab_size: usize, is_slice: bool) -> Result<(), OpError> {
    let (other, also_valid) = match is_slice {
        true => (ELSEWHERE, " and -1 (in another slice)"),
        false => (IGNORED, " and -100 (ignored)"),
    };
    let valid = |label: i64| label == other || usize::try_from(label).is_ok_and(|l| l < vocab_size);
    match labels.iter().enumerate().find(|(_, label)| !valid(**label)) {
        None => Ok(()),
        Some((position, &value)) => {
            let (op, argument) = (call.op, "labels");
            Err(OpError::IdOutOfRange { op, argument, position, value, vocab_size, also_valid })
        }
    }
}
