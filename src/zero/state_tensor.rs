//! Persistent tensors, resident or offloaded between their uses.

use super::ZeroError;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::memory::{Category, with_category};
use ulysses_kernels::offload::{Extent, OffloadStore};

/// A flat, persistent tensor.
#[derive(Debug, Clone)]
pub(super) enum StateTensor {
    /// In memory on the device that uses it.
    Resident(Tensor),
    /// In the rank's offload store.
    Offloaded(Arc<Slot>),
}

/// An extent of a store, with the properties of its tensor.
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
    /// Stores a tensor: as it is, or offloaded if there is a `store`. First waits for earlier writes.
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

    pub(super) fn device(&self) -> &Device {
        match self {
            Self::Resident(tensor) => tensor.device(),
            Self::Offloaded(slot) => &slot.device,
        }
    }

    pub(super) fn numel(&self) -> usize {
        match self {
            Self::Resident(tensor) => tensor.elem_count(),
            Self::Offloaded(slot) => slot.numel,
        }
    }

    /// The tensor itself, or a copy of an offloaded one. Write changes back with [`put`](Self::put).
    pub(super) fn fetch(&self) -> Result<Tensor, ZeroError> {
        match self {
            Self::Resident(tensor) => Ok(tensor.clone()),
            Self::Offloaded(slot) => slot.store.read(&slot.extent, || slot.empty()),
        }
    }

    /// As [`fetch`](Self::fetch), with unspecified content, for callers that overwrite all elements.
    pub(super) fn blank(&self) -> Result<Tensor, ZeroError> {
        match self {
            Self::Resident(tensor) => Ok(tensor.clone()),
            Self::Offloaded(slot) => slot.empty(),
        }
    }

    /// Starts to load the tensor for a later [`fetch`](Self::fetch).
    pub(super) fn read_ahead(&self) -> Result<(), ZeroError> {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Offloaded(slot) => slot.store.read_ahead(&slot.extent, || slot.empty()),
        }
    }

    /// Writes a fetched tensor back: starts to write an offloaded one, and does nothing for a resident one.
    pub(super) fn put(&self, tensor: Tensor) -> Result<(), ZeroError> {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Offloaded(slot) => Ok(slot.store.write(&slot.extent, tensor)?),
        }
    }
}

/// A range of a persistent tensor.
#[derive(Debug, Clone)]
pub struct StateSlice {
    pub(super) tensor: StateTensor,
    pub(super) elements: Range<usize>,
}

impl StateSlice {
    /// The whole of a tensor.
    #[must_use]
    pub fn whole(tensor: Tensor) -> Self {
        let elements = 0..tensor.elem_count();
        Self { tensor: StateTensor::Resident(tensor), elements }
    }

    /// Returns the elements in f32: a view of a resident f32 tensor, otherwise a copy.
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
