//! Staging buffers between tensors and messages, reused across operations.

use crate::comm::CommError;
use candle_core::{DType, Device, Tensor};
use parking_lot::Mutex;
use ulysses_kernels::tensor::zeros;

/// Free buffers: as many as were in use at the same time, each as large as its largest use.
/// New memory would be zeroed and page-faulted in every operation.
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
    /// Allocates `elems` elements with unspecified content.
    pub(super) fn alloc(&self, elems: usize, dtype: DType) -> Result<Staged, CommError> {
        if elems == 0 {
            return Ok(Staged { whole: zeros(0, dtype, &Device::Cpu)?, elems });
        }
        let reused = {
            let mut free = self.free.lock();
            let size = |&index: &usize| free[index].elem_count();
            let of_dtype = || (0..free.len()).filter(|&index| free[index].dtype() == dtype);
            // The smallest that fits: larger ones are left for larger requests.
            let fitting = of_dtype().filter(|index| size(index) >= elems).min_by_key(size);
            let chosen = fitting.or_else(|| of_dtype().max_by_key(size));
            chosen.map(|index| free.swap_remove(index))
        };
        // A buffer that is too small is dropped, so that its replacement is the only one.
        let whole = match reused.filter(|tensor| tensor.elem_count() >= elems) {
            Some(whole) => whole,
            None => zeros(elems, dtype, &Device::Cpu)?,
        };
        Ok(Staged { whole, elems })
    }

    /// Returns a buffer that no message uses any more.
    pub(super) fn recycle(&self, staged: Staged) {
        if staged.whole.elem_count() > 0 {
            self.free.lock().push(staged.whole);
        }
    }
}

impl Staged {
    /// The requested elements.
    pub(super) fn tensor(&self) -> Result<Tensor, CommError> {
        Ok(self.whole.narrow(0, 0, self.elems)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::buffer::StorageId;

    #[test]
    fn a_buffer_is_reused_if_it_fits_and_replaced_by_a_larger_one() {
        let staging = Staging::default();
        let first = staging.alloc(8, DType::F32).unwrap();
        let memory = StorageId::of(&first.whole);
        staging.recycle(first);
        let other = staging.alloc(4, DType::U32).unwrap();
        let smaller = staging.alloc(5, DType::F32).unwrap();
        assert_eq!((StorageId::of(&smaller.whole), smaller.tensor().unwrap().elem_count()), (memory, 5));
        let second = staging.alloc(5, DType::F32).unwrap();
        assert_ne!(StorageId::of(&second.whole), memory, "the other buffer is in use");
        [smaller, other].into_iter().for_each(|staged| staging.recycle(staged));
        let larger = staging.alloc(9, DType::F32).unwrap();
        assert_eq!(larger.tensor().unwrap().elem_count(), 9);
        assert_eq!(staging.free.lock().len(), 1, "the smaller buffer was dropped");
    }

    #[test]
    fn the_smallest_buffer_that_fits_is_reused() {
        let staging = Staging::default();
        let take = |elems| staging.alloc(elems, DType::F32).unwrap();
        // Buffers of one operation in use at the same time, which the next operation needs again.
        for sizes in [[9, 5, 3], [3, 9, 5], [5, 3, 9]] {
            let staged = sizes.map(take);
            for (staged, size) in staged.iter().zip(sizes) {
                assert_eq!(staged.whole.elem_count(), size, "{sizes:?}");
            }
            staged.into_iter().for_each(|staged| staging.recycle(staged));
        }
        assert_eq!(staging.free.lock().len(), 3, "no buffer was reallocated");
    }
}
