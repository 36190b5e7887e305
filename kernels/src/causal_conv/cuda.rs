//! The launches of `cuda/causal_conv.cu`.

use super::{Filter, Gradients, Sizes};
use crate::device::{Address, DeviceError, Grid, Kernel, Launcher, sources::CAUSAL_CONV};
use crate::elementwise::add_blocks;
use candle_core::{DType, Tensor};

/// Tokens of a block: `kTokens` of the kernels.
const TOKENS: usize = 128;

/// One thread per channel, in each block of tokens.
fn grid(sizes: Sizes) -> Grid {
    let channels = sizes.channels.div_ceil(Grid::THREADS as usize);
    Grid { blocks: [sizes.tokens.div_ceil(TOKENS), channels, 1], ..Grid::blocks(0) }
}

pub(super) fn forward(
    launcher: &Launcher,
    sizes: Sizes,
    filter: &Filter<'_>,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), DeviceError> {
    if sizes.is_empty() {
        return Ok(());
    }
    let dtype = x.dtype();
    let kernel = Kernel::of_dtype(&CAUSAL_CONV, "causal_conv_forward", dtype)?;
    let before = filter.documents.tokens_before(x.device())?;
    let inputs: Vec<_> = [x, filter.weight, &before].into_iter().chain(filter.bias).collect();
    launcher.open_slices(&[y], &inputs, |addresses| {
        let [y, x, weight, before] = std::array::from_fn(|i| addresses[i]);
        let bias = addresses.get(4).copied().unwrap_or(Address::null(dtype));
        let tensors = [y, x, weight, bias, before].map(Into::into);
        let args = [&tensors[..], &sizes.args(), &[filter.silu.into()]].concat();
        // SAFETY: x and y have `tokens` rows of `channels` elements, `before` one element per token, the weight `width` per
        // channel and the bias one.
        unsafe { launcher.launch(&kernel, grid(sizes), &args) }
    })
}

/// Sums blocks of tokens, then the blocks, both in order.
pub(super) fn backward(
    launcher: &Launcher,
    sizes: Sizes,
    filter: &Filter<'_>,
    dy: &Tensor,
    x: &Tensor,
    &Gradients { dx, dweight, dbias }: &Gradients<'_>,
) -> Result<(), DeviceError> {
    if sizes.is_empty() {
        return Ok(());
    }
    let (dtype, Sizes { tokens, channels, width }) = (x.dtype(), sizes);
    let kernel = Kernel::of_dtype(&CAUSAL_CONV, "causal_conv_backward", dtype)?;
    let partial =
        crate::tensor::empty((tokens.div_ceil(TOKENS), (width + 1) * channels), DType::F32, x.device())?;
    let before = filter.documents.tokens_before(x.device())?;
    let inputs: Vec<_> = [dy, x, filter.weight, &before].into_iter().chain(filter.bias).collect();
    launcher.open_slices(&[dx, &partial], &inputs, |addresses| {
        let [dx, partial, dy, x, weight, before] = std::array::from_fn(|i| addresses[i]);
        let bias = addresses.get(6).copied().unwrap_or(Address::null(dtype));
        let tensors = [dx, partial, dy, x, weight, bias, before].map(Into::into);
        let args = [&tensors[..], &sizes.args(), &[filter.silu.into()]].concat();
        // SAFETY: as in `forward`; dy and dx are like x, and `partial` has a row per block, like weight and bias.
        unsafe { launcher.launch(&kernel, grid(sizes), &args) }
    })?;
    // One at a time: the gradients may be parts of one tensor, which can be opened once.
    dweight.map_or(Ok(()), |dweight| add_blocks(launcher, dweight, &partial, 0))?;
    dbias.map_or(Ok(()), |dbias| add_blocks(launcher, dbias, &partial, width * channels))
}
