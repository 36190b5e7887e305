//! The reference for the tests: attention by its formula, one (query, key) pair at a time.
//!
//! In f64 it is exact enough to be the truth; in f32 it shows the inherent error of f32. The mask is computed
//! from positions and documents directly, not from the ranges that the kernels use.

use super::AttentionLayout;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

/// The arithmetic of the reference: f32 or f64.
pub trait Real:
    Copy
    + PartialOrd
    + From<f32>
    + AddAssign
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// `e^self`
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;
}

macro_rules! real {
    ($($real:ty),+) => {
        $(impl Real for $real {
            fn exp(self) -> Self { self.exp() }
            fn ln(self) -> Self { self.ln() }
            fn tanh(self) -> Self { self.tanh() }
        })+
    };
}
real!(f32, f64);

/// Inputs of both directions, laid out as in [`super::Operands`].
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a, T> {
    /// `[b, sq, hq, d]`
    pub q: &'a [T],
    /// `[b, skv, hkv, d]`
    pub k: &'a [T],
    /// `[b, skv, hkv, d]`
    pub v: &'a [T],
    /// `hkv`
    pub num_kv_heads: usize,
    /// `d`
    pub head_dim: usize,
    /// Factor on the logits.
    pub scale: T,
    /// The visible keys of each query, and the soft cap of the logits.
    pub layout: &'a AttentionLayout,
}

/// Returns whether a query sees a key (by indices), by the definition of [`AttentionLayout`].
pub fn is_visible(layout: &AttentionLayout, row: usize, query: usize, key: usize) -> bool {
    let (q, k) = (layout.q_positions()[query], layout.kv_positions()[key]);
    let document = |position| layout.cu_seqlens()[row].iter().filter(|start| **start <= position).count();
    k <= q && document(k) == document(q) && layout.window().is_none_or(|window| ((q - k) as usize) < window)
}

/// Returns `o [b, sq, hq, d]` and `lse [b, hq, sq]`.
pub fn forward<T: Real>(problem: &Problem<'_, T>) -> (Vec<T>, Vec<T>) {
    let zero = T::from(0.0);
    let mut o = vec![zero; problem.q.len()];
    let mut lse = Vec::new();
    problem.for_each_query(|query| {
        let (weights, row_lse) = problem.softmax(&query);
        lse.push(row_lse);
        for (key, weight) in weights {
            for column in 0..problem.head_dim {
                o[query.offset + column] += weight * problem.v[problem.kv_offset(&query, key) + column];
            }
        }
    });
    (o, lse)
}

/// Returns `(dq, dk, dv)`.
pub fn backward<T: Real>(problem: &Problem<'_, T>, dout: &[T]) -> (Vec<T>, Vec<T>, Vec<T>) {
    let zero = T::from(0.0);
    let (mut dq, mut dk) = (vec![zero; problem.q.len()], vec![zero; problem.k.len()]);
    let mut dv = dk.clone();
    problem.for_each_query(|query| {
        let (weights, _) = problem.softmax(&query);
        let one = T::from(1.0);
        let dout = &dout[query.offset..][..problem.head_dim];
        let dweights: Vec<T> =
            weights.iter().map(|(key, _)| dot(dout, &problem.v[problem.kv_offset(&query, *key)..])).collect();
        let mut mean = zero;
        for ((_, weight), dweight) in weights.iter().zip(&dweights) {
            mean += *weight * *dweight;
        }
        for ((key, weight), dweight) in weights.into_iter().zip(dweights) {
            let kv = problem.kv_offset(&query, key);
            let slope = problem.softcap().map_or(one, |cap| {
                let tanh = (problem.product(&query, key) / cap).tanh();
                one - tanh * tanh
            });
            let dlogit = weight * (dweight - mean) * slope * problem.scale;
            for column in 0..problem.head_dim {
                dv[kv + column] += weight * dout[column];
                dk[kv + column] += dlogit * problem.q[query.offset + column];
                dq[query.offset + column] += dlogit * problem.k[kv + column];
            }
        }
    });
    (dq, dk, dv)
}

/// One query of one head.
struct Query {
    row: usize,
    index: usize,
    head: usize,
    /// Its first element in `q`.
    offset: usize,
}

impl<T: Real> Problem<'_, T> {
    /// In the order of `lse`: sequences, heads, queries.
    fn for_each_query(&self, mut visit: impl FnMut(Query)) {
        let (queries, heads) = (self.layout.q_positions().len(), self.layout.q_to_kv().len());
        for row in 0..self.layout.batch() {
            for head in 0..heads {
                for index in 0..queries {
                    let offset = ((row * queries + index) * heads + head) * self.head_dim;
                    visit(Query { row, index, head, offset });
                }
            }
        }
    }

    /// Offset of the key (and value) that the query's head uses.
    fn kv_offset(&self, query: &Query, key: usize) -> usize {
        let keys = self.layout.kv_positions().len();
        let kv_head = self.layout.q_to_kv()[query.head];
        ((query.row * keys + key) * self.num_kv_heads + kv_head) * self.head_dim
    }

    fn softcap(&self) -> Option<T> {
        self.layout.logits().softcap.map(T::from)
    }

    /// The scaled product of a query and a key.
    fn product(&self, query: &Query, key: usize) -> T {
        let k = &self.k[self.kv_offset(query, key)..];
        self.scale * dot(&self.q[query.offset..][..self.head_dim], k)
    }

    /// The visible keys with their probabilities, and the log-denominator.
    fn softmax(&self, query: &Query) -> (Vec<(usize, T)>, T) {
        let keys = 0..self.layout.kv_positions().len();
        let mut weights: Vec<(usize, T)> = keys
            .filter(|key| is_visible(self.layout, query.row, query.index, *key))
            .map(|key| {
                let product = self.product(query, key);
                (key, self.softcap().map_or(product, |cap| cap * (product / cap).tanh()))
            })
            .collect();
        let mut max = T::from(f32::NEG_INFINITY);
        for (_, logit) in &weights {
            max = if *logit > max { *logit } else { max };
        }
        let mut sum = T::from(0.0);
        for (_, weight) in &mut weights {
            *weight = (*weight - max).exp();
            sum += *weight;
        }
        for (_, weight) in &mut weights {
            *weight = *weight / sum;
        }
        (weights, max + sum.ln())
    }
}

/// Dot product over the length of `a`.
fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut sum = T::from(0.0);
    for (a, b) in a.iter().zip(b) {
        sum += *a * *b;
    }
    sum
}
