//! The CPU kernels: tiles of matrix products with a fused softmax between them.

mod backward;
mod exp;
mod forward;
mod matrix;
mod scratch;
mod softmax;
mod tiles;

pub(super) use backward::{Gradients, Upstream, backward, delta};
pub(super) use forward::forward;
pub(super) use matrix::Heads;
pub(super) use scratch::scratch_bytes;

use super::{Geometry, dims::Dims};

/// What both directions read; checked by the caller.
pub(super) struct Problem<'a> {
    pub(super) q: Heads<'a>,
    pub(super) k: Heads<'a>,
    pub(super) v: Heads<'a>,
    pub(super) dims: Dims,
    pub(super) scale: f32,
    pub(super) geometry: &'a Geometry,
}
