//! Bytes that a rank holds for parameters, gradients and optimizer state.

use crate::config::ZeroStage;

/// Persistent bytes of one rank by category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeldBytes {
    /// Parameters; in f32 they are the optimizer's master copy as well.
    pub parameters: u64,
    /// Gradients that outlive a layer's backward.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer: u64,
}

impl HeldBytes {
    /// By formula (the table in the folder's README), for f32 with `state_tensors` tensors of
    /// optimizer state (Adam: 2) and `padded_numel` parameter elements over all units.
    pub fn expected(stage: ZeroStage, padded_numel: usize, dp_size: usize, state_tensors: usize) -> Self {
        let bytes = |partitioned: bool| {
            let numel = if partitioned { padded_numel / dp_size } else { padded_numel };
            (numel * size_of::<f32>()) as u64
        };
        Self {
            parameters: bytes(stage.partitions_parameters()),
            gradients: bytes(stage.partitions_gradients()),
            optimizer: state_tensors as u64 * bytes(stage.partitions_optimizer()),
        }
    }

    /// Sum of the categories.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}
