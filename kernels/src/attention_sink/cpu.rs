//! Attention sinks on slices.

use crate::cast::Float;
use rayon::prelude::*;

pub(super) fn forward<T: Float>(sinks: &[f32], o: &mut [T], lse: &mut [f32], tokens: usize, head_dim: usize) {
    let heads = sinks.len();
    let rows = o.par_chunks_mut((heads * head_dim).max(1)).enumerate();
    rows.for_each_init(
        || vec![0.0; head_dim],
        |wide, (row, o)| {
            let (sequence, token) = (row / tokens, row % tokens);
            for (head, o) in o.chunks_mut(head_dim).enumerate() {
                let kept = kept(lse[(sequence * heads + head) * tokens + token], sinks[head]);
                T::widen(o, wide);
                wide.iter_mut().for_each(|value| *value *= kept);
                T::round(wide, o);
            }
        },
    );
    lse.par_chunks_mut(tokens.max(1)).enumerate().for_each(|(row, lse)| {
        let sink = sinks[row % heads];
        lse.iter_mut().for_each(|lse| *lse = with_sink(*lse, sink));
    });
}

/// Adds `−Σ e^(sink − lse) · delta` of each head, in f64.
pub(super) fn backward(sinks: &[f32], lse: &[f32], delta: &[f32], dsinks: &mut [f32], tokens: usize) {
    let heads = sinks.len();
    dsinks.par_iter_mut().enumerate().for_each(|(head, dsink)| {
        let sequences = lse.chunks(tokens.max(1)).zip(delta.chunks(tokens.max(1)));
        let of_head = sequences.skip(head).step_by(heads);
        let sum: f64 = of_head.map(|(lse, delta)| weighted_sum(sinks[head], lse, delta)).sum();
        *dsink -= sum as f32;
    });
}

/// Σ e^(sink − lse) · delta
fn weighted_sum(sink: f32, lse: &[f32], delta: &[f32]) -> f64 {
    let weight = |lse: f32| if lse == f32::NEG_INFINITY { 0.0 } else { f64::from(sink - lse).exp() };
    lse.iter().zip(delta).map(|(lse, delta)| weight(*lse) * f64::from(*delta)).sum()
}

/// The logarithm of the denominator with the sink.
fn with_sink(lse: f32, sink: f32) -> f32 {
    let max = lse.max(sink);
    if max == f32::NEG_INFINITY { max } else { max + (-(lse - sink).abs()).exp().ln_1p() }
}

/// The part of the softmax that the keys keep.
fn kept(lse: f32, sink: f32) -> f32 {
    if lse.max(sink) == f32::NEG_INFINITY { 0.0 } else { 1.0 / (1.0 + (sink - lse).exp()) }
}
