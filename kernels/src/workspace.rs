//! Recycled storage for intermediate tensors.

use super::OpError;
use crate::device::dry;
use crate::memory::{Category, with_default_category};
use crate::tensor::{StorageId, TensorOptions, empty};
use candle_core::{CpuStorage, DType, Shape, Storage, Tensor};
use parking_lot::Mutex;
use std::collections::HashMap;

/// A rank's cache of unused tensors, by element type and count.
///
/// Layers and steps need the same sizes again and again, while fresh memory costs a page fault per 4 KiB.
/// [`alloc`](Self::alloc) returns a cached or a new tensor; [`recycle`](Self::recycle) returns it to the
/// cache. Activations and their gradients have the element type of the [`TensorOptions`]; statistics per
/// token are f32 ([`alloc_f32`](Self::alloc_f32)).
///
/// **Recycle only tensors without other users.** The next `alloc` of that size writes to the same memory,
/// which every clone, view or reshape of the tensor would see. A tensor that is dropped instead is freed.
/// Debug builds fill recycled tensors with NaN, so that a use after `recycle`, or a read of a new tensor
/// before a write, shows.
///
/// The cache never holds more tensors of a size than were allocated. A recycled tensor from elsewhere
/// replaces one that was allocated and dropped, or is freed. So the cache does not grow from step to step.
#[derive(Debug, Default)]
pub struct Workspace {
    options: TensorOptions,
    free_lists: Mutex<HashMap<(DType, usize), FreeList>>,
}

/// The tensors of one size.
#[derive(Debug, Default)]
struct FreeList {
    /// Flat tensors that own their whole storage, without duplicates.
    free: Vec<Tensor>,
    /// Number of tensors that were allocated and not recycled.
    allocated: usize,
}

impl Workspace {
    /// Creates an empty workspace for f32 tensors on the CPU.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty workspace for tensors of the given device and element type.
    #[must_use]
    pub fn with_options(options: TensorOptions) -> Self {
        Self { options, free_lists: Mutex::default() }
    }

    /// Device and element type of its tensors.
    pub fn options(&self) -> &TensorOptions {
        &self.options
    }

    /// Returns a contiguous tensor of this shape with **unspecified content**.
    ///
    /// # Errors
    /// When candle cannot allocate.
    pub fn alloc(&self, shape: impl Into<Shape>) -> Result<Tensor, OpError> {
        self.alloc_dtype(shape.into(), self.options.dtype)
    }

    /// As [`alloc`](Self::alloc), always with f32 elements.
    ///
    /// # Errors
    /// When candle cannot allocate.
    pub fn alloc_f32(&self, shape: impl Into<Shape>) -> Result<Tensor, OpError> {
        self.alloc_dtype(shape.into(), DType::F32)
    }

    fn alloc_dtype(&self, shape: Shape, dtype: DType) -> Result<Tensor, OpError> {
        let recycled = {
            let mut free_lists = self.free_lists.lock();
            let list = free_lists.entry((dtype, shape.elem_count())).or_default();
            list.allocated += 1;
            list.free.pop()
        };
        match recycled {
            Some(flat) => flat.reshape(shape),
            None => {
                with_default_category(Category::Activations, || empty(shape, dtype, &self.options.device))
            }
        }
        .map_err(|source| OpError::Candle { op: "Workspace::alloc", source })
    }

    /// Caches a tensor for later calls of [`alloc`](Self::alloc); see the rule above.
    ///
    /// Only tensors on the workspace's device that cover their whole storage are cached. Others (views of a
    /// larger buffer, transposes, variables, duplicates) are dropped.
    pub fn recycle(&self, tensor: Tensor) {
        let Some(flat) = whole(&tensor) else { return };
        drop(tensor);
        let mut free_lists = self.free_lists.lock();
        let key = (flat.dtype(), flat.elem_count());
        let Some(list) = free_lists.get_mut(&key).filter(|list| list.allocated > 0) else { return };
        let is_same = |cached: &Tensor| {
            StorageId::of(cached) == StorageId::of(&flat) || dry::share_memory(cached, &flat)
        };
        if list.free.iter().any(is_same) {
            return;
        }
        if cfg!(debug_assertions) && !dry::is_dry() && super::elementwise::fill(&flat, f32::NAN).is_err() {
            return;
        }
        list.allocated -= 1;
        list.free.push(flat);
    }

    /// Bytes of the cached tensors.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        let bytes_of = |(dtype, elems): &(DType, usize), list: &FreeList| {
            elems * list.free.len() * dtype.size_in_bytes()
        };
        self.free_lists.lock().iter().map(|(key, list)| bytes_of(key, list)).sum()
    }

    /// Frees all cached tensors. Tensors that are recycled later are cached as before.
    pub fn trim(&self) {
        self.free_lists.lock().values_mut().for_each(|list| list.free.clear());
    }

    /// Frees all cached tensors and resets the counts, so that tensors that are recycled later are freed.
    pub fn clear(&self) {
        self.free_lists.lock().clear();
    }
}

/// The tensor, flat and detached, if it covers its whole storage. Detached, since a cached tensor would
/// otherwise keep its autograd graph alive.
fn whole(tensor: &Tensor) -> Option<Tensor> {
    if dry::is_dry() {
        return dry::take_over(tensor);
    }
    let covers = !tensor.is_variable() && covers_its_storage(tensor);
    covers.then(|| tensor.detach().flatten_all().ok()).flatten()
}

fn covers_its_storage(tensor: &Tensor) -> bool {
    let (storage, layout) = tensor.storage_and_layout();
    let elements = match &*storage {
        Storage::Cpu(CpuStorage::F32(elements)) => elements.len(),
        Storage::Cpu(CpuStorage::BF16(elements)) => elements.len(),
        Storage::Cpu(CpuStorage::F16(elements)) => elements.len(),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => crate::device::cuda_elements(storage),
        _ => 0,
    };
    elements > 0 && layout.contiguous_offsets() == Some((0, elements))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{to_vec, with_slice};
    use candle_core::Device;

    fn address(tensor: &Tensor) -> usize {
        with_slice(tensor, |elements: &[f32]| elements.as_ptr().addr()).unwrap()
    }

    #[test]
    fn trimming_frees_cached_tensors_and_caches_later_ones() {
        let workspace = Workspace::new();
        let (cached, used) = (workspace.alloc(8).unwrap(), workspace.alloc(8).unwrap());
        workspace.recycle(cached);
        workspace.trim();
        assert_eq!(workspace.free_bytes(), 0);
        workspace.recycle(used);
        assert_eq!(workspace.free_bytes(), 8 * size_of::<f32>());
    }

    #[test]
    fn a_recycled_tensor_is_reused_in_another_shape_of_the_same_size() {
        let workspace = Workspace::new();
        let first = workspace.alloc((4, 6)).unwrap();
        let place = address(&first);
        workspace.recycle(first);
        assert_eq!(workspace.free_bytes(), 24 * 4);
        let second = workspace.alloc((2, 3, 4)).unwrap();
        assert_eq!(second.dims(), [2, 3, 4]);
        assert_eq!(address(&second), place);
        assert_eq!(workspace.free_bytes(), 0);
    }

    #[test]
    fn storage_is_never_allocated_twice() {
        let workspace = Workspace::new();
        let tensor = workspace.alloc(8).unwrap();
        let clone = tensor.reshape((2, 4)).unwrap();
        workspace.recycle(tensor);
        workspace.recycle(clone);
        assert_eq!(workspace.free_bytes(), 8 * 4, "the second recycle of one storage is dropped");
        let (a, b, c) =
            (workspace.alloc(8).unwrap(), workspace.alloc(8).unwrap(), workspace.alloc((2, 4)).unwrap());
        assert_ne!(address(&a), address(&b));
        assert_ne!(address(&a), address(&c));
        assert_ne!(address(&b), address(&c));
    }

    #[test]
    fn another_size_does_not_reuse_storage() {
        let workspace = Workspace::new();
        workspace.recycle(workspace.alloc(8).unwrap());
        assert_eq!(workspace.alloc(7).unwrap().elem_count(), 7);
        assert_eq!(workspace.free_bytes(), 8 * 4);
        workspace.clear();
        assert_eq!(workspace.free_bytes(), 0);
    }

    #[test]
    fn views_transposes_other_types_and_variables_are_not_cached() {
        let workspace = Workspace::new();
        let flat = Tensor::zeros(24, DType::F32, &Device::Cpu).unwrap();
        workspace.recycle(flat.narrow(0, 0, 8).unwrap());
        workspace.recycle(flat.narrow(0, 16, 8).unwrap());
        workspace.recycle(flat.reshape((4, 6)).unwrap().t().unwrap());
        workspace.recycle(Tensor::zeros(8, DType::F64, &Device::Cpu).unwrap());
        workspace.recycle(Tensor::zeros(0, DType::F32, &Device::Cpu).unwrap());
        workspace.recycle(candle_core::Var::from_tensor(&flat).unwrap().as_tensor().clone());
        assert_eq!(workspace.free_bytes(), 0);
        assert_eq!(to_vec::<f32>(&flat).unwrap(), [0.0; 24], "what is not cached is unchanged");
    }

    #[test]
    fn element_types_have_separate_free_lists() {
        let options = TensorOptions { dtype: DType::BF16, ..TensorOptions::default() };
        let workspace = Workspace::with_options(options);
        let (activation, statistic) = (workspace.alloc(5).unwrap(), workspace.alloc_f32(5).unwrap());
        assert_eq!((activation.dtype(), statistic.dtype()), (DType::BF16, DType::F32));
        workspace.recycle(activation);
        workspace.recycle(statistic);
        assert_eq!(workspace.free_bytes(), 5 * 2 + 5 * 4);
        assert_eq!(workspace.alloc(5).unwrap().dtype(), DType::BF16);
        assert_eq!(workspace.free_bytes(), 5 * 4);
    }

    #[test]
    fn a_workspace_may_move_between_threads_and_be_shared() {
        fn is_send_and_sync<T: Send + Sync>() {}
        is_send_and_sync::<Workspace>();
    }
}
