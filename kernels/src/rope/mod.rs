//! Rotary position embedding (Su et al. 2021) in the convention of Hugging Face's `rotate_half`: elements i
//! and i + rotary_dim/2 of a head form a pair, which rotates by position · θ^(−2i/rotary_dim). A [`Rope`] may pair neighbors
//! instead, and rotate the first part of each head only.

mod cpu;
mod cuda;
pub mod reference;
mod scaling;
#[cfg(test)]
mod tests;

pub use scaling::{Refused, Rope, Scaling, kept_list};

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
    /// [n, pairs]
    cos: Vec<f32>,
    /// [n, pairs]
    sin: Vec<f32>,
    tokens: usize,
    heads: HeadPairs,
    on_device: DeviceTable,
    /// Memory of the table in a dry run, which does not create it.
    _dry: Option<Allocation>,
}

/// The pairs of each head that rotate.
#[derive(Debug, Clone, Copy)]
struct HeadPairs {
    /// All elements of a head. The first 2 · `pairs` rotate.
    head_dim: usize,
    pairs: usize,
    /// Whether neighbors form a pair, not elements `pairs` apart.
    interleaved: bool,
}

impl Table {
    /// Cosines, `[tokens, pairs]`.
    #[must_use]
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// Sines, `[tokens, pairs]`.
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
    /// [`Scaling::Dynamic`] and [`Scaling::LongRope`]: a document rotates as it would alone, however it is packed. Other
    /// scalings ignore it, and it may be empty.
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
        if rope.depends_on_length() {
            call.expect_tokens("document_lens", document_lens.len(), tokens)?;
        }
        let frequencies = cpu::Frequencies::new(rope, head_dim, document_lens);
        let (cos, sin) = cpu::table(position_ids, &frequencies, rope);
        let heads =
            HeadPairs { head_dim, pairs: rope.rotary_dim(head_dim) / 2, interleaved: rope.interleaved };
        Ok(Self { cos, sin, tokens, heads, on_device: DeviceTable::default(), _dry: None })
    }

    /// The table of so many tokens in a [dry run](dry), without elements.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn dry(tokens: usize, head_dim: usize, rope: &Rope) -> Result<Self, OpError> {
        let empty = Self::scaled(&[], &[], head_dim, rope)?;
        let elems = 2 * tokens * empty.heads.pairs;
        Ok(Self { tokens, _dry: Allocation::on_host(elems * size_of::<f32>()), ..empty })
    }

    /// Cosines and sines on `device`, f32, `[tokens, pairs]` each: views of one copy, which is made
    /// once.
    ///
    /// # Errors
    /// A failed copy.
    pub fn on(&self, device: &Device) -> candle_core::Result<[Tensor; 2]> {
        let len = self.tokens * self.pairs();
        let both = self.on_device.on(device, 2 * len, || [self.cos(), self.sin()].concat())?;
        let half = |at| both.narrow(0, at, len)?.reshape((self.tokens, self.pairs()));
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
        self.heads.head_dim
    }

    /// Pairs of elements per head that rotate.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.heads.pairs
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
    call.expect(("x", x), &[leading.iter().product(), *heads, table.head_dim()])?;
    call.expect_tokens("table", table.tokens, leading.iter().product())?;
    let target = call.elementwise(&[("x", x)], &[])?;
    dry::report_elementwise([x]);
    let dtype = call.element_type(&[("x", x)], &[])?;
    match target {
        Target::Cpu => with_element_type!(dtype, T => {
            call.on_cpu([], [x], |[], [x]| {
                cpu::apply::<T>(x, table, heads * head_dim, direction);
            })
        }),
        Target::Dry(_) => Ok(()),
        Target::Kernels(launcher) => call.kernels(cuda::apply(&launcher, dtype, x, *heads, table, direction)),
    }
}
