//! The launches of `cuda/rms_norm.cu`.

use super::{Gain, Gradients, Operands};
use crate::arg_check::RowSizes;
use crate::device::{Address, DeviceError, Grid, Kernel, Launcher, sources::RMS_NORM};
use crate::elementwise::add_blocks;
use candle_core::{DType, Tensor};

/// Rows that one block sums for the weight gradient: enough blocks to fill a GPU, and few partial sums.
const ROWS_PER_CHUNK: usize = 128;

/// Elements per access of 16 bytes.
fn pack(dtype: DType) -> usize {
    16 / dtype.size_in_bytes()
}

/// One block per row, with at most as many threads as the row has packs; a wider row takes several rounds.
fn row_blocks(RowSizes { count, width }: RowSizes, dtype: DType) -> Grid {
    let threads = width.div_ceil(pack(dtype)).next_multiple_of(32).min(Grid::THREADS as usize);
    Grid::blocks(count).of_threads(threads as u32)
}

pub(super) fn forward(
    launcher: &Launcher,
    rows: RowSizes,
    operands: &Operands<'_>,
    eps: f64,
    y: &Tensor,
    rstd: &Tensor,
) -> Result<(), DeviceError> {
    let Operands { x, gain: Gain { weight, offset, centered }, whole } = *operands;
    let dtype = x.dtype();
    let kernel = Kernel::of_dtype(&RMS_NORM, "rms_norm_forward", dtype)?;
    let (sums, width) = (whole.map(|whole| whole.sums), whole.map_or(rows.width, |whole| whole.width));
    let inputs: Vec<_> = [x, weight].into_iter().chain(sums).collect();
    launcher.open_slices(&[y, rstd], &inputs, |addresses| {
        let [y, rstd, x, weight] = std::array::from_fn(|i| addresses[i]);
        let sums = addresses.get(4).copied().unwrap_or(Address::null(DType::F32));
        let args = [
            y.into(),
            rstd.into(),
            x.into(),
            weight.into(),
            sums.into(),
            (rows.width as u32).into(),
            (width as f32).into(),
            (eps as f32).into(),
            offset.into(),
            centered.into(),
        ];
        // SAFETY: `x` and `y` have these `rows`, `rstd` and `sums` one element a row and `weight` one a column.
        unsafe { launcher.launch(&kernel, row_blocks(rows, dtype), &args) }
    })
}

/// Sums products of the elements of each row, and of the gain if there is one.
pub(super) fn products(
    launcher: &Launcher,
    rows: RowSizes,
    a: &Tensor,
    b: &Tensor,
    gain: Option<Gain<'_>>,
    sums: &Tensor,
) -> Result<(), DeviceError> {
    let dtype = a.dtype();
    let kernel = Kernel::of_dtype(&RMS_NORM, "rms_norm_products", dtype)?;
    let inputs: Vec<_> = [a, b].into_iter().chain(gain.map(|gain| gain.weight)).collect();
    launcher.open_slices(&[sums], &inputs, |addresses| {
        let [sums, a, b] = std::array::from_fn(|i| addresses[i]);
        let weight = addresses.get(3).copied().unwrap_or(Address::null(dtype));
        let offset = gain.map_or(0.0, |gain| gain.offset);
        let width = (rows.width as u32).into();
        let args = [sums.into(), a.into(), b.into(), weight.into(), width, offset.into()];
        // SAFETY: `a` and `b` have these `rows`, `sums` one element a row and `weight` one a column.
        unsafe { launcher.launch(&kernel, row_blocks(rows, dtype), &args) }
    })
}

pub(super) fn backward(
    launcher: &Launcher,
    rows: RowSizes,
    operands: &Operands<'_>,
    dy: &Tensor,
    rstd: &Tensor,
    gradients: &Gradients<'_>,
) -> Result<(), DeviceError> {
    let Operands { x, gain: Gain { weight, offset, centered }, whole } = *operands;
    let (dtype, Gradients { dx, accumulate_dx, dweight }) = (x.dtype(), *gradients);
    let kernel = Kernel::of_dtype(&RMS_NORM, "rms_norm_backward_input", dtype)?;
    // The weight's gradient needs them too.
    let means =
        centered.then(|| crate::tensor::empty(rows.count.max(1), DType::F32, x.device())).transpose()?;
    let outputs: Vec<_> = [dx].into_iter().chain(&means).collect();
    let (sums, width) = (whole.map(|whole| whole.sums), whole.map_or(rows.width, |whole| whole.width));
    let inputs: Vec<_> = [dy, x, weight, rstd].into_iter().chain(sums).collect();
    launcher.open_slices(&outputs, &inputs, |addresses| {
        let (outputs, inputs) = addresses.split_at(outputs.len());
        let [dy, x, weight, rstd] = std::array::from_fn(|i| inputs[i]);
        let sums = inputs.get(4).copied().unwrap_or(Address::null(DType::F32));
        let dx = outputs[0];
        let means = outputs.get(1).copied().unwrap_or(Address::null_output(DType::F32));
        let args = [
            dx.into(),
            means.into(),
            dy.into(),
            x.into(),
            weight.into(),
            rstd.into(),
            sums.into(),
            (rows.width as u32).into(),
            (width as f32).into(),
            accumulate_dx.into(),
            offset.into(),
            centered.into(),
        ];
        // SAFETY: `dy`, `x` and `dx` have these `rows`, `rstd`, `sums` and `means` one element a row and `weight` one a column.
        unsafe { launcher.launch(&kernel, row_blocks(rows, dtype), &args) }
    })?;
    match dweight {
        Some(dweight) => backward_weight(launcher, rows, dy, x, rstd, means.as_ref(), dweight),
        None => Ok(()),
    }
}

/// Sums chunks of the rows, then the chunks, both in order.
fn backward_weight(
    launcher: &Launcher,
    RowSizes { count: rows, width }: RowSizes,
    dy: &Tensor,
    x: &Tensor,
    rstd: &Tensor,
    means: Option<&Tensor>,
    dweight: &Tensor,
) -> Result<(), DeviceError> {
    if rows == 0 {
        return Ok(());
    }
    let chunks = rows.div_ceil(ROWS_PER_CHUNK);
    let dtype = x.dtype();
    let partial = crate::tensor::empty((chunks, width), DType::F32, x.device())?;
    let kernel = Kernel::of_dtype(&RMS_NORM, "rms_norm_backward_weight", dtype)?;
    let inputs: Vec<_> = [dy, x, rstd].into_iter().chain(means).collect();
    launcher.open_slices(&[&partial], &inputs, |addresses| {
        let [partial, dy, x, rstd] = std::array::from_fn(|i| addresses[i]);
        let means = addresses.get(4).copied().unwrap_or(Address::null(DType::F32));
        // Chunks come first, because a grid has at most 65535 blocks along its other dimensions.
        let grid = Grid { blocks: [chunks, width.div_ceil(32 * pack(dtype)), 1], ..Grid::blocks(0) };
        let (rows, rows_per_chunk) = (rows as u64, ROWS_PER_CHUNK as u32);
        let args = [
            partial.into(),
            dy.into(),
            x.into(),
            rstd.into(),
            means.into(),
            rows.into(),
            rows_per_chunk.into(),
            (width as u32).into(),
        ];
        // SAFETY: `dy` and `x` have `rows` rows of `width` elements, `rstd` and `means` one a row, `partial` `width` for every chunk.
        unsafe { launcher.launch(&kernel, grid, &args) }
    })?;
    add_blocks(launcher, dweight, &partial, 0)
}
