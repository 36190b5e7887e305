//! The parameter tensors within a flat tensor.

use crate::OpError;
use crate::arg_check::ArgCheck;
use candle_core::{Device, Tensor};
use std::ops::{AddAssign, Range};

/// Elements that are summed together, by one task or block. Chunks end at multiples of it, so that all except
/// a segment's first and last chunk are aligned to vectors.
const CHUNK_ELEMS: usize = 16 * 1024;

/// Σ p² and Σ u² over the elements of a parameter tensor, or over a part of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SquaredNorms {
    /// Sum over the parameters before the step.
    pub param: f64,
    /// Sum over the direction of the step.
    pub direction: f64,
}

impl AddAssign for SquaredNorms {
    fn add_assign(&mut self, other: Self) {
        self.param += other.param;
        self.direction += other.direction;
    }
}

/// The ranges of the parameter tensors in a flat tensor. Created once, used in every step.
#[derive(Clone, Debug)]
pub struct Segments {
    ranges: Vec<Range<usize>>,
    chunks: Vec<Chunk>,
    /// The chunks' bounds on the device: `[chunks, 2]`, i64. `None` without chunks.
    table: Option<Tensor>,
}

/// Elements of one segment that are summed together.
#[derive(Clone, Debug)]
pub(super) struct Chunk {
    pub(super) segment: usize,
    pub(super) elems: Range<usize>,
}

impl Segments {
    /// Creates the segments from the element range of each parameter tensor, in ascending order; gaps and
    /// empty ranges are allowed. `device` is that of the tensors.
    ///
    /// # Errors
    /// A segment that begins before the end of the previous one, or an error of the device.
    pub fn new(ranges: Vec<Range<usize>>, device: &Device) -> Result<Self, OpError> {
        let call = ArgCheck::new("lamb::Segments::new");
        let mut end = 0;
        for range in &ranges {
            let is_next = end <= range.start;
            call.expect_value(
                "ranges",
                range.start as f64,
                is_next,
                "at or after the end of the one before",
            )?;
            let is_range = range.start <= range.end;
            call.expect_value("ranges", range.end as f64, is_range, "an end at or after its start")?;
            end = range.end;
        }
        let chunks: Vec<_> = ranges
            .iter()
            .enumerate()
            .flat_map(|(segment, range)| chunks_of(range).map(move |elems| Chunk { segment, elems }))
            .collect();
        let ends: Vec<_> =
            chunks.iter().flat_map(|chunk| [chunk.elems.start as i64, chunk.elems.end as i64]).collect();
        let table =
            (!chunks.is_empty()).then(|| Tensor::from_vec(ends, (chunks.len(), 2), device)).transpose();
        let table = table.map_err(|source| OpError::Candle { op: call.op, source })?;
        Ok(Self { ranges, chunks, table })
    }

    /// Number of segments.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns whether there are no segments.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    pub(super) fn table(&self) -> Option<&Tensor> {
        self.table.as_ref()
    }

    pub(super) fn expect_within(&self, call: ArgCheck, param: &Tensor) -> Result<(), OpError> {
        let end = self.ranges.last().map_or(0, |range| range.end);
        let fits = end <= param.elem_count();
        call.expect_value("segments", end as f64, fits, "an end within the elements of `param`")
    }

    /// Adds up the chunks' sums per segment, in order.
    pub(super) fn sum(&self, of_chunks: impl IntoIterator<Item = SquaredNorms>) -> Vec<SquaredNorms> {
        let mut norms = vec![SquaredNorms::default(); self.ranges.len()];
        for (chunk, of_chunk) in self.chunks.iter().zip(of_chunks) {
            norms[chunk.segment] += of_chunk;
        }
        norms
    }

    /// Splits a slice into the chunks.
    pub(super) fn split_mut<'a>(&self, mut rest: &'a mut [f32]) -> Vec<&'a mut [f32]> {
        let mut at = 0;
        let mut parts = Vec::with_capacity(self.chunks.len());
        for Chunk { elems, .. } in &self.chunks {
            let (part, after) = rest.split_at_mut(elems.start - at).1.split_at_mut(elems.len());
            parts.push(part);
            (rest, at) = (after, elems.end);
        }
        parts
    }
}

fn chunks_of(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *range;
    let first = start / CHUNK_ELEMS;
    let nth = move |i: usize| (i * CHUNK_ELEMS).max(start)..((i + 1) * CHUNK_ELEMS).min(end);
    (first..end.div_ceil(CHUNK_ELEMS)).map(nth).filter(|elems| !elems.is_empty())
}
