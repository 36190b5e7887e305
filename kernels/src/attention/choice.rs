//! The choice of the kernels that compute attention on a GPU.

use super::self_check::{self, Reuse};
use super::{AttentionError, AttentionKernels, fused};
use crate::device::{dry, has_wgmma};
use candle_core::{DType, Device};

/// The kernels that [`AttentionKernels::check`] has chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedKernels {
    /// The best kernels that agree with the tiled ones.
    pub kernels: AttentionKernels,
    /// Why others are not used: first those with `wgmma`, if the GPU has it.
    pub refused: Vec<String>,
}

impl AttentionKernels {
    /// The kernels to use on a device for tensors of an element type.
    ///
    /// `Auto` becomes [`Wgmma`](Self::Wgmma) on GPUs of compute capability 9.0. `Wgmma` becomes `Auto`, and `Auto`
    /// becomes [`Tiled`](Self::Tiled), with a warning, if the kernels do not compile, load or start on this GPU, or do
    /// not agree with the tiled ones. The first call compares both on small problems. Whether they agree is cached with
    /// the compiled kernels, for this GPU model, driver, compiler and version of the kernels. Attention on the CPU
    /// ignores the choice.
    ///
    /// # Errors
    /// `Fused` on the CPU or for an element type without fused kernels; a GPU that fails during the comparison.
    pub fn on(self, device: &Device, dtype: DType) -> Result<Self, AttentionError> {
        match self {
            Self::Tiled => Ok(Self::Tiled),
            Self::Fused => fused::check_support(device, dtype).map(|()| Self::Fused),
            Self::Auto | Self::Wgmma if fused::check_support(device, dtype).is_err() => Ok(Self::Tiled),
            // A plan assumes that they agree.
            Self::Auto | Self::Wgmma if dry::is_dry() => Ok(self),
            Self::Auto | Self::Wgmma => {
                let checked = self.choose(device, dtype, Reuse::Cached)?;
                for reason in checked.refused {
                    tracing::warn!("{reason}. Please report this GPU, its driver and this message");
                }
                Ok(checked.kernels)
            }
        }
    }

    /// Compares the fused kernels with the tiled ones on a GPU again, whatever is cached, and caches the result.
    ///
    /// # Errors
    /// The CPU or an element type without fused kernels; a GPU that fails during the comparison.
    pub fn check(device: &Device, dtype: DType) -> Result<CheckedKernels, AttentionError> {
        fused::check_support(device, dtype)?;
        Self::Auto.choose(device, dtype, Reuse::Nothing)
    }

    fn choose(self, device: &Device, dtype: DType, reuse: Reuse) -> Result<CheckedKernels, AttentionError> {
        let mut refused = Vec::new();
        for kernels in [Self::Wgmma, Self::Auto] {
            if kernels == Self::Wgmma && self != Self::Wgmma && !has_wgmma(device) {
                continue;
            }
            match self_check::verdict(kernels, device, dtype, reuse)?.as_deref() {
                None => return Ok(CheckedKernels { kernels, refused }),
                Some(reason) => {
                    let which = if kernels == Self::Wgmma { " of compute capability 9.0" } else { "" };
                    refused.push(format!("this GPU's fused attention kernels{which} are not used: {reason}"));
                }
            }
        }
        Ok(CheckedKernels { kernels: Self::Tiled, refused })
    }
}
