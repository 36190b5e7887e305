//! The choice of the kernels that compute attention on a GPU.

use super::fused::{self, HEAD_DIMS, HEAD_DIMS_OF_WGMMA};
use super::self_check::{Compared, Reuse};
use super::{AttentionError, AttentionKernels};
use crate::device::{dry, has_wgmma};
use candle_core::{DType, Device};

/// The kernels that [`AttentionKernels::check`] has chosen for a head dimension.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedKernels {
    /// The head dimension.
    pub head_dim: usize,
    /// The best kernels that agree with the tiled ones.
    pub kernels: AttentionKernels,
    /// The largest error of each of their outputs, as a share of what rounding explains; none for `Tiled`.
    pub errors: Vec<(&'static str, f64)>,
    /// Why others are not used: first those with `wgmma`, if the GPU has it.
    pub refused: Vec<String>,
}

/// The kernels of calls by their head dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChosenKernels {
    /// For each of [`HEAD_DIMS`].
    fused: [AttentionKernels; HEAD_DIMS.len()],
    others: AttentionKernels,
}

impl ChosenKernels {
    /// The kernels of calls with this head dimension.
    pub fn for_head_dim(&self, head_dim: usize) -> AttentionKernels {
        let at = HEAD_DIMS.iter().position(|fused| *fused == head_dim);
        at.map_or(self.others, |at| self.fused[at])
    }
}

/// The same for all calls.
impl From<AttentionKernels> for ChosenKernels {
    fn from(kernels: AttentionKernels) -> Self {
        Self { fused: [kernels; HEAD_DIMS.len()], others: kernels }
    }
}

impl AttentionKernels {
    /// The kernels to use on a device for tensors of an element type, by head dimension.
    ///
    /// `Auto` becomes [`Wgmma`](Self::Wgmma) on GPUs of compute capability 9.0. `Wgmma` becomes `Auto`, and `Auto`
    /// becomes [`Tiled`](Self::Tiled), with a warning, if the kernels do not compile, load or start on this GPU, or do
    /// not agree with the tiled ones. The first call compares both on small problems, and runs the fused ones several times
    /// on a problem that fills the GPU, which must give the same bits. Whether they agree is cached with the compiled
    /// kernels, for this GPU model, driver, compiler and version of the kernels. Attention on the CPU ignores the choice.
    ///
    /// # Errors
    /// `Fused` on the CPU or for an element type without fused kernels; a GPU that fails during the comparison.
    pub fn on(self, device: &Device, dtype: DType) -> Result<ChosenKernels, AttentionError> {
        match self {
            Self::Tiled => Ok(Self::Tiled.into()),
            Self::Fused => fused::check_support(device, dtype).map(|()| Self::Fused.into()),
            Self::Auto | Self::Wgmma if fused::check_support(device, dtype).is_err() => {
                Ok(Self::Tiled.into())
            }
            // A plan assumes that they agree.
            Self::Auto | Self::Wgmma if dry::is_dry() => Ok(self.into()),
            Self::Auto | Self::Wgmma => {
                let mut chosen = ChosenKernels::from(Self::Tiled);
                for (head_dim, kernels) in HEAD_DIMS.into_iter().zip(&mut chosen.fused) {
                    let checked = self.choose(device, dtype, head_dim, Reuse::Cached)?;
                    for reason in checked.refused {
                        tracing::warn!("{reason}. Please report this GPU, its driver and this message");
                    }
                    *kernels = checked.kernels;
                }
                Ok(chosen)
            }
        }
    }

    /// Compares the fused kernels with the tiled ones on a GPU again, whatever is cached, and caches the results: one for
    /// each head dimension that has fused kernels.
    ///
    /// # Errors
    /// The CPU or an element type without fused kernels; a GPU that fails during the comparison.
    pub fn check(device: &Device, dtype: DType) -> Result<Vec<CheckedKernels>, AttentionError> {
        fused::check_support(device, dtype)?;
        HEAD_DIMS
            .map(|head_dim| Self::Auto.choose(device, dtype, head_dim, Reuse::Nothing))
            .into_iter()
            .collect()
    }

    fn choose(
        self,
        device: &Device,
        dtype: DType,
        head_dim: usize,
        reuse: Reuse,
    ) -> Result<CheckedKernels, AttentionError> {
        let mut refused = Vec::new();
        let may_use_wgmma =
            HEAD_DIMS_OF_WGMMA.contains(&head_dim) && (self == Self::Wgmma || has_wgmma(device));
        for kernels in [Self::Wgmma, Self::Auto] {
            if kernels == Self::Wgmma && !may_use_wgmma {
                continue;
            }
            let verdict = Compared { kernels, device, dtype, head_dim }.verdict(reuse)?;
            let Some(reason) = &verdict.refusal else {
                return Ok(CheckedKernels { head_dim, kernels, errors: verdict.errors.clone(), refused });
            };
            let which = if kernels == Self::Wgmma { " of compute capability 9.0" } else { "" };
            refused.push(format!(
                "this GPU's fused attention kernels{which} for heads of {head_dim} are not used: {reason}"
            ));
        }
        Ok(CheckedKernels { head_dim, kernels: Self::Tiled, errors: Vec::new(), refused })
    }
}
