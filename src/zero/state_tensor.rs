//! Tensors that outlive a step: where they are used, or in a store between their uses.

use super::ZeroError;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::memory::{Category, with_category};
use ulysses_kernels::offload::{Extent, OffloadStore};

/// A flat tensor that is kept.
#[derive(Debug, Clone)]
pub(super) enum StateTensor {
    /// Where it is used.
    Resident(Tensor),
    /// In the rank's store.
    Offloaded(Arc<Slot>),
}

/// An extent of a store, and what is in it.
#[derive(Debug)]
pub(super) struct Slot {
    store: Arc<OffloadStore>,
    extent: Extent,
    numel: usize,
    dtype: DType,
    device: Device,
    category: Category,
}

impl Slot {
    fn empty(&self) -> Result<Tensor, ZeroError> {
        Ok(with_category(self.category, || {
            ulysses_kernels::tensor::zeros(self.numel, self.dtype, &self.device)
        })?)
    }
}

impl StateTensor {
    /// Keeps a tensor: where it is, or in the store if there is one. What was written before is settled first.
    pub(super) fn new(
        tensor: Tensor,
        category: Category,
        store: Option<&Arc<OffloadStore>>,
    ) -> Result<Self, ZeroError> {
        let Some(store) = store else { return Ok(Self::Resident(tensor)) };
        store.settle()?;
        let extent = store.reserve(ulysses_kernels::tensor::bytes(&tensor));
        let (numel, dtype, device) = (tensor.elem_count(), tensor.dtype(), tensor.device().clone());
        let slot = Slot { store: store.clone(), extent, numel, dtype, device, category };
        let stored = Self::Offloaded(Arc::new(slot));
        stored.put(tensor)?;
        Ok(stored)
    }

    pub(super) fn numel(&self) -> usize {
        match self {
            Self::Resident(tensor) => tensor.elem_count(),
            Self::Offloaded(slot) => slot.numel,
        }
    }

    /// The tensor itself or, of one in the store, a copy: changes count once they are [`put`](Self::put).
    pub(super) fn fetch(&self) -> Result<Tensor, ZeroError> {
        match self {
            Self::Resident(tensor) => Ok(tensor.clone()),
            Self::Offloaded(slot) => slot.store.read(&slot.extent, || slot.empty()),
        }
    }

    /// As [`fetch`](Self::fetch) where all elements will be overwritten.
    pub(super) fn blank(&self) -> Result<Tensor, ZeroError> {
        match self {
            Self::Resident(tensor) => Ok(tensor.clone()),
            Self::Offloaded(slot) => slot.empty(),
        }
    }

    /// Starts to fetch what will be needed soon.
    pub(super) fn read_ahead(&self) -> Result<(), ZeroError> {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Offloaded(slot) => slot.store.read_ahead(&slot.extent, || slot.empty()),
        }
    }

    /// Takes back what was fetched and changed: starts to write it, where it does not stay.
    pub(super) fn put(&self, tensor: Tensor) -> Result<(), ZeroError> {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Offloaded(slot) => Ok(slot.store.write(&slot.extent, tensor)?),
        }
    }
}

/// Part of a tensor that outlives a step.
#[derive(Debug, Clone)]
pub struct StateSlice {
    pub(super) tensor: StateTensor,
    pub(super) elements: Range<usize>,
}

impl StateSlice {
    /// All of a tensor.
    #[must_use]
    pub fn whole(tensor: Tensor) -> Self {
        let elements = 0..tensor.elem_count();
        Self { tensor: StateTensor::Resident(tensor), elements }
    }

    /// The elements in f32: a view where they are in memory in f32, else a copy.
    ///
    /// # Shapes
    /// Flat.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub fn tensor(&self) -> Result<Tensor, ZeroError> {
        let part = self.tensor.fetch()?.narrow(0, self.elements.start, self.elements.len())?;
        Ok(part.to_dtype(DType::F32)?)
    }
}
