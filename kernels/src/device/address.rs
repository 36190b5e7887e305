//! Addresses of tensor elements.

use super::DeviceError;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Storage, Tensor};
use std::cell::Cell;

/// The address of an element on the device, valid while the closure that received it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    pub(super) pointer: u64,
    pub(super) dtype: DType,
    pub(super) is_writable: bool,
}

impl Address {
    /// The null address, for optional parameters.
    pub fn null(dtype: DType) -> Self {
        Self { pointer: 0, dtype, is_writable: false }
    }

    /// The null address, for optional outputs.
    pub fn null_output(dtype: DType) -> Self {
        Self { is_writable: true, ..Self::null(dtype) }
    }

    /// The address of the element that is `elements` further.
    #[must_use]
    pub fn offset(self, elements: usize) -> Self {
        Self { pointer: self.pointer + (elements * self.dtype.size_in_bytes()) as u64, ..self }
    }

    /// The element type.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The address as an integer, for tables of addresses.
    pub fn as_u64(self) -> u64 {
        self.pointer
    }

    /// Returns whether the address is a multiple of `bytes`, and stays one at any multiple of `bytes` further.
    pub fn is_aligned_to(self, bytes: u64) -> bool {
        self.pointer.is_multiple_of(bytes)
    }
}

/// Opens tensors for use on a stream.
pub(super) struct Opener {
    #[cfg(feature = "cuda")]
    pub(super) stream: Option<std::sync::Arc<candle_core::cuda::cudarc::driver::CudaStream>>,
}

/// A tensor, and whether it is opened for writing.
pub(super) type Access<'a> = (bool, &'a Tensor);

impl Opener {
    /// Calls `run` with the addresses of all `tensors`, in order, while their storages are locked. A tensor
    /// that is written must not share its storage with another one: candle's locks would deadlock.
    pub(super) fn open_all(
        &self,
        tensors: &[Access<'_>],
        opened: &mut Vec<Address>,
        run: &mut dyn FnMut(&[Address]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some((&(is_writable, tensor), rest)) = tensors.split_first() else {
            return run(opened);
        };
        let dtype = checked_dtype(tensor)?;
        let mut with = |pointer| {
            opened.push(Address { pointer, dtype, is_writable });
            self.open_all(rest, opened, run)
        };
        if tensor.elem_count() == 0 {
            // candle takes the zero stride of an empty tensor for overlapping elements.
            return with(0);
        }
        if is_writable { self.write(tensor, with) } else { self.read(tensor, with) }
    }

    fn read<R>(
        &self,
        tensor: &Tensor,
        run: impl FnOnce(u64) -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let (storage, layout) = tensor.storage_and_layout();
        let bytes = byte_offset(layout, tensor.dtype());
        match &*storage {
            Storage::Cpu(storage) => run(self.cpu_pointer(storage)? + bytes),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => {
                super::cuda::with_pointer(storage, self.stream()?, |pointer| run(pointer + bytes))
            }
            _ => Err(not_built(tensor)),
        }
    }

    fn write<R>(
        &self,
        tensor: &Tensor,
        run: impl FnOnce(u64) -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let op = OpenOp { opener: self, run: Cell::new(Some(run)), output: Cell::new(None) };
        tensor.inplace_op1(&op)?;
        op.output.into_inner().unwrap_or_else(|| Err(not_built(tensor)))
    }

    /// The address of a tensor on the CPU, which a GPU cannot use.
    fn cpu_pointer(&self, storage: &CpuStorage) -> Result<u64, DeviceError> {
        #[cfg(feature = "cuda")]
        if self.stream.is_some() {
            return Err(DeviceError::MixedDevices);
        }
        Ok(cpu_pointer(storage)?)
    }

    #[cfg(feature = "cuda")]
    fn stream(&self) -> Result<&std::sync::Arc<candle_core::cuda::cudarc::driver::CudaStream>, DeviceError> {
        self.stream.as_ref().ok_or(DeviceError::MixedDevices)
    }
}

fn not_built(tensor: &Tensor) -> DeviceError {
    DeviceError::NotBuilt { device: tensor.device().location(), feature: "cuda" }
}

fn checked_dtype(tensor: &Tensor) -> Result<DType, DeviceError> {
    let got = tensor.dtype();
    let error = |layout| DeviceError::Tensor { expected: "f32, f64, bf16, f16, u32, i64 or u8", got, layout };
    match got {
        _ if !tensor.is_contiguous() => Err(error(", not contiguous")),
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 | DType::U32 | DType::I64 | DType::U8 => Ok(got),
        _ => Err(error("")),
    }
}

fn byte_offset(layout: &Layout, dtype: DType) -> u64 {
    (layout.start_offset() * dtype.size_in_bytes()) as u64
}

fn cpu_pointer(storage: &CpuStorage) -> candle_core::Result<u64> {
    let pointer = match storage {
        CpuStorage::F32(elements) => elements.as_ptr().expose_provenance(),
        CpuStorage::F64(elements) => elements.as_ptr().expose_provenance(),
        CpuStorage::BF16(elements) => elements.as_ptr().expose_provenance(),
        CpuStorage::F16(elements) => elements.as_ptr().expose_provenance(),
        CpuStorage::U32(elements) => elements.as_ptr().expose_provenance(),
        CpuStorage::I64(elements) => elements.as_ptr().expose_provenance(),
        CpuStorage::U8(elements) => elements.as_ptr().expose_provenance(),
        _ => candle_core::bail!("kernels do not support this element type"),
    };
    Ok(pointer as u64)
}

/// candle allows writes to a storage only in in-place ops, and calls these through `&self`.
struct OpenOp<'a, F, R> {
    opener: &'a Opener,
    run: Cell<Option<F>>,
    output: Cell<Option<Result<R, DeviceError>>>,
}

impl<R, F: FnOnce(u64) -> Result<R, DeviceError>> OpenOp<'_, F, R> {
    fn run_at(&self, pointer: u64) {
        if let Some(run) = self.run.take() {
            self.output.set(Some(run(pointer)));
        }
    }
}

impl<R, F: FnOnce(u64) -> Result<R, DeviceError>> InplaceOp1 for OpenOp<'_, F, R> {
    fn name(&self) -> &'static str {
        "kernel output"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let dtype = candle_core::backend::BackendStorage::dtype(storage);
        let pointer = self.opener.cpu_pointer(storage).map_err(candle_core::Error::wrap)?;
        self.run_at(pointer + byte_offset(layout, dtype));
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let dtype = candle_core::backend::BackendStorage::dtype(storage);
        let stream = self.opener.stream().map_err(candle_core::Error::wrap)?;
        super::cuda::with_pointer_mut(storage, stream, |pointer| {
            self.run_at(pointer + byte_offset(layout, dtype));
            Ok(())
        })
        .map_err(candle_core::Error::wrap)
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use crate::device::{DeviceError, Launcher, Target};
    use crate::testing::on_a_gpu;
    use candle_core::{DType, Device, Tensor};

    #[test]
    fn tensors_on_the_cpu_are_not_opened_on_a_gpu() {
        on_a_gpu(|| {
            let device = crate::testing::device();
            let Ok(Target::Kernels(launcher)) = Target::of(&device) else { panic!("a GPU") };
            let here = Tensor::zeros(4, DType::F32, &device).unwrap();
            let elsewhere = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
            let opened = |launcher: &Launcher, [output, input]: [&Tensor; 2]| {
                launcher.open([output], [input], |_, _| Ok(()))
            };
            for tensors in [[&here, &elsewhere], [&elsewhere, &here]] {
                let error = opened(&launcher, tensors).unwrap_err();
                assert!(matches!(error, DeviceError::MixedDevices | DeviceError::Candle(_)), "{error}");
            }
        });
    }
}
