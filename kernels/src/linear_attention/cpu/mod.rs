//! Linear attention with a decaying state on slices, in chunks of 64 tokens (section 3.3 of the paper).
//!
//! By the delta rule, with the sums γ of g from the start of a chunk, the state S before it and
//! `Lᵢⱼ = βᵢ (kᵢ·kⱼ) exp(γᵢ − γⱼ)` for j < i, a chunk is a few matmuls:
//!
//! ```text
//! errors  = V − exp(γ)∘(K S)
//! updates = (I + L)⁻¹ (β∘errors)
//! O       = exp(γ)∘(Q S) + A updates,   Aᵢⱼ = (qᵢ·kⱼ) exp(γᵢ − γⱼ) for j ≤ i
//! S       ← exp(γ_end) S + Kᵀ (exp(γ_end − γ)∘updates)
//! ```
//!
//! With [decays per channel](channels), γ is a vector. Without the delta rule, errors are the values, L is 0, and O also has D∘V.
//!
//! (I + L)⁻¹ is computed for all chunks of a segment at once, in parallel, and so is O. Only errors, updates and S depend on
//! the previous chunk. They are computed in parallel for blocks of columns of S, none of which depends on another. The
//! backward pass computes a segment again from its saved state, scans it in reverse for the gradients of updates and S, and
//! then computes all other gradients of all chunks in parallel.

mod buffers;
mod channels;
mod gradients;
mod intra;
mod output;
mod rows;
mod scan;

use super::segments::{Segment, all_segments};
use super::{LinearAttentionLayout, Sizes};
use crate::cast::Float;
use crate::device::dry::DryCpu;
use crate::matrix::{Heads, HeadsMut};
use crate::scratch::{self, Scratch};
use buffers::{HeadBuffers, blocks, units, units_together};

/// The elements of the operands, checked by the caller.
pub(super) struct Operands<'a, T> {
    pub(super) q: &'a [T],
    pub(super) k: &'a [T],
    pub(super) v: &'a [T],
    pub(super) g: &'a [f32],
    pub(super) beta: &'a [f32],
    /// The skip connection of each value head.
    pub(super) skip: Option<&'a [f32]>,
}

/// Inputs of both directions.
pub(super) struct Problem<'a, T> {
    pub(super) sizes: Sizes,
    pub(super) layout: &'a LinearAttentionLayout,
    pub(super) q: Heads<'a, T>,
    pub(super) k: Heads<'a, T>,
    pub(super) v: Heads<'a, T>,
    /// Of value heads, or of key heads with their channels.
    pub(super) g: Heads<'a, f32>,
    pub(super) beta: Heads<'a, f32>,
    /// The skip connection of each value head.
    pub(super) skip: Option<&'a [f32]>,
}

impl<'a, T: Float> Problem<'a, T> {
    pub(super) fn new(
        sizes: Sizes,
        layout: &'a LinearAttentionLayout,
        Operands { q, k, v, g, beta, skip }: Operands<'a, T>,
    ) -> Self {
        let keys = |elements| Heads::new(elements, sizes.seq_len, sizes.key_heads, sizes.key_dim);
        let gates = |elements| Heads::new(elements, sizes.seq_len, sizes.value_heads, 1);
        let (q, k, v) = (keys(q), keys(k), sizes.values(v));
        let [heads, dim] = sizes.decay_heads();
        let g = Heads::new(g, sizes.seq_len, heads, dim);
        Self { sizes, layout, q, k, v, g, beta: gates(beta), skip }
    }

    /// The factor of the normalized queries.
    fn query_scale(&self) -> f32 {
        (1.0 / (self.sizes.key_dim as f64).sqrt()) as f32
    }
}

impl Sizes {
    fn values<'a, T: Copy>(&self, elements: &'a [T]) -> Heads<'a, T> {
        Heads::new(elements, self.seq_len, self.value_heads, self.value_dim)
    }

    fn values_mut<'a, T>(&self, elements: &'a mut [T]) -> HeadsMut<'a, T> {
        HeadsMut::new(elements, self.seq_len, self.value_heads, self.value_dim)
    }

    /// Elements that the forward pass saves of one value head and column.
    fn saved_elems_per_column(&self, layout: &LinearAttentionLayout) -> usize {
        let [_, _, states, key_dim, _] = layout.states_shape(self.key_dim, self.value_dim);
        states * key_dim
    }
}

/// The segments that are processed together: at most one of each sequence.
struct Step<'a> {
    segments: &'a [Vec<Segment>],
    index: usize,
}

impl Step<'_> {
    fn segment(&self, sequence: usize) -> Option<&Segment> {
        self.segments[sequence].get(self.index)
    }
}

/// The outputs of the backward pass.
pub(super) struct Gradients<'a, T> {
    pub(super) dq: &'a mut [T],
    pub(super) dk: &'a mut [T],
    pub(super) dv: &'a mut [T],
    pub(super) dg: &'a mut [f32],
    pub(super) dbeta: &'a mut [f32],
    /// Of each token.
    pub(super) dskip: Option<&'a mut [f32]>,
}

/// Writes the output, and the states if there is memory for them.
pub(super) fn forward<T: Float>(
    problem: &Problem<'_, T>,
    o: &mut [T],
    mut states: Option<&mut [f32]>,
    scratch: &mut [f32],
) {
    let Problem { sizes, layout, .. } = *problem;
    let segments = all_segments(layout.documents());
    let steps = segments.iter().map(Vec::len).max().unwrap_or(0);
    let o = sizes.values_mut(o);
    for units in units(&sizes, layout.v_to_k()).chunks(units_together(&sizes, rayon::current_num_threads())) {
        let mut heads = HeadBuffers::new(&sizes, units, scratch, false);
        let saved = heads.values.iter().flat_map(|_| blocks(sizes.value_dim)).map(|columns| {
            let len = columns.len() * sizes.saved_elems_per_column(layout);
            states.as_mut().and_then(|states| states.split_off_mut(..len)).unwrap_or_default()
        });
        let mut saved: Vec<&mut [f32]> = saved.collect();
        for index in 0..steps {
            let step = Step { segments: &segments, index };
            intra::prepare(problem, &mut heads, &step);
            scan::forward(problem, &mut heads, &step, scan::Saved::Write(&mut saved));
            output::forward(problem, &heads, &step, &o);
        }
    }
}

/// Writes the gradients.
pub(super) fn backward<T: Float>(
    problem: &Problem<'_, T>,
    mut states: &[f32],
    dout: &[T],
    gradients: Gradients<'_, T>,
    scratch: &mut [f32],
) {
    let Problem { sizes, layout, .. } = *problem;
    let segments = all_segments(layout.documents());
    let steps = segments.iter().map(Vec::len).max().unwrap_or(0);
    let outputs = gradients::Outputs::new(&sizes, gradients);
    let dout = sizes.values(dout);
    for units in units(&sizes, layout.v_to_k()).chunks(units_together(&sizes, rayon::current_num_threads())) {
        let mut heads = HeadBuffers::new(&sizes, units, scratch, true);
        let saved = heads.values.iter().flat_map(|_| blocks(sizes.value_dim)).map(|columns| {
            let len = columns.len() * sizes.saved_elems_per_column(layout);
            states.split_off(..len).unwrap_or_default()
        });
        let saved: Vec<&[f32]> = saved.collect();
        for index in (0..steps).rev() {
            let step = Step { segments: &segments, index };
            intra::prepare(problem, &mut heads, &step);
            scan::forward(problem, &mut heads, &step, scan::Saved::Read(&saved));
            output::backward(problem, &mut heads, &step, &dout);
            scan::backward(problem, &mut heads, &step);
            gradients::chunks(problem, &heads, &step, &outputs);
        }
    }
}

/// Number of f32 elements of the working memory of a call on so many threads.
pub(super) fn scratch_elems(
    sizes: &Sizes,
    layout: &LinearAttentionLayout,
    threads: usize,
    is_backward: bool,
) -> usize {
    buffers::scratch_elems(sizes, layout.v_to_k(), units_together(sizes, threads), is_backward)
}

thread_local! {
    static SCRATCH: Scratch = const { Scratch::new(Vec::new()) };
}

/// [`scratch::with_scratch`] with this op's buffers.
fn with_scratch<const N: usize, R>(lengths: [usize; N], work: impl FnOnce([&mut [f32]; N]) -> R) -> R {
    scratch::with_scratch(&SCRATCH, lengths, work)
}

/// Counts the buffers that threads keep between calls.
pub(super) fn alloc_thread_scratch(cpu: DryCpu, sizes: &Sizes, is_backward: bool) {
    let chunk = scratch::total(intra::scratch_lengths(sizes)).max(scratch::total(scan::scratch_lengths()));
    let last = match is_backward {
        false => scratch::total(output::scratch_lengths(sizes)),
        true => scratch::total(gradients::scratch_lengths(sizes)),
    };
    cpu.alloc_persistent("linear attention", cpu.threads * chunk.max(last) * size_of::<f32>());
}
