//! The choice of the kernels that compute attention on a GPU.

use super::{AttentionError, AttentionKernels, fused, self_check};
use crate::device::dry;
use candle_core::{DType, Device};

impl AttentionKernels {
    /// The kernels to use on a device for tensors of an element type.
    ///
    /// `Auto` becomes [`Tiled`](Self::Tiled) with a warning if the fused kernels do not agree with the tiled ones on
    /// this GPU. The first call compares both on small problems. The result is cached with the compiled kernels, for
    /// this GPU model, driver and version of the kernels. Attention on the CPU ignores the choice.
    ///
    /// # Errors
    /// `Fused` on the CPU or for an element type without fused kernels; a kernel that fails on the GPU.
    pub fn on(self, device: &Device, dtype: DType) -> Result<Self, AttentionError> {
        match self {
            Self::Tiled => Ok(Self::Tiled),
            Self::Fused => fused::check_support(device, dtype).map(|()| Self::Fused),
            Self::Auto if fused::check_support(device, dtype).is_err() => Ok(Self::Tiled),
            // A plan assumes that they agree.
            Self::Auto if dry::is_dry() => Ok(Self::Auto),
            Self::Auto => match &*self_check::verdict(device, dtype)? {
                None => Ok(Self::Auto),
                Some(disagreement) => {
                    tracing::warn!(
                        "this GPU's fused attention kernels are not used, because they disagree with the tiled kernels: \
                         {disagreement}. Please report this GPU, its driver and this message"
                    );
                    Ok(Self::Tiled)
                }
            },
        }
    }
}
