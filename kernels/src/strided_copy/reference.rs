//! The definition, element by element.

use super::StridedBlock;

/// Calls `visit` with the offset of every pair of elements, from and to, in order.
pub fn for_each_element(from: &StridedBlock, to: &StridedBlock, mut visit: impl FnMut(usize, usize)) {
    let at = |block: &StridedBlock, b: usize, r: usize, e: usize| {
        block.offset + b * block.batch_stride + r * block.row_stride + e
    };
    for b in 0..to.batch {
        for r in 0..to.rows {
            for e in 0..to.run {
                visit(at(from, b, r, e), at(to, b, r, e));
            }
        }
    }
}
