//! Recycled storage for intermediate tensors.

use super::OpError;
use crate::device::dry;
use crate::memory::{Category, with_default_category};
use crate::tensor::{StorageId, TensorOptions, zeros};
use candle_core::{CpuStorage, DType, Shape, Storage, Tensor};
use parking_lot::Mutex;
use std::collections::HashMap;

/// One rank's store of tensors that are out of use, by element type and count.
///
/// Layers and steps need the same sizes again and again, while fresh memory costs a page fault per 4 KiB.
/// [`alloc`](Self::alloc) hands out a tensor and forgets it; [`recycle`](Self::recycle) brings it back. Activations and
/// their gradients have the element type of the [`TensorOptions`], statistics of tokens are f32
/// ([`alloc_f32`](Self::alloc_f32)).
///
/// **Give back only what nobody else still uses.** The next `take` of that size writes into the same
/// memory, and every clone, view or reshape of the given tensor would see it. A tensor that is dropped
/// instead of given back is merely freed. Debug builds fill given tensors with NaN, so that a use after
/// `give`, or a use of a fresh `take` before it is written, shows.
///
/// No more is kept than was taken: a tensor that comes from elsewhere takes the place of one that was
/// taken and dropped, or is freed. So nothing grows from step to step, whatever layers give back.
#[derive(Debug, Default)]
pub struct Workspace {
    options: TensorOptions,
    shelves: Mutex<HashMap<(DType, usize), Shelf>>,
}

/// The tensors of one size.
#[derive(Debug, Default)]
struct Shelf {
    /// Flat tensors that own their whole storage, none of them twice.
    free: Vec<Tensor>,
    /// Tensors taken and not given back.
    taken: usize,
}

impl Workspace {
    /// An empty workspace for f32 tensors on the CPU.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty workspace for tensors of a device and an element type.
    #[must_use]
    pub fn with_options(options: TensorOptions) -> Self {
        Self { options, shelves: Mutex::default() }
    }

    /// Device and element type of what it hands out.
    pub fn options(&self) -> &TensorOptions {
        &self.options
    }

    /// A contiguous tensor of this shape with **unspecified content**.
    ///
    /// # Errors
    /// When candle cannot allocate.
    pub fn alloc(&self, shape: impl Into<Shape>) -> Result<Tensor, OpError> {
        self.alloc_dtype(shape.into(), self.options.dtype)
    }

    /// As [`alloc`](Self::alloc), of f32 elements whatever the workspace's type.
    ///
    /// # Errors
    /// When candle cannot allocate.
    pub fn alloc_f32(&self, shape: impl Into<Shape>) -> Result<Tensor, OpError> {
        self.alloc_dtype(shape.into(), DType::F32)
    }

    fn alloc_dtype(&self, shape: Shape, dtype: DType) -> Result<Tensor, OpError> {
        let recycled = {
            let mut shelves = self.shelves.lock();
            let shelf = shelves.entry((dtype, shape.elem_count())).or_default();
            shelf.taken += 1;
            shelf.free.pop()
        };
        match recycled {
            Some(flat) => flat.reshape(shape),
            None => {
                with_default_category(Category::Activations, || zeros(shape, dtype, &self.options.device))
            }
        }
        .map_err(|source| OpError::Candle { op: "Workspace::alloc", source })
    }

    /// Takes a tensor back for later [`alloc`](Self::alloc)s; see the type's rule on who may.
    ///
    /// Only a tensor of the workspace's device that covers its whole storage is kept. Others (views of a larger
    /// buffer, transposes, variables) are dropped, and so is one whose storage is here already.
    pub fn recycle(&self, tensor: Tensor) {
        let Some(flat) = whole(&tensor) else { return };
        drop(tensor);
        let mut shelves = self.shelves.lock();
        let key = (flat.dtype(), flat.elem_count());
        let Some(shelf) = shelves.get_mut(&key).filter(|shelf| shelf.taken > 0) else { return };
        let is_same =
            |held: &Tensor| StorageId::of(held) == StorageId::of(&flat) || dry::share_memory(held, &flat);
        if shelf.free.iter().any(is_same) {
            return;
        }
        if cfg!(debug_assertions) && !dry::is_dry() && super::elementwise::fill(&flat, f32::NAN).is_err() {
            return;
        }
        shelf.taken -= 1;
        shelf.free.push(flat);
    }

    /// Bytes of the tensors that wait here.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        let bytes_of =
            |(dtype, elems): &(DType, usize), shelf: &Shelf| elems * shelf.free.len() * dtype.size_in_bytes();
        self.shelves.lock().iter().map(|(key, shelf)| bytes_of(key, shelf)).sum()
    }

    /// Frees all tensors that wait here; those that are given back later are kept as before.
    pub fn trim(&self) {
        self.shelves.lock().values_mut().for_each(|shelf| shelf.free.clear());
    }

    /// Frees all tensors that wait here, and forgets what was taken: what is given back later is freed.
    pub fn clear(&self) {
        self.shelves.lock().clear();
    }
}

/// The tensor flat and on its own, if it covers all of its storage: detached, or a recycled tensor would keep the graph
/// alive that computed it.
fn whole(tensor: &Tensor) -> Option<Tensor> {
    if dry::is_dry() {
        return dry::taken_over(tensor);
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
    fn trimming_frees_what_waits_and_keeps_what_comes_back_later() {
        let workspace = Workspace::new();
        let (waiting, used) = (workspace.alloc(8).unwrap(), workspace.alloc(8).unwrap());
        workspace.recycle(waiting);
        workspace.trim();
        assert_eq!(workspace.free_bytes(), 0);
        workspace.recycle(used);
        assert_eq!(workspace.free_bytes(), 8 * size_of::<f32>());
    }

    #[test]
    fn a_given_tensor_is_taken_again_in_another_shape_of_the_same_size() {
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
    fn storage_is_never_handed_out_twice() {
        let workspace = Workspace::new();
        let tensor = workspace.alloc(8).unwrap();
        let clone = tensor.reshape((2, 4)).unwrap();
        workspace.recycle(tensor);
        workspace.recycle(clone);
        assert_eq!(workspace.free_bytes(), 8 * 4, "the second give of one storage is dropped");
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
    fn views_transposes_other_types_and_variables_are_not_kept() {
        let workspace = Workspace::new();
        let flat = Tensor::zeros(24, DType::F32, &Device::Cpu).unwrap();
        workspace.recycle(flat.narrow(0, 0, 8).unwrap());
        workspace.recycle(flat.narrow(0, 16, 8).unwrap());
        workspace.recycle(flat.reshape((4, 6)).unwrap().t().unwrap());
        workspace.recycle(Tensor::zeros(8, DType::F64, &Device::Cpu).unwrap());
        workspace.recycle(Tensor::zeros(0, DType::F32, &Device::Cpu).unwrap());
        workspace.recycle(candle_core::Var::from_tensor(&flat).unwrap().as_tensor().clone());
        assert_eq!(workspace.free_bytes(), 0);
        assert_eq!(to_vec::<f32>(&flat).unwrap(), [0.0; 24], "what is not kept is not touched");
    }

    #[test]
    fn element_types_have_shelves_of_their_own() {
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
