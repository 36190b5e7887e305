//! Where a rank keeps its state.

use super::ZeroError;
use std::sync::Arc;
use ulysses_kernels::offload::OffloadStore;
use ulysses_kernels::tensor::TensorOptions;

/// Device and element type of a rank's parameters, and the stores of what is not on the device between its uses.
#[derive(Debug, Clone, Default)]
pub struct Storage {
    /// Device of all tensors, element type of the parameters.
    pub options: TensorOptions,
    /// For the partitions of parameters of stage 3.
    pub parameters: Option<Arc<OffloadStore>>,
    /// For optimizer state and master copies.
    pub optimizer: Option<Arc<OffloadStore>>,
}

impl From<TensorOptions> for Storage {
    /// Everything in memory.
    fn from(options: TensorOptions) -> Self {
        Self { options, ..Self::default() }
    }
}

impl Storage {
    /// Lets what follows come after everything that is being written, and frees what was.
    pub(super) fn settle(&self) -> Result<(), ZeroError> {
        let mut stores = self.parameters.iter().chain(&self.optimizer);
        Ok(stores.try_for_each(|store| store.settle())?)
    }
}
