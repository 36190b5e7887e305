//! The embedding on slices; ids have been checked.

use super::ELSEWHERE;
use crate::cast::Pieces;
use crate::parallel::{MIN_BLOCK_ELEMS, rows_per_block};
use rayon::prelude::*;

pub(super) fn copy_rows<T: Pieces>(ids: &[u32], weight: &[T], y: &mut [T], d: usize) {
    let rows = rows_per_block(ids.len(), d);
    (ids.par_chunks(rows), y.par_chunks_mut(rows * d)).into_par_iter().for_each(|(ids, y)| {
        for (id, y) in ids.iter().zip(y.chunks_exact_mut(d)) {
            match *id {
                ELSEWHERE => y.fill(T::zero()),
                id => y.copy_from_slice(&weight[id as usize * d..][..d]),
            }
        }
    });
}

/// Each task owns a range of vocabulary rows and scans all ids for them. So no two tasks write the same row,
/// and each row receives its gradients in token order. Ids of rows elsewhere are in no range.
pub(super) fn backward<T: Pieces>(ids: &[u32], dy: &[T], dweight: &mut [f32], d: usize) {
    let vocab_size = dweight.len() / d;
    let tasks = rayon::current_num_threads().min(dy.len().div_ceil(MIN_BLOCK_ELEMS)).max(1);
    let rows = vocab_size.div_ceil(tasks).max(1);
    dweight.par_chunks_mut(rows * d).enumerate().for_each_init(Vec::new, |buffer, (task, dweight)| {
        let owned = task * rows..(task + 1) * rows;
        for (id, dy) in ids.iter().zip(dy.chunks_exact(d)) {
            let id = *id as usize;
            if owned.contains(&id) {
                let start = (id - owned.start) * d;
                for (dweight, dy) in dweight[start..start + d].iter_mut().zip(T::read(dy, buffer)) {
                    *dweight += dy;
                }
            }
        }
    });
}
