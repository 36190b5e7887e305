//! Decays per channel of the keys (section 3 of Kimi Linear, arXiv 2510.26692).
//!
//! Where states are read and written, the decays of a chunk are factors of its rows: with `Q∘exp(γ)`, `K∘exp(γ)` and
//! `K∘exp(γ_end − γ)` in place of Q and K, all is as with a γ of 0 per head. Between two tokens of a chunk they are not, for
//! `exp(−γ)` overflows: products sum `qᵢ kⱼ exp(γᵢ − γⱼ)` over the channels.
//!
//! In the gradients, γᵢ counts with each row that it multiplies: its gradient is `qᵢ∘dqᵢ + kᵢ∘dkᵢ`, but negative for keys that
//! later tokens see.

use super::super::segments::CHUNK;
use super::buffers::ChannelRows;
use crate::simd::{self, simd_kernel};

/// Gradients that come from a chunk's pairs of tokens.
pub(super) struct PairGradients<'a> {
    /// Of the products of queries and keys, for j ≤ i.
    pub(super) qk: &'a [f32],
    /// Of the products of keys, for j < i.
    pub(super) kk: &'a [f32],
}

/// Gradients of a key head's rows in a chunk, `[tokens, Dk]`.
pub(super) struct RowGradients<'a> {
    pub(super) q: &'a mut [f32],
    /// Of keys, where they read what is stored.
    pub(super) k: &'a mut [f32],
    /// Of keys, where they are stored.
    pub(super) stored: &'a mut [f32],
    /// Of γ_end, as the decay of the state, `[Dk]`.
    pub(super) end: &'a mut [f32],
}

simd_kernel! {
    /// Sums g over the tokens, in place, and writes the rows with decays.
    pub(super) fn decay_rows<S>(q: &[f32], k: &[f32], rows: &mut ChannelRows<'_>, dim: usize) {
        for row in 1..rows.decay.len() / dim {
            let (before, now) = rows.decay.split_at_mut(row * dim);
            for (now, before) in now[..dim].iter_mut().zip(&before[(row - 1) * dim..]) {
                *now += before;
            }
        }
        let end = rows.decay.len() - dim;
        for start in (0..rows.decay.len()).step_by(dim) {
            for channel in 0..dim {
                let (at, decay) = (start + channel, rows.decay[start + channel]);
                let of_start = simd::exp::<S>(decay);
                rows.q[at] = q[at] * of_start;
                rows.k[at] = k[at] * of_start;
                rows.stored[at] = k[at] * simd::exp::<S>(rows.decay[end + channel] - decay);
            }
        }
    }
}

simd_kernel! {
    /// Writes the products of queries, and of keys, with the keys of tokens up to theirs. `term` has a row.
    pub(super) fn pair_products<S>(
        q: &[f32],
        k: &[f32],
        decay: &[f32],
        qk: &mut [f32],
        kk: &mut [f32],
        term: &mut [f32],
    ) {
        let dim = term.len();
        let tokens = q.chunks_exact(dim).zip(k.chunks_exact(dim)).zip(decay.chunks_exact(dim));
        let products = qk.chunks_exact_mut(CHUNK).zip(kk.chunks_exact_mut(CHUNK));
        for (i, (((q, k_row), now), (qk, kk))) in tokens.zip(products).enumerate() {
            let seen = k.chunks_exact(dim).zip(decay.chunks_exact(dim)).take(i + 1);
            for (((k, before), qk), kk) in seen.zip(qk).zip(kk) {
                for (((term, k), now), before) in term.iter_mut().zip(k).zip(now).zip(before) {
                    *term = k * simd::exp::<S>(now - before);
                }
                *qk = simd::dot::<S>(q, term);
                *kk = simd::dot::<S>(k_row, term);
            }
        }
    }
}

simd_kernel! {
    /// Adds the gradients that come from [`pair_products`].
    pub(super) fn add_pair_gradients<S>(
        q: &[f32],
        k: &[f32],
        decay: &[f32],
        dim: usize,
        pairs: &PairGradients<'_>,
        into: &mut RowGradients<'_>,
    ) {
        for i in 0..q.len() / dim {
            let row = i * dim..i * dim + dim;
            let (q, k_row, now) = (&q[row.clone()], &k[row.clone()], &decay[row.clone()]);
            let (dq, dk) = (&mut into.q[row.clone()], &mut into.k[row]);
            for j in 0..=i {
                let before = j * dim..j * dim + dim;
                let (k, decay, dstored) = (&k[before.clone()], &decay[before.clone()], &mut into.stored[before]);
                let (of_qk, of_kk) = (pairs.qk[i * CHUNK + j], if j < i { pairs.kk[i * CHUNK + j] } else { 0.0 });
                for channel in 0..dim {
                    let factor = simd::exp::<S>(now[channel] - decay[channel]);
                    let term = k[channel] * factor;
                    dq[channel] = S::mul_add(of_qk, term, dq[channel]);
                    dk[channel] = S::mul_add(of_kk, term, dk[channel]);
                    let of_stored = S::mul_add(of_qk, q[channel], of_kk * k_row[channel]);
                    dstored[channel] = S::mul_add(of_stored, factor, dstored[channel]);
                }
            }
        }
    }
}

simd_kernel! {
    /// Adds `scales∘exp(γ)∘terms` to a gradient; a row has one scale.
    pub(super) fn add_decayed<S>(terms: &[f32], decay: &[f32], scales: &[f32], dim: usize, into: &mut [f32]) {
        let rows = terms.chunks_exact(dim).zip(decay.chunks_exact(dim)).zip(into.chunks_exact_mut(dim));
        for (((terms, decay), into), scale) in rows.zip(scales) {
            for ((term, decay), into) in terms.iter().zip(decay).zip(into) {
                *into = S::mul_add(scale * simd::exp::<S>(*decay), *term, *into);
            }
        }
    }
}

simd_kernel! {
    /// Adds `exp(γ_end − γ)∘terms` to the gradient of the stored keys, and its products with them to that of γ_end.
    pub(super) fn add_stored<S>(terms: &[f32], k: &[f32], decay: &[f32], into: &mut RowGradients<'_>) {
        let dim = into.end.len();
        let end = &decay[decay.len() - dim..];
        for start in (0..decay.len()).step_by(dim) {
            for (channel, end) in end.iter().enumerate() {
                let at = start + channel;
                let of_key = terms[at] * simd::exp::<S>(end - decay[at]);
                into.stored[at] += of_key;
                into.end[channel] = S::mul_add(of_key, k[at], into.end[channel]);
            }
        }
    }
}

simd_kernel! {
    /// Adds the gradient of γ_end as the decay of some columns of the state, from those and their gradient, `[Dk, width]`.
    pub(super) fn add_decay_of_state<S>(state: &[f32], dstate: &[f32], end: &[f32], into: &mut [f32]) {
        let width = state.len() / end.len();
        let rows = state.chunks_exact(width).zip(dstate.chunks_exact(width));
        for (((state, dstate), end), into) in rows.zip(end).zip(into) {
            *into = S::mul_add(simd::exp::<S>(*end), simd::dot::<S>(state, dstate), *into);
        }
    }
}

simd_kernel! {
    /// Decays the rows of a state, `[Dk, width]`, by those of a chunk that ends with the sums `end`.
    pub(super) fn decay_state<S>(state: &mut [f32], end: &[f32], width: usize) {
        for (row, end) in state.chunks_exact_mut(width).zip(end) {
            let factor = simd::exp::<S>(*end);
            for x in row.iter_mut() {
                *x *= factor;
            }
        }
    }
}

simd_kernel! {
    /// Writes the gradient of g, `[tokens, Dk]`, and adds the gradients of stored keys to those of keys.
    pub(super) fn finish<S>(q: &[f32], k: &[f32], gradients: &mut RowGradients<'_>, dg: &mut [f32]) {
        let dim = gradients.end.len();
        for start in (0..q.len()).step_by(dim).rev() {
            for channel in 0..dim {
                let at = start + channel;
                let of_keys = k[at] * (gradients.k[at] - gradients.stored[at]);
                gradients.end[channel] += S::mul_add(q[at], gradients.q[at], of_keys);
                dg[at] = gradients.end[channel];
                gradients.k[at] += gradients.stored[at];
            }
        }
    }
}
