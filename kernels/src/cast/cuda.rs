//! The launch of `cuda/cast.cu`.

use crate::device::{DeviceError, Grid, Kernel, Launcher, sources::CAST};
use candle_core::{DType, Tensor};

pub(super) fn cast(launcher: &Launcher, source: &Tensor, target: &Tensor) -> Result<(), DeviceError> {
    let name = match source.dtype() {
        DType::BF16 => "cast_bf16_to",
        DType::F16 => "cast_f16_to",
        _ => "cast_f32_to",
    };
    let kernel = Kernel::of_dtype(&CAST, name, target.dtype())?;
    let size = target.elem_count();
    launcher.open([target], [source], |[target], [source]| {
        let args = [target.into(), source.into(), (size as u64).into()];
        // SAFETY: both tensors have `size` elements, of the types that name the kernel.
        unsafe { launcher.launch(&kernel, Grid::tiles(size), &args) }
    })
}
