//! The choice between the kernels that compute attention on a GPU.

use super::{AttentionError, fused};
use crate::device::dry;
use candle_core::{DType, Device};

/// The kernels that compute attention on a GPU. The CPU has one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionKernels {
    /// The fused kernels for the calls that they support, the tiled ones for the others.
    Auto,
    /// The fused kernels; a call that they do not support is an error.
    Fused,
    /// Matmuls by cuBLAS, and kernels for the steps in between.
    #[default]
    Tiled,
}

impl AttentionKernels {
    /// The kernels to use on a device for tensors of an element type.
    ///
    /// `Auto` becomes [`Tiled`](Self::Tiled) with a warning if the fused kernels do not agree with the tiled ones on
    /// this GPU. The first call compares both on small problems. The verdict is kept beside the compiled
    /// kernels, for this GPU model, driver and version of the kernels. Attention on the CPU ignores the result.
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
            Self::Auto => match &*fused::verdict(device, dtype)? {
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
