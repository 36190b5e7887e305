//! Rotary position embedding (Su et al. 2021) in the convention of Hugging Face's `rotate_half`: elements i
//! and i + head_dim/2 of a head form a pair, which rotates by position · θ^(−2i/head_dim).

mod cpu;
mod cuda;
pub mod reference;
mod scaling;
#[cfg(test)]
mod tests;

pub use scaling::{Refused, Rope, Scaling};

use super::OpError;
use super::arg_check::ArgCheck;
use super::cast::with_element_type;
use super::device_table::DeviceTable;
use crate::device::Target;
use crate::device::dry::{self, Allocation};
use candle_core::{Device, Tensor};

/// Cosines and sines for one batch's tokens, shared by all its layers and both directions.
#[derive(Debug)]
pub struct Table {
    /// [n, head_dim/2]
    cos: Vec<f32>,
    /// [n, head_dim/2]
    sin: Vec<f32>,
    tokens: usize,
    head_dim: usize,
    on_device: DeviceTable,
    /// Memory of the table in a dry run, which does not create it.
    _dry: Option<Allocation>,
}

impl Table {
    /// Cosines, `[tokens, head_dim / 2]`.
    #[must_use]
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// Sines, `[tokens, head_dim / 2]`.
    #[must_use]
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }

    /// Creates the table for tokens at `position_ids`, without scaling. Angles are computed in f64 and
    /// rounded after the cosine, so long positions lose no accuracy.
    ///
    /// # Errors
    /// An odd or zero `head_dim`, or a `theta` that is not positive and finite.
    pub fn new(position_ids: &[u32], head_dim: usize, theta: f64) -> Result<Self, OpError> {
        Self::scaled(position_ids, &[], head_dim, &theta.into())
    }

    /// As [`new`](Self::new), for any [`Rope`]. `document_lens` has the length of each token's document, for
    /// [`Scaling::Dynamic`]: a document rotates as it would alone, however it is packed. Other scalings
    /// ignore it, and it may be empty.
    ///
    /// # Errors
    /// A `rope` without frequencies for `head_dim`, or a missing length.
    pub fn scaled(
        position_ids: &[u32],
        document_lens: &[u32],
        head_dim: usize,
        rope: &Rope,
    ) -> Result<Self, OpError> {
        let call = ArgCheck::new("rope::Table");
        if let Some((argument, value, expected)) = rope.refused(head_dim) {
            call.expect_value(argument, value, false, expected)?;
        }
        let tokens = position_ids.len();
        if matches!(rope.scaling, Scaling::Dynamic { .. }) {
            call.expect_tokens("document_lens", document_lens.len(), tokens)?;
        }
        let frequencies = cpu::Frequencies::new(rope, head_dim, document_lens);
        let (cos, sin) = cpu::table(position_ids, &frequencies, rope.amplitude());
        Ok(Self { cos, sin, tokens, head_dim, on_device: DeviceTable::default(), _dry: None })
    }

    /// The table of so many tokens in a [dry run](dry), without elements.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn dry(tokens: usize, head_dim: usize, rope: &Rope) -> Result<Self, OpError> {
        let empty = Self::scaled(&[], &[], head_dim, rope)?;
        Ok(Self { tokens, _dry: Allocation::on_host(tokens * head_dim * size_of::<f32>()), ..empty })
    }

    /// Cosines and sines on `device`, f32, `[tokens, head_dim / 2]` each: views of one copy, which is made
    /// once.
    ///
    /// # Errors
    /// A failed copy.
    pub fn on(&self, device: &Device) -> candle_core::Result<[Tensor; 2]> {
        let len = self.tokens * (self.head_dim / 2);
        let both = self.on_device.on(device, 2 * len, || [self.cos(), self.sin()].concat())?;
        let half = |at| both.narrow(0, at, len)?.reshape((self.tokens, self.head_dim / 2));
        Ok([half(0)?, half(len)?])
    }

    /// Number of tokens n.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Elements per head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Bytes of the table on the host. A device that has used it holds the same number.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.cos.as_slice()) + size_of_val(self.sin.as_slice())
    }
}

/// The direction of the rotation in [`apply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Positive angle.
    Forward,
    /// Negative angle: the gradient. It is also the inverse, unless the rotation has an amplitude.
    Backward,
}

/// Rotates every head of x in place.
///
/// # Shapes
/// `x: [n, heads, head_dim]`, where n may be split further
///
/// # Errors
/// An x that does not match the table, or an unsupported dtype, device or layout.
pub fn apply(x: &Tensor, table: &Table, direction: Direction) -> Result<(), OpError> {
    let call = ArgCheck::new("rope::apply");
    let [leading @ .., heads, head_dim] = x.dims() else {
        let (expected, got) = ("[n, heads, head_dim]", x.dims().to_vec());
        return Err(OpError::Dimensions { op: call.op, argument: "x", expected, got });
    };
    call.expect(("x", x), &[leading.iter().product(), *heads, table.head_dim])?;
    call.expect_tokens("table", table.tokens, leading.iter().product())?;
    let target = call.elementwise(&[("x", x)], &[])?;
    dry::report_elementwise([x]);
    let dtype = call.element_type(&[("x", x)], &[])?;
    match target {
        Target::Cpu => with_element_type!(dtype, T => {
            call.on_cpu([], [x], |[], [x]| {
                cpu::apply::<T>(x, &table.cos, &table.sin, heads * head_dim, direction);
            })
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::apply(&launcher, dtype, x, *heads, table, direction)),
    }
}
