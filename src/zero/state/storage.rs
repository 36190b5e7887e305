//! The storage of a rank's state.

use crate::config::{CommunicationDtype, ZeroStage};
use crate::zero::ZeroError;
use std::sync::Arc;
use ulysses_kernels::offload::OffloadStore;
use ulysses_kernels::tensor::TensorOptions;

/// Device and element types of a rank's parameters and of sent gradients, and the stores of offloaded tensors.
#[derive(Debug, Clone, Default)]
pub struct Storage {
    /// Device of all tensors, and element type of the parameters.
    pub options: TensorOptions,
    /// The dtype in which gradients are sent to be summed.
    pub gradient_dtype: CommunicationDtype,
    /// Store for the parameter partitions of stage 3.
    pub parameters: Option<Arc<OffloadStore>>,
    /// Store for optimizer state and master copies, and for the gradient partitions of stages 2 and 3.
    pub optimizer: Option<Arc<OffloadStore>>,
}

impl From<TensorOptions> for Storage {
    /// Without offload.
    fn from(options: TensorOptions) -> Self {
        Self { options, ..Self::default() }
    }
}

impl Storage {
    /// The store for gradients at a stage.
    pub(in crate::zero) fn gradients(&self, stage: ZeroStage) -> Option<&Arc<OffloadStore>> {
        self.optimizer.as_ref().filter(|_| stage.partitions_gradients())
    }

    /// Waits for pending writes and frees their tensors.
    pub(in crate::zero) fn settle(&self) -> Result<(), ZeroError> {
        let mut stores = self.parameters.iter().chain(&self.optimizer);
        Ok(stores.try_for_each(|store| store.settle())?)
    }
}
