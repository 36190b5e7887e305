//! A verdict on kernels of a GPU, cached between runs.

use super::kernel::Source;
use candle_core::Device;
use std::path::PathBuf;

/// The file of a verdict: an empty one if nothing is wrong with the kernels, else one that says what.
pub(crate) struct VerdictFile(PathBuf);

impl VerdictFile {
    /// The file for these kernels on the device's GPU model with its driver. `None` on the CPU, or without a
    /// cache folder.
    pub(crate) fn new(name: &str, kernels: &[&Source], device: &Device) -> Option<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            return super::cuda::verdict_path(name, kernels, device).ok().flatten().map(Self);
        }
        _ = (name, kernels, device);
        None
    }

    /// The verdict, if there is one: `None` if nothing is wrong.
    pub(crate) fn read(&self) -> Option<Option<String>> {
        let text = std::fs::read_to_string(&self.0).ok()?;
        Some((!text.is_empty()).then_some(text))
    }

    /// Caches a verdict. A failure only means that the next run determines it again.
    pub(crate) fn write(&self, verdict: &Option<String>) {
        #[cfg(feature = "cuda")]
        if let Err(failure) = super::cuda::store(&self.0, verdict.as_deref().unwrap_or_default().as_bytes()) {
            tracing::debug!(path = %self.0.display(), %failure, "a verdict on kernels is not cached");
        }
        _ = verdict;
    }
}
