//! Where a rank keeps its state.

use super::ZeroError;
use crate::offload::OffloadFile;
use crate::tensor::TensorOptions;
use std::sync::Arc;

/// Device and element type of a rank's parameters, and the files for what is not in memory between its uses.
/// Files are for the CPU's memory only.
#[derive(Debug, Clone, Default)]
pub struct Storage {
    /// Device of all tensors, element type of the parameters.
    pub options: TensorOptions,
    /// For the partitions of parameters of stage 3.
    pub parameters: Option<Arc<OffloadFile>>,
    /// For optimizer state and master copies.
    pub optimizer: Option<Arc<OffloadFile>>,
}

impl From<TensorOptions> for Storage {
    /// Everything in memory.
    fn from(options: TensorOptions) -> Self {
        Self { options, ..Self::default() }
    }
}

impl Storage {
    /// Waits until everything is written.
    pub(super) fn settle(&self) -> Result<(), ZeroError> {
        let mut files = self.parameters.iter().chain(&self.optimizer);
        Ok(files.try_for_each(|file| file.settle())?)
    }
}
