//! The choice of the kernels that compute attention on a GPU.

use super::{AttentionError, AttentionKernels, fused, self_check};
use crate::device::{dry, has_wgmma};
use candle_core::{DType, Device};

impl AttentionKernels {
    /// The kernels to use on a device for tensors of an element type.
    ///
    /// `Auto` becomes [`Wgmma`](Self::Wgmma) on GPUs of compute capability 9.0. `Wgmma` becomes `Auto`, and `Auto`
    /// becomes [`Tiled`](Self::Tiled), with a warning, if the kernels do not agree with the tiled ones on this GPU. The
    /// first call compares both on small problems. The result is cached with the compiled kernels, for this GPU model,
    /// driver and version of the kernels. Attention on the CPU ignores the choice.
    ///
    /// # Errors
    /// `Fused` on the CPU or for an element type without fused kernels; a kernel that fails on the GPU.
    pub fn on(self, device: &Device, dtype: DType) -> Result<Self, AttentionError> {
        match self {
            Self::Tiled => Ok(Self::Tiled),
            Self::Fused => fused::check_support(device, dtype).map(|()| Self::Fused),
            Self::Auto | Self::Wgmma if fused::check_support(device, dtype).is_err() => Ok(Self::Tiled),
            // A plan assumes that they agree.
            Self::Auto | Self::Wgmma if dry::is_dry() => Ok(self),
            Self::Auto | Self::Wgmma => {
                let is_possible = self == Self::Wgmma || has_wgmma(device);
                if is_possible && Self::Wgmma.agrees(device, dtype)? {
                    return Ok(Self::Wgmma);
                }
                Ok(if Self::Auto.agrees(device, dtype)? { Self::Auto } else { Self::Tiled })
            }
        }
    }

    /// Returns whether these kernels agree with the tiled ones on a GPU; warns if they do not.
    fn agrees(self, device: &Device, dtype: DType) -> Result<bool, AttentionError> {
        let verdict = self_check::verdict(self, device, dtype)?;
        if let Some(disagreement) = &*verdict {
            let which = if self == Self::Wgmma { " of compute capability 9.0" } else { "" };
            tracing::warn!(
                "this GPU's fused attention kernels{which} are not used, because they disagree with the tiled kernels: \
                 {disagreement}. Please report this GPU, its driver and this message"
            );
        }
        Ok(verdict.is_none())
    }
}
