//! The merge of attention over some keys with attention over others.

use crate::attention::dims::OutputDims;
use crate::cast::Float;
use rayon::prelude::*;

/// Merges `part [b, sq, hq, d]` and `part_lse [b, hq, sq]` into `o` and `lse`. `d` is not 0.
pub(in crate::attention) fn merge<E: Float>(
    o: &mut [f32],
    lse: &mut [f32],
    part: &[E],
    part_lse: &[f32],
    dims: OutputDims,
) {
    let OutputDims { num_queries, num_heads, head_dim, .. } = dims;
    let width = (num_heads * head_dim).max(1);
    o.par_chunks_mut(width).zip(part.par_chunks(width)).enumerate().for_each_init(
        || vec![0.0; head_dim],
        |wide, (index, (o, part))| {
            let (sequence, query) = (index / num_queries, index % num_queries);
            for (head, (o, part)) in o.chunks_mut(head_dim).zip(part.chunks(head_dim)).enumerate() {
                let at = (sequence * num_heads + head) * num_queries + query;
                let Merged { kept, added, .. } = Merged::new(lse[at], part_lse[at]);
                E::widen(part, wide);
                o.iter_mut().zip(&*wide).for_each(|(o, part)| *o = kept * *o + added * part);
            }
        },
    );
    lse.par_iter_mut().zip(part_lse).for_each(|(lse, part)| *lse = Merged::new(*lse, *part).lse);
}

/// Two softmax denominators, added.
struct Merged {
    /// The logarithm of the sum.
    lse: f32,
    /// The factor on the output so far.
    kept: f32,
    /// The factor on the part.
    added: f32,
}

impl Merged {
    fn new(lse: f32, part: f32) -> Self {
        let max = lse.max(part);
        if max == f32::NEG_INFINITY {
            return Self { lse: max, kept: 0.0, added: 0.0 };
        }
        let (kept, added) = ((lse - max).exp(), (part - max).exp());
        let sum = kept + added;
        Self { lse: max + sum.ln(), kept: kept / sum, added: added / sum }
    }
}
