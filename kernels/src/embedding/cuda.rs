//! The launches of `cuda/embedding.cu`.

use super::ids::{DeviceIds, Ids};
use crate::arg_check::RowSizes;
use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::EMBEDDING};
use candle_core::{DType, Tensor};

/// `kColumns` and `kColumnThreads` of the kernels: columns and threads of a block that adds up a segment.
const COLUMNS: usize = 512;
const COLUMN_THREADS: u32 = 128;

/// Copies the rows of `weight` that the first of `ids` name, to as many `rows`.
pub(super) fn copy_rows(
    launcher: &Launcher,
    ids: &Tensor,
    RowSizes { count, width }: RowSizes,
    weight: &Tensor,
    y: &Tensor,
) -> Result<(), DeviceError> {
    let kernel = Kernel::of_dtype(&EMBEDDING, "embedding_forward", weight.dtype())?;
    launcher.open([y], [weight, ids], |[y], [weight, ids]| {
        let args = [y.into(), weight.into(), ids.into(), (count as u64).into(), (width as u32).into()];
        // SAFETY: `y` has `count` rows of `width` elements, and the first `count` ids are rows of `weight` or elsewhere.
        unsafe { launcher.launch(&kernel, Grid::threads(count * 32), &args) }
    })
}

/// Sums in the order of the [plan](super::plan::Plan). Rows have `d` elements.
pub(super) fn backward(
    launcher: &Launcher,
    ids: &Ids,
    dy: &Tensor,
    dweight: &Tensor,
    d: usize,
) -> Result<(), DeviceError> {
    if ids.is_empty() {
        return Ok(());
    }
    let add_segments = Kernel::of_dtype(&EMBEDDING, "embedding_add_segments", dy.dtype())?;
    let add_partials = Kernel::new(&EMBEDDING, "embedding_add_partials");
    let plan = ids.on(dy.device())?;
    let DeviceIds { tokens_at, segments_at, sums_at, .. } = plan;
    // At least one row, since CUDA cannot allocate zero bytes and most batches need none.
    let partial = crate::tensor::empty((plan.partials.max(1), d), DType::F32, dy.device())?;
    launcher.open([dweight, &partial], [dy, &plan.tables], |[dweight, partial], [dy, tables]| {
        let [tokens, segments, sums] = [tokens_at, segments_at, sums_at].map(|at| tables.offset(at));
        let columns = d.div_ceil(COLUMNS);
        let grid = |rows| Grid { blocks: [rows, columns, 1], ..Grid::blocks(0) }.of_threads(COLUMN_THREADS);
        let d = d as u32;
        let args = [dweight.into(), partial.into(), dy.into(), tokens.into(), segments.into(), d.into()];
        // SAFETY: the plan has valid rows of `dweight` and `partial`, none twice, and tokens that are rows of
        // `dy`.
        unsafe { launcher.launch(&add_segments, grid(plan.segments), &args)? };
        let args = [dweight.into(), partial.into(), sums.into(), d.into()];
        // SAFETY: as above.
        unsafe { launcher.launch(&add_partials, grid(plan.sums), &args) }
    })
}
