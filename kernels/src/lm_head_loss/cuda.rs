//! The matmuls of a tile with the device's matrix library, and the launches of `cuda/lm_head_loss.cu` in
//! between.

use super::{Gradients, LossSum, Losses, Operands, Projection, ProjectionGradients, Sizes, all_ignored};
use crate::device::{Address, DeviceError, Grid, Kernel, Launcher, Matmul, MatrixAt, sources::LM_HEAD_LOSS};
use crate::elementwise::{add_blocks, fill_on};
use candle_core::{DType, Tensor};
use std::ops::Range;

/// Rows of logits are padded to multiples of 16 bytes of the smallest elements.
const ROW_ALIGNMENT: usize = 8;

/// Threads per block that reduces a row of logits.
const ROW_THREADS: u32 = 512;

/// The losses of the tokens stay on the device until their sum is requested.
pub(super) fn losses(
    launcher: &Launcher,
    sizes: Sizes,
    operands: &Operands<'_>,
    lse: &Tensor,
) -> Result<Losses, DeviceError> {
    if sizes.tokens == 0 {
        return Ok(Losses::summed(LossSum::default()));
    }
    let losses = crate::tensor::empty(sizes.tokens, DType::F32, operands.x.device())?;
    forward(launcher, sizes, operands, lse, Some(&losses))?;
    let valid_tokens = match launcher.is_dry() {
        true => sizes.tokens,
        false => operands.labels.iter().filter(|label| **label != super::IGNORED).count(),
    };
    Ok(Losses::from_tensor(losses, valid_tokens as u64))
}

/// The logsumexp of each token, then the logit of each token's label.
pub(super) fn statistics(
    launcher: &Launcher,
    sizes: Sizes,
    operands: &Operands<'_>,
    statistics: &Tensor,
) -> Result<(), DeviceError> {
    if sizes.tokens == 0 {
        return Ok(());
    }
    forward(launcher, sizes, operands, statistics, None)
}

/// Writes the logsumexp and the loss of each token. Of a slice there is no tensor for losses: the logits of the labels follow the
/// logsumexps, in one tensor, whose storage can be opened only once.
fn forward(
    launcher: &Launcher,
    sizes: Sizes,
    &Operands { x, projection, labels }: &Operands<'_>,
    lse: &Tensor,
    losses: Option<&Tensor>,
) -> Result<(), DeviceError> {
    let device = x.device();
    let logits = crate::tensor::empty((sizes.tile_tokens, row_stride(sizes)), DType::F32, device)?;
    let bias = BiasTensors::new(launcher, sizes, projection)?;
    let device_labels = labels.on(device)?;
    if launcher.is_dry() {
        return Ok(());
    }
    let kernel = Kernel::new(&LM_HEAD_LOSS, "lm_head_loss_forward");
    let outputs: Vec<_> = [lse, &logits].into_iter().chain(losses).collect();
    let bias = bias.iter().flat_map(BiasTensors::both);
    let inputs: Vec<_> = [x, projection.weight, &device_labels].into_iter().chain(bias).collect();
    launcher.open_slices(&outputs, &inputs, |addresses| {
        let (outputs, inputs) = addresses.split_at(outputs.len());
        let [lse, logits] = std::array::from_fn(|i| outputs[i]);
        let results = outputs.get(2).copied().unwrap_or_else(|| lse.offset(sizes.tokens));
        let ([x, weight, device_labels], bias) =
            (std::array::from_fn(|i| inputs[i]), BiasAt::in_inputs(&inputs[3..]));
        for tokens in sizes.tiles() {
            if !all_ignored(&labels[tokens.clone()]) {
                let Sizes { dim, vocab_size, .. } = sizes;
                let x = MatrixAt::row_major(x.offset(tokens.start * dim), tokens.len(), dim, dim);
                let weight = MatrixAt::row_major(weight, vocab_size, dim, dim);
                // SAFETY: the addresses of tensors of the shapes that `lm_head_loss::forward` checked.
                unsafe { logits_of_tile(launcher, sizes, x, weight, bias, logits)? };
            }
            let args = [
                lse.offset(tokens.start).into(),
                results.offset(tokens.start).into(),
                logits.into(),
                device_labels.offset(tokens.start).into(),
                (sizes.vocab_size as u32).into(),
                (row_stride(sizes) as u32).into(),
                sizes.softcap.unwrap_or(0.0).into(),
                u32::from(sizes.is_slice).into(),
            ];
            let grid = Grid::blocks(tokens.len()).of_threads(ROW_THREADS);
            // SAFETY: a tile has at most `tile_tokens` rows of logits; labels, results and lse have one
            // element for each token; every label that is not negative is a column.
            unsafe { launcher.launch(&kernel, grid, &args)? };
        }
        Ok(())
    })
}

/// Combines the statistics of all slices.
pub(super) fn combine(
    launcher: &Launcher,
    slices: usize,
    statistics: &Tensor,
    lse: &Tensor,
    own: Range<usize>,
) -> Result<Losses, DeviceError> {
    let tokens = lse.elem_count();
    if tokens == 0 {
        return Ok(Losses::summed(LossSum::default()));
    }
    let losses = crate::tensor::empty(tokens, DType::F32, lse.device())?;
    if !launcher.is_dry() {
        let kernel = Kernel::new(&LM_HEAD_LOSS, "lm_head_loss_combine");
        launcher.open([lse, &losses], [statistics], |[lse, losses], [statistics]| {
            let args = [
                lse.into(),
                losses.into(),
                statistics.into(),
                (slices as u32).into(),
                (tokens as u64).into(),
            ];
            // SAFETY: `lse` and `losses` have one element for each token, `statistics` two of each slice.
            unsafe { launcher.launch(&kernel, Grid::threads(tokens), &args) }
        })?;
    }
    Ok(Losses::from_tensor(losses.narrow(0, own.start, own.len())?, own.len() as u64))
}

/// A bias is the weight of one more input, which is 1.
struct BiasTensors<'a> {
    bias: &'a Tensor,
    /// A one for each token of a tile.
    ones: Tensor,
}

impl<'a> BiasTensors<'a> {
    fn new(
        launcher: &Launcher,
        sizes: Sizes,
        Projection { weight, bias }: Projection<'a>,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(bias) = bias else { return Ok(None) };
        let ones = crate::tensor::empty(sizes.tile_tokens, weight.dtype(), weight.device())?;
        fill_on(launcher, &ones, 1.0)?;
        Ok(Some(Self { bias, ones }))
    }

    fn both(&self) -> [&Tensor; 2] {
        [self.bias, &self.ones]
    }
}

/// The addresses of [`BiasTensors`].
#[derive(Clone, Copy)]
struct BiasAt {
    bias: Address,
    ones: Address,
}

impl BiasAt {
    /// Those of [`BiasTensors::both`], if there are any.
    fn in_inputs(inputs: &[Address]) -> Option<Self> {
        let &[bias, ones] = inputs else { return None };
        Some(Self { bias, ones })
    }

    /// A column for the tokens of a tile, with a row for each.
    fn ones(self, rows: usize) -> MatrixAt {
        MatrixAt::row_major(self.ones, rows, 1, 1)
    }
}

pub(super) fn backward(
    launcher: &Launcher,
    sizes: Sizes,
    &Operands { x, projection, labels }: &Operands<'_>,
    lse: &Tensor,
    scale: f32,
    &Gradients { dx, projection: ProjectionGradients { weight: dweight, bias: dbias } }: &Gradients<'_>,
) -> Result<(), DeviceError> {
    if sizes.tokens == 0 {
        return Ok(());
    }
    let (dtype, device) = (x.dtype(), x.device());
    let rows_of_tile = |dtype| crate::tensor::empty((sizes.tile_tokens, row_stride(sizes)), dtype, device);
    let logits = rows_of_tile(DType::F32)?;
    // f32 gradients overwrite their logits.
    let narrow = (dtype != DType::F32).then(|| rows_of_tile(dtype)).transpose()?;
    let bias = BiasTensors::new(launcher, sizes, projection)?;
    // Added at the end, since the gradients of weight and bias may be parts of one tensor, which can be opened once.
    let sums = dbias.map(|_| crate::tensor::empty((1, sizes.vocab_size), DType::F32, device)).transpose()?;
    let device_labels = labels.on(device)?;
    if launcher.is_dry() {
        return Ok(());
    }
    sums.as_ref().map_or(Ok(()), |sums| fill_on(launcher, sums, 0.0))?;
    let outputs: Vec<_> = [dx, &logits].into_iter().chain(dweight).chain(&narrow).chain(&sums).collect();
    let bias = bias.iter().flat_map(BiasTensors::both);
    let inputs: Vec<_> = [x, projection.weight, lse, &device_labels].into_iter().chain(bias).collect();
    launcher.open_slices(&outputs, &inputs, |addresses| {
        let (outputs, inputs) = addresses.split_at(outputs.len());
        let ([dx, logits], mut others) = (std::array::from_fn(|i| outputs[i]), outputs[2..].iter().copied());
        let dweight = dweight.and_then(|_| others.next());
        let gradient = narrow.as_ref().and_then(|_| others.next()).unwrap_or(logits);
        let dbias = sums.as_ref().and_then(|_| others.next());
        let [x, weight, lse, device_labels] = std::array::from_fn(|i| inputs[i]);
        let bias = BiasAt::in_inputs(&inputs[4..]);
        let Sizes { dim, vocab_size, .. } = sizes;
        let of_weight = |address| MatrixAt::row_major(address, vocab_size, dim, dim);
        for tokens in sizes.tiles() {
            let (start, rows) = (tokens.start, tokens.len());
            let [x, dx] = [x, dx].map(|at| MatrixAt::row_major(at.offset(start * dim), rows, dim, dim));
            if all_ignored(&labels[tokens]) {
                // SAFETY: the rows of dx of this tile.
                unsafe { clear(launcher, dx.address, rows * dim)? };
                continue;
            }
            let (lse, labels) = (lse.offset(start), device_labels.offset(start));
            let gradient = MatrixAt::row_major(gradient, rows, vocab_size, row_stride(sizes));
            // SAFETY: the addresses of tensors of the shapes that `lm_head_loss::backward` checked; `logits`
            // and `gradient` have room for a tile, and `dbias` is like the bias.
            unsafe {
                logits_of_tile(launcher, sizes, x, of_weight(weight), bias, logits)?;
                gradient_of_tile(launcher, sizes, logits, lse, labels, gradient)?;
                launcher.gemm(&matmul(scale, gradient, of_weight(weight), 0.0, dx))?;
                if let Some(dweight) = dweight {
                    launcher.gemm(&matmul(scale, gradient.transposed(), x, 1.0, of_weight(dweight)))?;
                }
                if let (Some(bias), Some(dbias)) = (bias, dbias) {
                    let dbias = MatrixAt::row_major(dbias, vocab_size, 1, 1);
                    launcher.gemm(&matmul(scale, gradient.transposed(), bias.ones(rows), 1.0, dbias))?;
                }
            }
        }
        Ok(())
    })?;
    match (dbias, &sums) {
        (Some(dbias), Some(sums)) => add_blocks(launcher, dbias, sums, 0),
        _ => Ok(()),
    }
}

fn row_stride(sizes: Sizes) -> usize {
    sizes.vocab_size.next_multiple_of(ROW_ALIGNMENT)
}

/// logits = x·weightᵀ, plus the bias if there is one.
///
/// # Safety
/// `x` has the tile's rows, `weight` and `bias` are tensors of these `sizes`, `logits` has room for the tile.
unsafe fn logits_of_tile(
    launcher: &Launcher,
    sizes: Sizes,
    x: MatrixAt,
    weight: MatrixAt,
    bias: Option<BiasAt>,
    logits: Address,
) -> Result<(), DeviceError> {
    let logits = MatrixAt::row_major(logits, x.rows, sizes.vocab_size, row_stride(sizes));
    if let Some(bias) = bias {
        let column = MatrixAt::row_major(bias.bias, sizes.vocab_size, 1, 1);
        // SAFETY: by this function's contract.
        unsafe { launcher.gemm(&matmul(1.0, bias.ones(x.rows), column.transposed(), 0.0, logits))? };
    }
    let beta = if bias.is_some() { 1.0 } else { 0.0 };
    // SAFETY: by this function's contract.
    unsafe { launcher.gemm(&matmul(1.0, x, weight.transposed(), beta, logits)) }
}

/// gradient = softmax(logits) − one-hot, times the derivative of a soft cap. The matmuls apply the upstream gradient, since in their f32
/// arithmetic a small one does not underflow.
///
/// # Safety
/// `logits` has room for the rows of `gradient`; `lse` and `labels` have an element for each.
unsafe fn gradient_of_tile(
    launcher: &Launcher,
    sizes: Sizes,
    logits: Address,
    lse: Address,
    labels: Address,
    MatrixAt { address: gradient, rows, .. }: MatrixAt,
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&LM_HEAD_LOSS, "lm_head_loss_gradient", gradient.dtype())?;
    let columns_of_block = Grid::THREADS as usize * (16 / gradient.dtype().size_in_bytes());
    let blocks = [rows, sizes.vocab_size.div_ceil(columns_of_block), 1];
    let args = [
        gradient.into(),
        logits.into(),
        lse.into(),
        labels.into(),
        (sizes.vocab_size as u32).into(),
        (row_stride(sizes) as u32).into(),
        sizes.softcap.unwrap_or(0.0).into(),
    ];
    // SAFETY: by this function's contract.
    unsafe { launcher.launch(&kernel, Grid { blocks, ..Grid::blocks(rows) }, &args) }
}

fn matmul(alpha: f32, a: MatrixAt, b: MatrixAt, beta: f32, c: MatrixAt) -> Matmul {
    Matmul { alpha, a, b, beta, c, batch: 1 }
}

/// # Safety
/// `elements` elements from `rows` on may be written.
unsafe fn clear(launcher: &Launcher, rows: Address, elements: usize) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&LM_HEAD_LOSS, "lm_head_loss_clear", rows.dtype())?;
    let args = [rows.into(), (elements as u64).into()];
    // SAFETY: by this function's contract.
    unsafe { launcher.launch(&kernel, Grid::threads(elements), &args) }
}
