//! Maps of tensors for copies by TMA.

use crate::device::tensor_map::{TensorMap, TiledTensor};
use candle_core::cuda::cudarc::driver::sys::{self, CUtensorMapDataType};
use candle_core::{CudaDevice, DType};

/// Makes the map of a tensor, whose tiles are swizzled as `wgmma` reads them. Elements outside become 0.
pub(in crate::device) fn encode(device: &CudaDevice, tensor: &TiledTensor) -> Result<TensorMap, String> {
    let TiledTensor { address, extents, strides, tile } = tensor;
    let dtype = match address.dtype {
        DType::BF16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    // The call needs a context.
    device.cuda_stream().context().bind_to_thread().map_err(|failure| failure.to_string())?;
    let mut map = TensorMap::empty();
    // SAFETY: a map of CUDA's size and alignment; arrays of four, or of three strides. The address is only stored.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr().cast(),
            dtype,
            extents.len() as u32,
            std::ptr::with_exposed_provenance_mut(address.pointer as usize),
            extents.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            [1; 4].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    result.result().map(|()| map).map_err(|failure| format!("a tensor of {extents:?} elements: {failure}"))
}
