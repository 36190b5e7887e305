//! Gradients of a chunk's rows and pairs of tokens, and of the normalization.

use super::super::segments::CHUNK;
use crate::simd::{self, simd_kernel};

/// Gradients of γ, of the rates and of the skip connection, per token.
pub(super) struct Sums {
    pub(super) decay: [f32; CHUNK],
    pub(super) beta: [f32; CHUNK],
    pub(super) skip: [f32; CHUNK],
}

/// The factors of A and L.
#[derive(Clone, Copy)]
pub(super) struct Products<'a> {
    pub(super) qk: &'a [f32],
    pub(super) kk: &'a [f32],
    pub(super) decay: &'a [f32],
    pub(super) beta: &'a [f32],
}

simd_kernel! {
    /// Replaces the gradient of A by that of the products of queries and keys, and the gradient of L by that of the
    /// products of keys, symmetric. Adds the gradients of γ and β. With decays per channel γ is 0, and its gradient has no use.
    pub(super) fn pair_gradients<S>(products: Products<'_>, da: &mut [f32], dl: &mut [f32], sums: &mut Sums) {
        let Products { qk, kk, decay, beta } = products;
        let len = decay.len();
        for i in 0..len {
            let row = i * CHUNK..i * CHUNK + CHUNK;
            let (da, dl) = (&mut da[row.clone()], &mut dl[row.clone()]);
            let (qk, kk) = (&qk[row.clone()], &kk[row]);
            let mut of_beta = 0.0;
            let mut of_decay = 0.0;
            for j in 0..i {
                let factor = simd::exp::<S>(decay[i] - decay[j]);
                let (of_qk, of_kk) = (da[j] * factor, dl[j] * factor);
                (da[j], dl[j]) = (of_qk, beta[i] * of_kk);
                let of_pair = S::mul_add(of_qk, qk[j], beta[i] * of_kk * kk[j]);
                of_beta = S::mul_add(of_kk, kk[j], of_beta);
                of_decay += of_pair;
                sums.decay[j] -= of_pair;
            }
            sums.decay[i] += of_decay;
            sums.beta[i] += of_beta;
            dl[i] = 0.0;
            da[i + 1..len].fill(0.0);
        }
        for i in 0..len {
            for j in 0..i {
                dl[j * CHUNK + i] = dl[i * CHUNK + j];
            }
        }
    }
}

simd_kernel! {
    /// Replaces the gradient of A by that of the products of queries and keys. Adds that of γ.
    pub(super) fn attention_gradients<S>(qk: &[f32], decay: &[f32], da: &mut [f32], of_decay: &mut [f32; CHUNK]) {
        let len = decay.len();
        for (i, (da, qk)) in da.chunks_exact_mut(CHUNK).zip(qk.chunks_exact(CHUNK)).take(len).enumerate() {
            let mut sum = 0.0;
            for j in 0..i {
                da[j] *= simd::exp::<S>(decay[i] - decay[j]);
                let of_pair = da[j] * qk[j];
                sum += of_pair;
                of_decay[j] -= of_pair;
            }
            of_decay[i] += sum;
            da[i + 1..len].fill(0.0);
        }
    }
}

simd_kernel! {
    /// Adds `factors∘terms` to a gradient, and its products with the rows to `dots`.
    pub(super) fn add_terms<S>(terms: &[f32], factors: &[f32], rows: &[f32], dim: usize, into: &mut [f32], dots: &mut [f32]) {
        let rows = rows.chunks_exact(dim).zip(into.chunks_exact_mut(dim));
        for (((term, factor), (row, into)), sum) in terms.chunks_exact(dim).zip(factors).zip(rows).zip(dots) {
            *sum = S::mul_add(*factor, simd::dot::<S>(term, row), *sum);
            for (into, term) in into.iter_mut().zip(term) {
                *into = S::mul_add(*factor, *term, *into);
            }
        }
    }
}

simd_kernel! {
    pub(super) fn dot<S>(a: &[f32], b: &[f32]) -> f32 {
        simd::dot::<S>(a, b)
    }
}

simd_kernel! {
    /// The gradient of x for that of the rows `scale · x / |x|`.
    pub(super) fn normalize_backward<S>(rows: &[f32], dim: usize, scale: f32, inverse_norms: &[f32], gradients: &mut [f32]) {
        let rows = rows.chunks_exact(dim).zip(gradients.chunks_exact_mut(dim));
        for ((row, gradient), inverse_norm) in rows.zip(inverse_norms) {
            let along = simd::dot::<S>(row, gradient) / scale;
            for (gradient, x) in gradient.iter_mut().zip(row) {
                *gradient = inverse_norm * S::mul_add(-along, *x, scale * *gradient);
            }
        }
    }
}
