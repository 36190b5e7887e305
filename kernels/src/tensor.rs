//! Access to the elements of CPU candle tensors as plain slices.
//!
//! candle allows writes only through in-place custom ops, while kernels and backends need slices. This module
//! wraps both directions. A tensor must be contiguous (a `narrow` of a flat buffer is). A tensor that is
//! being written must not share storage with one that is read in the same closure: candle has a read-write
//! lock per storage, so the second lock would deadlock.

use crate::device::{dry, explain_allocation};
use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::cell::RefCell;

/// Element types of collectives and kernels.
pub trait Element: WithDType {
    /// The storage's elements, or `None` if it has another type.
    fn storage_slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! element {
    ($($type:ty => $variant:ident),* $(,)?) => {$(
        impl Element for $type {
            fn storage_slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(elements) => Some(elements),
                    _ => None,
                }
            }
        }
    )*};
}

element! {
    u8 => U8, u32 => U32, i64 => I64, f32 => F32, f64 => F64,
    half::bf16 => BF16, half::f16 => F16,
}

/// The element types that ranks may exchange.
pub const DTYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::U32, DType::U8];

/// The names of [`DTYPES`], for error messages.
pub const DTYPE_NAMES: &str = "f32, f64, bf16, f16, i64, u32 or u8";

/// Identifies the storage of a tensor. candle never moves a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageId(usize);

impl StorageId {
    /// The identity of the storage behind `tensor`.
    pub fn of(tensor: &Tensor) -> Self {
        Self(std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0).addr())
    }
}

/// Calls `read` with the elements of a contiguous CPU tensor.
///
/// # Errors
/// When the tensor is not on the CPU, not contiguous or of another dtype.
pub fn with_slice<T: Element, R>(tensor: &Tensor, read: impl FnOnce(&[T]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        bail!("expected a CPU tensor, got one on {:?}", tensor.device().location())
    };
    let elements = T::cpu_storage_as_slice(storage)?;
    Ok(read(&elements[contiguous_range(layout)?]))
}

/// Calls `read` with the elements of several contiguous CPU tensors, in order.
///
/// # Errors
/// As [`with_slice`].
pub fn with_slices<T: Element, R>(tensors: &[&Tensor], read: impl FnOnce(&[&[T]]) -> R) -> Result<R> {
    let locked: Vec<_> = tensors.iter().map(|tensor| tensor.storage_and_layout()).collect();
    let slices = locked.iter().map(|(storage, layout)| {
        let Storage::Cpu(storage) = &**storage else { bail!("expected CPU tensors") };
        Ok(&T::cpu_storage_as_slice(storage)?[contiguous_range(layout)?])
    });
    Ok(read(&slices.collect::<Result<Vec<_>>>()?))
}

/// Calls `write` with the mutable elements of a contiguous CPU tensor.
///
/// # Errors
/// When the tensor is not on the CPU, not contiguous or of another dtype.
pub fn with_slice_mut<T: Element, R>(tensor: &Tensor, write: impl FnOnce(&mut [T]) -> R) -> Result<R> {
    if tensor.elem_count() == 0 {
        // candle takes the zero stride of an empty tensor for overlapping elements.
        return Ok(write(&mut []));
    }
    let op = WriteOp {
        write: RefCell::new(Some(write)),
        output: RefCell::new(None),
        element: std::marker::PhantomData::<T>,
    };
    tensor.inplace_op1(&op)?;
    match op.output.into_inner() {
        Some(output) => Ok(output),
        None => bail!("candle did not run the in-place operation"),
    }
}

/// Calls `read` with the bytes of a contiguous CPU tensor of f32, bf16 or f16 elements.
///
/// # Errors
/// As [`with_slice`].
pub fn with_bytes<R>(tensor: &Tensor, read: impl FnOnce(&[u8]) -> R) -> Result<R> {
    match tensor.dtype() {
        DType::BF16 => with_slice(tensor, |x: &[bf16]| read(bytemuck::cast_slice(x.reinterpret_cast()))),
        DType::F16 => with_slice(tensor, |x: &[f16]| read(bytemuck::cast_slice(x.reinterpret_cast()))),
        _ => with_slice(tensor, |x: &[f32]| read(bytemuck::cast_slice(x))),
    }
}

/// Calls `write` with the mutable bytes of such a tensor.
///
/// # Errors
/// As [`with_slice`].
pub fn with_bytes_mut<R>(tensor: &Tensor, write: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    match tensor.dtype() {
        DType::BF16 => {
            with_slice_mut(tensor, |x: &mut [bf16]| write(bytemuck::cast_slice_mut(x.reinterpret_cast_mut())))
        }
        DType::F16 => {
            with_slice_mut(tensor, |x: &mut [f16]| write(bytemuck::cast_slice_mut(x.reinterpret_cast_mut())))
        }
        _ => with_slice_mut(tensor, |x: &mut [f32]| write(bytemuck::cast_slice_mut(x))),
    }
}

/// Returns bytes as f32 elements.
///
/// # Panics
/// If they are not those of aligned f32 elements.
pub fn f32_elements(bytes: &mut [u8]) -> &mut [f32] {
    bytemuck::cast_slice_mut(bytes)
}

/// Copies a contiguous tensor to a vector. Synchronizes with a GPU. A dry tensor ([`crate::device::dry`])
/// gives zeros.
///
/// # Errors
/// When the tensor is not contiguous or of another dtype.
pub fn to_vec<T: Element>(tensor: &Tensor) -> Result<Vec<T>> {
    if dry::is_tensor(tensor) {
        return Ok(vec![T::zero(); tensor.elem_count()]);
    }
    if tensor.device().is_cpu() {
        return with_slice(tensor, <[T]>::to_vec);
    }
    if tensor.elem_count() == 0 {
        return Ok(Vec::new());
    }
    // candle copies whole storages; of a view, only its own elements are wanted.
    with_slice(&tensor.force_contiguous()?.to_device(&Device::Cpu)?, <[T]>::to_vec)
}

/// Allocates zeros. CUDA cannot allocate zero bytes, so a tensor without elements is a view of one element.
///
/// # Errors
/// A failed allocation.
pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    allocate(shape.into(), dtype, device, |shape| Tensor::zeros(shape, dtype, device))
}

/// Allocates a tensor with **unspecified content**, as `torch.empty`, for a caller that overwrites all of it. An
/// empty one as [`zeros`].
///
/// # Errors
/// A failed allocation.
pub fn empty(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    match device {
        Device::Cuda(_) => allocate(shape.into(), dtype, device, |shape| {
            // SAFETY: a GPU's memory has no invalid values, and the host does not read it before a copy.
            unsafe { Tensor::empty(shape, dtype, device) }
        }),
        // Rust does not allow references to uninitialized memory. The operating system zeroes new pages anyway.
        _ => zeros(shape, dtype, device),
    }
}

fn allocate(
    shape: Shape,
    dtype: DType,
    device: &Device,
    new: impl FnOnce(Shape) -> Result<Tensor>,
) -> Result<Tensor> {
    match shape.elem_count() {
        elements if elements > 0 && dry::is_dry() => dry::tensor(shape, dtype),
        0 => Tensor::zeros(1, dtype, device)?.narrow(0, 0, 0)?.reshape(shape),
        elements => {
            new(shape).map_err(|error| explain_allocation(error, elements * dtype.size_in_bytes(), device))
        }
    }
}

/// Creates a flat tensor of these elements on a device; an empty one as [`zeros`]. Does not synchronize with
/// a GPU.
///
/// # Errors
/// A failed allocation or copy.
pub fn from_slice<T: Element>(elements: &[T], device: &Device) -> Result<Tensor> {
    match (elements.len(), device) {
        (0, _) => zeros(0, T::DTYPE, device),
        #[cfg(feature = "cuda")]
        (_, Device::Cuda(device)) => crate::device::upload(elements, device),
        (len, _) => Tensor::from_slice(elements, len, device),
    }
}

/// A contiguous copy of a tensor.
///
/// # Errors
/// A failed allocation or copy.
pub fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    if !dry::is_tensor(tensor) {
        return tensor.force_contiguous();
    }
    let copy = zeros(tensor.shape(), tensor.dtype(), tensor.device())?;
    dry::report_elementwise([tensor, &copy]);
    Ok(copy)
}

/// Number of bytes of a tensor's elements.
pub fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// Device and element type of a model's tensors.
///
/// Statistics, gradients and optimizer state are always f32.
#[derive(Debug, Clone)]
pub struct TensorOptions {
    /// The device of all tensors.
    pub device: Device,
    /// Element type of parameters and activations: f32, bf16 or f16.
    pub dtype: DType,
}

impl Default for TensorOptions {
    /// f32 on the CPU.
    fn default() -> Self {
        Self { device: Device::Cpu, dtype: DType::F32 }
    }
}

impl TensorOptions {
    /// Allocates zeros for a parameter or an activation.
    ///
    /// # Errors
    /// A failed allocation.
    pub fn zeros(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        zeros(shape, self.dtype, &self.device)
    }

    /// Allocates f32 zeros for a statistic, a gradient or optimizer state.
    ///
    /// # Errors
    /// A failed allocation.
    pub fn zeros_f32(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        zeros(shape, DType::F32, &self.device)
    }
}

fn contiguous_range(layout: &Layout) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        // A view without elements may begin behind the storage.
        _ if layout.shape().elem_count() == 0 => Ok(0..0),
        Some((start, end)) => Ok(start..end),
        None => bail!(
            "expected a contiguous tensor, got strides {:?} for shape {:?}",
            layout.stride(),
            layout.shape()
        ),
    }
}

/// candle calls in-place ops through `&self`, hence the cells around a `FnOnce`.
struct WriteOp<F, R, T> {
    write: RefCell<Option<F>>,
    output: RefCell<Option<R>>,
    element: std::marker::PhantomData<T>,
}

impl<T: Element, R, F: FnOnce(&mut [T]) -> R> InplaceOp1 for WriteOp<F, R, T> {
    fn name(&self) -> &'static str {
        "with_slice_mut"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let dtype = storage.dtype();
        let Some(elements) = T::storage_slice_mut(storage) else {
            bail!("expected elements of type {:?}, the tensor holds {dtype:?}", T::DTYPE)
        };
        let range = contiguous_range(layout)?;
        if let Some(write) = self.write.borrow_mut().take() {
            *self.output.borrow_mut() = Some(write(&mut elements[range]));
        }
        Ok(())
    }
}

trait StorageDType {
    fn dtype(&self) -> candle_core::DType;
}

impl StorageDType for CpuStorage {
    fn dtype(&self) -> candle_core::DType {
        use candle_core::backend::BackendStorage;
        BackendStorage::dtype(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_without_elements_is_a_view_of_one_element() {
        let device = Device::Cpu;
        let views = [zeros((3, 0, 4), DType::BF16, &device), from_slice::<half::bf16>(&[], &device)];
        for (view, dims) in views.into_iter().zip([&[3, 0, 4][..], &[0]]) {
            let view = view.unwrap();
            assert_eq!((view.dims(), view.dtype()), (dims, DType::BF16));
            let Storage::Cpu(CpuStorage::BF16(elements)) = &*view.storage_and_layout().0 else {
                panic!("not on the CPU")
            };
            assert_eq!(elements.len(), 1, "CUDA refuses to allocate nothing");
            assert!(to_vec::<half::bf16>(&view).unwrap().is_empty());
        }
    }

    #[test]
    fn a_view_without_elements_may_begin_behind_its_storage() {
        let view = zeros((0, 3, 4), DType::F32, &Device::Cpu).unwrap().narrow(1, 1, 2).unwrap();
        assert_eq!(view.layout().start_offset(), 4);
        assert_eq!(with_slice(&view, |elements: &[f32]| elements.len()).unwrap(), 0);
        let slices = with_slices(&[&view], |slices: &[&[f32]]| slices[0].len());
        assert_eq!(slices.unwrap(), 0);
    }
}
