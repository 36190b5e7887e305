//! Tensors that outlive a step: in memory, or in a file between their uses.

use super::ZeroError;
use crate::memory::{Category, counted_as};
use crate::offload::{Extent, OffloadFile};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// A flat tensor that is kept.
#[derive(Debug, Clone)]
pub(super) enum Kept {
    /// In memory.
    Resident(Tensor),
    /// In the rank's file.
    Offloaded(Arc<Slot>),
}

/// An extent of a file, and what is in it.
#[derive(Debug)]
pub(super) struct Slot {
    file: Arc<OffloadFile>,
    extent: Extent,
    numel: usize,
    dtype: DType,
    category: Category,
}

impl Slot {
    fn empty(&self) -> Result<Tensor, ZeroError> {
        Ok(counted_as(self.category, || Tensor::zeros(self.numel, self.dtype, &Device::Cpu))?)
    }
}

impl Kept {
    /// Keeps a tensor: where it is, or in the file if there is one. What was written before is settled first.
    pub(super) fn new(
        tensor: Tensor,
        category: Category,
        file: Option<&Arc<OffloadFile>>,
    ) -> Result<Self, ZeroError> {
        let Some(file) = file else { return Ok(Self::Resident(tensor)) };
        file.settle()?;
        let extent = file.reserve(crate::tensor::bytes(&tensor));
        let (numel, dtype) = (tensor.elem_count(), tensor.dtype());
        let kept = Self::Offloaded(Arc::new(Slot { file: file.clone(), extent, numel, dtype, category }));
        kept.put(tensor)?;
        Ok(kept)
    }

    pub(super) fn numel(&self) -> usize {
        match self {
            Self::Resident(tensor) => tensor.elem_count(),
            Self::Offloaded(slot) => slot.numel,
        }
    }

    /// The tensor itself or, of one in the file, a copy: changes count once they are [`put`](Self::put).
    pub(super) fn fetch(&self) -> Result<Tensor, ZeroError> {
        match self {
            Self::Resident(tensor) => Ok(tensor.clone()),
            Self::Offloaded(slot) => {
                let tensor = slot.empty()?;
                slot.file.read(&slot.extent, &tensor)?;
                Ok(tensor)
            }
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
            Self::Offloaded(slot) => Ok(slot.file.read_ahead(&slot.extent)?),
        }
    }

    /// Takes back what was fetched and changed: starts to write it, where it does not stay.
    pub(super) fn put(&self, tensor: Tensor) -> Result<(), ZeroError> {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Offloaded(slot) => Ok(slot.file.write(&slot.extent, tensor)?),
        }
    }
}

/// Part of a tensor that outlives a step.
#[derive(Debug, Clone)]
pub struct KeptPart {
    pub(super) kept: Kept,
    pub(super) elements: Range<usize>,
}

impl KeptPart {
    /// All of a tensor.
    #[must_use]
    pub fn whole(tensor: Tensor) -> Self {
        let elements = 0..tensor.elem_count();
        Self { kept: Kept::Resident(tensor), elements }
    }

    /// The elements in f32: a view where they are in memory in f32, else a copy.
    ///
    /// # Shapes
    /// Flat.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub fn tensor(&self) -> Result<Tensor, ZeroError> {
        let part = self.kept.fetch()?.narrow(0, self.elements.start, self.elements.len())?;
        Ok(part.to_dtype(DType::F32)?)
    }
}
