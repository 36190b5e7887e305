//! The CPU kernels: tiled matmuls with a fused softmax in between.

mod backward;
mod delta;
mod exp;
mod forward;
mod gathered;
mod merge;
mod pairs;
mod precision;
mod scratch;
mod softmax;
mod tiles;

pub(super) use crate::matrix::Heads;
pub(super) use backward::{Gradients, backward};
pub(super) use delta::delta;
pub(super) use forward::forward;
pub(super) use merge::merge;
pub(super) use pairs::InPairs;
pub(super) use precision::{InBf16, InF32, Precision};
pub(super) use scratch::scratch_bytes;

use super::{AttentionLayout, dims::Dims};

/// Inputs of both directions, checked by the caller.
pub(super) struct Problem<'a, T: Precision> {
    pub(super) kernel: T::Kernel,
    pub(super) q: Heads<'a, T::Element>,
    pub(super) k: Heads<'a, T::Element>,
    pub(super) v: Heads<'a, T::Element>,
    pub(super) dims: Dims,
    pub(super) scale: f32,
    pub(super) layout: &'a AttentionLayout,
}

/// Inputs of the backward pass in addition to the [`Problem`].
pub(super) struct Upstream<'a, T: Precision> {
    /// `[b, sq, hq, d]`
    pub(super) dout: Heads<'a, T::Element>,
    /// `[b, hq, sq]`
    pub(super) lse: &'a [f32],
    /// `[b, hq, sq]`
    pub(super) delta: &'a [f32],
}
