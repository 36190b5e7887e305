//! A verdict on kernels of a GPU, cached between runs.

use super::kernel::Source;
use candle_core::Device;
use std::fs::File;
use std::path::PathBuf;

/// The file of a verdict: an empty one if nothing is wrong with the kernels, else one that says what.
pub(crate) struct VerdictFile {
    path: PathBuf,
    lock: Option<File>,
}

impl VerdictFile {
    /// The file for these kernels on the device's GPU model with its driver. `None` on the CPU, or without a
    /// cache folder.
    pub(crate) fn new(name: &str, kernels: &[&Source], device: &Device) -> Option<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            let path = super::cuda::verdict_path(name, kernels, device).ok().flatten()?;
            return Some(Self { path, lock: None });
        }
        _ = (name, kernels, device);
        None
    }

    /// Waits until no other process has locked the file, and locks it until this value is dropped. Returns whether it is
    /// locked: not all file systems can.
    pub(crate) fn lock(&mut self) -> bool {
        #[cfg(feature = "cuda")]
        {
            self.lock = super::cuda::lock(&self.path)
                .inspect_err(|failure| tracing::debug!(path = %self.path.display(), %failure, "not locked"))
                .ok();
        }
        self.lock.is_some()
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

    /// Caches what `read` returned before.
    pub(crate) fn restore(&self, earlier: &Option<Option<String>>) {
        match earlier {
            Some(verdict) => self.write(verdict),
            None => _ = std::fs::remove_file(&self.path),
        }
    }
}
