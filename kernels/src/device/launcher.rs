//! The launcher: the interface of the ops' host code to a device.

use super::address::Opener;
use super::tensor_map::{TensorMap, TiledTensor};
use super::{Address, Arg, DeviceError, Grid, Kernel, Matmul};
use candle_core::Tensor;

/// Runs kernels and matmuls on one device, in the order of the calls.
#[derive(Debug, Clone)]
pub enum Launcher {
    /// Launches nothing, on a [dry](super::dry) thread.
    Dry,
    /// On a GPU, on the device's stream.
    #[cfg(feature = "cuda")]
    Cuda(candle_core::CudaDevice),
}

impl Launcher {
    /// Calls `run` with the addresses of `outputs` and `inputs`. An output must not share its storage with
    /// another tensor of the call; a kernel that works in place may also read it.
    ///
    /// # Errors
    /// A tensor that is not contiguous, on another device or of an element type without kernels; an error of
    /// `run`.
    pub fn open<const O: usize, const I: usize>(
        &self,
        outputs: [&Tensor; O],
        inputs: [&Tensor; I],
        run: impl FnOnce([Address; O], [Address; I]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.open_slices(&outputs, &inputs, |addresses| {
            let (outputs, inputs) = addresses.split_at(O);
            let outputs = std::array::from_fn(|i| outputs[i]);
            run(outputs, std::array::from_fn(|i| inputs[i]))
        })
    }

    /// As [`open`](Self::open), for any number of tensors: first the addresses of `outputs`, then those of
    /// `inputs`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_slices(
        &self,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        run: impl FnOnce(&[Address]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let outputs = outputs.iter().map(|tensor| (true, *tensor));
        let tensors: Vec<_> = outputs.chain(inputs.iter().map(|tensor| (false, *tensor))).collect();
        if self.is_dry() {
            let address = |&(is_writable, tensor): &(bool, &Tensor)| Address {
                pointer: 0,
                dtype: tensor.dtype(),
                is_writable,
            };
            return run(&tensors.iter().map(address).collect::<Vec<_>>());
        }
        let mut run = Some(run);
        self.opener().open_all(&tensors, &mut Vec::new(), &mut |addresses| match run.take() {
            Some(run) => {
                let elements = tensors.iter().map(|(_, tensor)| tensor.elem_count());
                self.with_ranges(addresses.iter().copied().zip(elements), || run(addresses))
            }
            None => Ok(()),
        })
    }

    /// Calls `run`, whose kernels may also access these ranges, of as many elements each: further views of the
    /// storages of opened tensors. Only the fake driver checks it, in tests.
    pub(crate) fn with_ranges<R>(
        &self,
        ranges: impl IntoIterator<Item = (Address, usize)>,
        run: impl FnOnce() -> R,
    ) -> R {
        #[cfg(all(test, feature = "cuda"))]
        let run = || super::fake_driver::with_memory(ranges, run);
        #[cfg(not(all(test, feature = "cuda")))]
        let _ = ranges;
        run()
    }

    /// Starts a kernel. An empty grid does nothing.
    ///
    /// # Safety
    /// The arguments are the kernel's parameters in order, and it accesses only memory within the tensors
    /// that the addresses were opened from, as opened for reading or writing.
    ///
    /// # Errors
    /// A kernel that does not compile or a launch that the driver refuses.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Kernel,
        grid: Grid,
        args: &[Arg<'_>],
    ) -> Result<(), DeviceError> {
        let Some(blocks) = grid.checked(kernel)? else { return Ok(()) };
        match self {
            Self::Dry => {
                let _ = (blocks, args);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's promise is the callee's.
            Self::Cuda(device) => unsafe { super::cuda::launch(device, kernel, blocks, grid, args) },
        }
    }

    /// The map of a contiguous tensor `[sequence, row, head, head_dim]` for tiles of `rows` rows of a head, 64 elements of
    /// each. Nothing can be copied from a tensor without elements.
    ///
    /// # Errors
    /// An address or a size that TMA does not support; an error of the driver.
    pub(crate) fn tensor_map(
        &self,
        address: Address,
        dims: [usize; 4],
        rows: usize,
    ) -> Result<TensorMap, DeviceError> {
        if dims.contains(&0) {
            return Ok(TensorMap::empty());
        }
        let tensor = TiledTensor::new(address, dims, rows);
        let encoded: Result<_, String> = match self {
            Self::Dry => {
                let _ = tensor;
                Ok(TensorMap::empty())
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => super::cuda::encode(device, &tensor),
        };
        encoded.map_err(|message| DeviceError::TensorMap { message })
    }

    /// Starts a batch of matmuls. An empty batch or result does nothing.
    ///
    /// # Safety
    /// All elements that are read or written lie within the tensors that the addresses were opened from.
    /// Those of `c` are opened for writing and overlap neither each other nor an operand.
    ///
    /// # Errors
    /// Matrices that do not fit, unsupported element types, or a failed call.
    pub(crate) unsafe fn gemm(&self, matmul: &Matmul) -> Result<(), DeviceError> {
        let Matmul { a, b, c, batch, .. } = matmul;
        if *batch == 0 || c.rows == 0 || c.cols == 0 {
            return Ok(());
        }
        if a.rows != c.rows || b.cols != c.cols || a.cols != b.rows {
            let message = format!("the result has {} rows and {} columns", c.rows, c.cols);
            return Err(DeviceError::Matmul { a: [a.rows, a.cols], b: [b.rows, b.cols], message });
        }
        match self {
            Self::Dry => Ok(()),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's promise is the callee's.
            Self::Cuda(device) => unsafe { super::cuda::gemm(device, matmul) },
        }
    }

    /// Returns whether this launcher launches nothing.
    pub(crate) fn is_dry(&self) -> bool {
        matches!(self, Self::Dry)
    }

    fn opener(&self) -> Opener {
        match self {
            Self::Dry => Opener {
                #[cfg(feature = "cuda")]
                stream: None,
            },
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => Opener { stream: Some(device.cuda_stream()) },
        }
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use crate::device::{Grid, Kernel, Target, sources};
    use crate::testing::{device, on_a_gpu};
    use candle_core::{DType, Tensor};

    #[test]
    fn a_kernel_gets_the_shared_memory_that_there_is_on_a_gpu() {
        on_a_gpu(|| {
            let Ok(Target::Kernels(launcher)) = Target::of(&device()) else { panic!("a GPU") };
            let kernel = Kernel::new(&sources::ELEMENTWISE, "elementwise_fill_f32");
            let fill = |value: f32, kib: usize| {
                let filled = Tensor::zeros(10, DType::F32, &device()).unwrap();
                let grid = Grid { shared_bytes: kib << 10, ..Grid::blocks(1) };
                let launched = launcher.open([&filled], [], |[at], []| {
                    // SAFETY: the parameters of the kernel; the tensor has 10 elements.
                    unsafe { launcher.launch(&kernel, grid, &[at.into(), value.into(), 10_u64.into()]) }
                });
                launched.map(|()| filled.to_vec1::<f32>().unwrap())
            };
            for (value, kib) in [(1.0, 0), (2.0, 48), (3.0, 100)] {
                assert_eq!(fill(value, kib).unwrap(), [value; 10], "{kib} KiB");
            }
            let refused = fill(4.0, 512).unwrap_err().to_string();
            assert!(refused.starts_with("kernel `elementwise_fill_f32`: "), "{refused}");
            assert!(refused.contains("shared memory"), "{refused}");
        });
    }
}
