//! A verdict on kernels of a GPU, cached between runs.

use super::kernel::Source;
use candle_core::Device;
use std::fs::File;
use std::path::PathBuf;

/// The file of a verdict: an empty one if nothing is wrong with the kernels, else one that says what.
pub(crate) struct VerdictFile {
    path: PathBuf,
    /// Until it is dropped, other processes that want the verdict wait.
    _lock: File,
}

impl VerdictFile {
    /// The file for these kernels on the device's GPU model with its driver. `None` on the CPU, or without a
    /// cache folder whose files can be locked.
    pub(crate) fn lock(name: &str, kernels: &[&Source], device: &Device) -> Option<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            let path = super::cuda::verdict_path(name, kernels, device).ok().flatten()?;
            let lock = super::cuda::lock(&path)
                .inspect_err(|failure| tracing::debug!(path = %path.display(), %failure, "no lock"));
            return Some(Self { path, _lock: lock.ok()? });
        }
        _ = (name, kernels, device);
        None
    }

    /// The verdict, if there is one: `None` if nothing is wrong.
    pub(crate) fn read(&self) -> Option<Option<String>> {
        let text = std::fs::read_to_string(&self.path).ok()?;
        Some((!text.is_empty()).then_some(text))
    }

    /// Caches a verdict. A failure only means that the next run determines it again.
    pub(crate) fn write(&self, verdict: &Option<String>) {
        #[cfg(feature = "cuda")]
        if let Err(failure) =
            super::cuda::store(&self.path, verdict.as_deref().unwrap_or_default().as_bytes())
        {
            tracing::debug!(path = %self.path.display(), %failure, "a verdict on kernels is not cached");
        }
        _ = verdict;
    }

    /// Removes a verdict, so that the next run determines it again.
    pub(crate) fn remove(&self) {
        _ = std::fs::remove_file(&self.path);
    }
}
