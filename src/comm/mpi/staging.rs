//! Buffers between tensors and messages, kept from one operation to the next.

use crate::comm::CommError;
use candle_core::{DType, Device, Tensor};
use parking_lot::Mutex;
use ulysses_kernels::tensor::zeros;

/// Buffers that wait for their next use: as many as were in use at a time, each as large as what it was needed for.
/// Fresh memory would be filled with zeros in every operation, and faulted in page by page.
#[derive(Debug, Default)]
pub(super) struct Staging {
    free: Mutex<Vec<Tensor>>,
}

/// A buffer in use.
#[derive(Debug)]
pub(super) struct Staged {
    whole: Tensor,
    elems: usize,
}

impl Staging {
    /// Room for `elems` elements, with unspecified content.
    pub(super) fn alloc(&self, elems: usize, dtype: DType) -> Result<Staged, CommError> {
        if elems == 0 {
            return Ok(Staged { whole: zeros(0, dtype, &Device::Cpu)?, elems });
        }
        let kept = {
            let mut free = self.free.lock();
            let size = |&index: &usize| free[index].elem_count();
            let of_dtype = || (0..free.len()).filter(|&index| free[index].dtype() == dtype);
            // The larger ones are for those that need them.
            let fitting = of_dtype().filter(|index| size(index) >= elems).min_by_key(size);
            let chosen = fitting.or_else(|| of_dtype().max_by_key(size));
            chosen.map(|index| free.swap_remove(index))
        };
        // One that is too small goes, so that the one that takes its place is the only one.
        let whole = match kept.filter(|tensor| tensor.elem_count() >= elems) {
            Some(whole) => whole,
            None => zeros(elems, dtype, &Device::Cpu)?,
        };
        Ok(Staged { whole, elems })
    }

    /// Takes a buffer back that no message uses any more.
    pub(super) fn recycle(&self, staged: Staged) {
        if staged.whole.elem_count() > 0 {
            self.free.lock().push(staged.whole);
        }
    }
}

impl Staged {
    /// The elements that were asked for.
    pub(super) fn tensor(&self) -> Result<Tensor, CommError> {
        Ok(self.whole.narrow(0, 0, self.elems)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::buffer::StorageId;

    #[test]
    fn a_buffer_is_used_again_for_what_fits_and_replaced_by_a_larger_one() {
        let staging = Staging::default();
        let first = staging.alloc(8, DType::F32).unwrap();
        let memory = StorageId::of(&first.whole);
        staging.recycle(first);
        let other = staging.alloc(4, DType::U32).unwrap();
        let smaller = staging.alloc(5, DType::F32).unwrap();
        assert_eq!((StorageId::of(&smaller.whole), smaller.tensor().unwrap().elem_count()), (memory, 5));
        let beside = staging.alloc(5, DType::F32).unwrap();
        assert_ne!(StorageId::of(&beside.whole), memory, "the other one is in use");
        [smaller, other].into_iter().for_each(|staged| staging.recycle(staged));
        let larger = staging.alloc(9, DType::F32).unwrap();
        assert_eq!(larger.tensor().unwrap().elem_count(), 9);
        assert_eq!(staging.free.lock().len(), 1, "the smaller one is gone");
    }

    #[test]
    fn of_several_buffers_the_smallest_that_fits_is_taken() {
        let staging = Staging::default();
        let take = |elems| staging.alloc(elems, DType::F32).unwrap();
        // What an operation needs at a time, and the next one needs again.
        for sizes in [[9, 5, 3], [3, 9, 5], [5, 3, 9]] {
            let staged = sizes.map(take);
            for (staged, size) in staged.iter().zip(sizes) {
                assert_eq!(staged.whole.elem_count(), size, "{sizes:?}");
            }
            staged.into_iter().for_each(|staged| staging.recycle(staged));
        }
        assert_eq!(staging.free.lock().len(), 3, "and none is allocated anew");
    }
}
