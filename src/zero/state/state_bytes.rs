//! Bytes of parameters, gradients and optimizer state per rank, by formula.

use crate::config::ZeroStage;
use candle_core::DType;
use std::ops::Add;

/// Persistent bytes of one rank by category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StateBytes {
    /// Parameters; in f32 they are the master copy too.
    pub parameters: u64,
    /// Gradients that outlive a layer's backward.
    pub gradients: u64,
    /// Optimizer state, and the f32 master copy of 16-bit parameters.
    pub optimizer: u64,
}

impl StateBytes {
    /// Computes the bytes by the formulas of the folder's README. `dtype` is the element type of the
    /// parameters, `state_tensors` the number of optimizer state tensors (Adam: 2), `padded_numel` the number
    /// of parameter elements over all units.
    pub fn expected(
        stage: ZeroStage,
        padded_numel: usize,
        dp_size: usize,
        state_tensors: usize,
        dtype: DType,
    ) -> Self {
        let elements = |partitioned: bool| {
            let numel = if partitioned { padded_numel / dp_size } else { padded_numel };
            numel as u64
        };
        let (element, f32) = (dtype.size_in_bytes() as u64, size_of::<f32>() as u64);
        let f32_copies = state_tensors as u64 + u64::from(dtype != DType::F32);
        Self {
            parameters: element * elements(stage.partitions_parameters()),
            gradients: f32 * elements(stage.partitions_gradients()),
            optimizer: f32_copies * f32 * elements(stage.partitions_optimizer()),
        }
    }

    /// Computes the bytes of frozen parameters, which have no gradients and no optimizer state.
    pub fn expected_frozen(stage: ZeroStage, padded_numel: usize, dp_size: usize, dtype: DType) -> Self {
        let Self { parameters, .. } = Self::expected(stage, padded_numel, dp_size, 0, dtype);
        Self { parameters, ..Self::default() }
    }

    /// The same without what is offloaded at a stage: parameters, or optimizer state with the gradients' partitions.
    #[must_use]
    pub fn without(self, stage: ZeroStage, parameters: bool, optimizer: bool) -> Self {
        let resident = |bytes: u64, offloaded: bool| if offloaded { 0 } else { bytes };
        Self {
            parameters: resident(self.parameters, parameters),
            gradients: resident(self.gradients, optimizer && stage.partitions_gradients()),
            optimizer: resident(self.optimizer, optimizer),
        }
    }

    /// Sum of the categories.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}

impl Add for StateBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            parameters: self.parameters + other.parameters,
            gradients: self.gradients + other.gradients,
            optimizer: self.optimizer + other.optimizer,
        }
    }
}
