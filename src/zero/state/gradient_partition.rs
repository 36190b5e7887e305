//! The reduced gradient of a partition, accumulated over micro steps.

use super::state_tensor::StateTensor;
use crate::placement::ledger::{self, Placed};
use crate::zero::ZeroError;
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;
use ulysses_kernels::memory::Category;
use ulysses_kernels::offload::OffloadStore;
use ulysses_kernels::{elementwise, strided_copy};

/// The gradient of one rank's partition of a unit, in f32: resident, or offloaded with the optimizer state.
#[derive(Debug)]
pub(in crate::zero) struct GradientPartition {
    stored: StateTensor,
    content: Content,
}

/// The meaning of the stored elements.
#[derive(Debug)]
enum Content {
    /// The gradient is zero, whatever is stored. So the first micro step overwrites what is stored, without loading it.
    Zero,
    /// The gradient is what is stored.
    Stored {
        /// Σ g² of an offloaded gradient that is complete, so that the norm need not load it.
        sum_of_squares: Option<f64>,
    },
}

impl GradientPartition {
    /// Allocates zeros, in the `store` if there is one.
    pub(in crate::zero) fn zeros(
        numel: usize,
        device: &Device,
        store: Option<&Arc<OffloadStore>>,
    ) -> Result<Self, ZeroError> {
        let zeros = ulysses_kernels::tensor::zeros(numel, DType::F32, device)?;
        let stored = StateTensor::new(zeros, Category::Gradients, store)?;
        Ok(Self { stored, content: Content::Zero })
    }

    fn is_zero(&self) -> bool {
        matches!(self.content, Content::Zero)
    }

    pub(in crate::zero) fn device(&self) -> &Device {
        self.stored.device()
    }

    /// Sets the gradient to zero, for the next accumulation.
    pub(in crate::zero) fn set_to_zero(&mut self) {
        self.content = Content::Zero;
    }

    /// The gradient itself, or a copy of an offloaded one.
    pub(in crate::zero) fn fetch(&self) -> Result<Tensor, ZeroError> {
        if !self.is_zero() {
            return self.stored.fetch();
        }
        let zeros = self.stored.blank()?;
        elementwise::fill(&zeros, 0.0)?;
        Ok(zeros)
    }

    /// The stored gradient.
    pub(in crate::zero) fn stored(&self) -> Result<StateTensor, ZeroError> {
        if self.is_zero() { Ok(StateTensor::Resident(self.fetch()?)) } else { Ok(self.stored.clone()) }
    }

    /// Starts to load an offloaded gradient for a later [`fetch`](Self::fetch) or [`plus`](Self::plus).
    pub(in crate::zero) fn read_ahead(&self) -> Result<(), ZeroError> {
        if self.is_zero() { Ok(()) } else { self.stored.read_ahead() }
    }

    /// The sum with a reduced micro step, to be [stored](Self::put).
    pub(in crate::zero) fn plus(&self, received: Tensor) -> Result<Tensor, ZeroError> {
        if !self.is_zero() {
            let sum = self.stored.fetch()?;
            elementwise::accumulate(&sum, &received)?;
            ledger::add(&received, &sum)?;
            return Ok(sum);
        }
        match &self.stored {
            StateTensor::Resident(sum) => {
                strided_copy::copy(&received, sum)?;
                ledger::copy(&received, sum)?;
                Ok(sum.clone())
            }
            StateTensor::Offloaded(_) => Ok(received),
        }
    }

    /// Stores a sum; starts to write an offloaded one. `is_complete` says that no further micro step follows.
    pub(in crate::zero) fn put(&mut self, sum: Tensor, is_complete: bool) -> Result<(), ZeroError> {
        let has_left = is_complete && matches!(self.stored, StateTensor::Offloaded(_));
        let sum_of_squares = has_left.then(|| elementwise::sum_of_squares(&sum)).transpose()?;
        self.content = Content::Stored { sum_of_squares };
        self.stored.put(sum)
    }

    /// The placements of the gradient in a dry run, unless it is zero.
    pub(in crate::zero) fn placed(&self) -> Option<Placed> {
        if self.is_zero() { None } else { self.stored.placed() }
    }

    /// Writes back a fetched gradient that an update has overwritten.
    pub(in crate::zero) fn put_overwritten(&self, gradient: Tensor) -> Result<(), ZeroError> {
        self.stored.put(gradient)
    }

    /// Σ g² if it is known without loading the gradient.
    pub(in crate::zero) fn known_sum_of_squares(&self) -> Option<f64> {
        match self.content {
            Content::Zero => Some(0.0),
            Content::Stored { sum_of_squares } => sum_of_squares,
        }
    }
}
