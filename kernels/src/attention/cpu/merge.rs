//! The merge of attention over some keys with attention over others.

use crate::cast::Float;
use rayon::prelude::*;

/// Merges `part [b, sq, hq, d]` and `part_lse [b, hq, sq]` into `o` and `lse`. `d` is not 0.
pub(in crate::attention) fn merge<E: Float>(
    (o, lse): (&mut [f32], &mut [f32]),
    (part, part_lse): (&[E], &[f32]),
    [num_tokens, num_heads, head_dim]: [usize; 3],
) {
    let width = num_heads * head_dim;
    let tokens = o.par_chunks_mut(width.max(1)).zip(part.par_chunks(width.max(1)));
    tokens.enumerate().for_each_init(
        || vec![0.0; head_dim],
        |wide, (index, (o, part))| {
            let (sequence, token) = (index / num_tokens, index % num_tokens);
            for (head, (o, part)) in o.chunks_mut(head_dim).zip(part.chunks(head_dim)).enumerate() {
                let at = (sequence * num_heads + head) * num_tokens + token;
                let (_, kept, added) = merged(lse[at], part_lse[at]);
                E::widen(part, wide);
                o.iter_mut().zip(&*wide).for_each(|(o, part)| *o = kept * *o + added * part);
            }
        },
    );
    lse.par_iter_mut().zip(part_lse).for_each(|(lse, part)| *lse = merged(*lse, *part).0);
}

/// The logarithm of the sum of both denominators, and the factors on the two outputs.
fn merged(lse: f32, part: f32) -> (f32, f32, f32) {
    let max = lse.max(part);
    if max == f32::NEG_INFINITY {
        return (max, 0.0, 0.0);
    }
    let (kept, added) = ((lse - max).exp(), (part - max).exp());
    let sum = kept + added;
    (max + sum.ln(), kept / sum, added / sum)
}
