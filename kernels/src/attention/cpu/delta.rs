//! `delta`: the term that a query's keys share in the derivative of the softmax.

use super::scratch::with_scratch;
use super::softmax::row_dots;
use crate::attention::blocks::blocks;
use crate::cast::Float;
use crate::matrix::{HeadAt, Heads};
use rayon::prelude::*;

/// Tokens that are converted to f32 at a time.
const TOKENS: usize = 64;

/// Writes `delta [b, hq, sq] = rowsum(o * dout)`.
pub(in crate::attention) fn delta<E: Float>(o: &Heads<'_, E>, dout: &Heads<'_, E>, delta: &mut [f32]) {
    let (num_tokens, head_dim) = (o.num_tokens(), o.head_dim());
    delta.par_chunks_mut(num_tokens.max(1)).enumerate().for_each(|(index, delta)| {
        let at = HeadAt::new(index, o.num_heads());
        if let (Some(o), Some(dout)) = (o.as_f32(), dout.as_f32()) {
            return row_dots(o.head_slice(at), dout.head_slice(at), o.row_stride(), head_dim, delta);
        }
        with_scratch([TOKENS * head_dim; 2], |[wide_o, wide_dout]| {
            for tokens in blocks(0..num_tokens, num_tokens, TOKENS) {
                o.gather_f32(at, &tokens, wide_o);
                dout.gather_f32(at, &tokens, wide_dout);
                row_dots(wide_o, wide_dout, head_dim, head_dim, &mut delta[tokens]);
            }
        });
    });
}
