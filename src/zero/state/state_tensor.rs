//! Persistent tensors, resident or offloaded between their uses.

use crate::placement::ledger::{self, Placed};
use crate::zero::ZeroError;
use candle_core::{DType, Device, Tensor};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::memory::{Category, with_category};
use ulysses_kernels::offload::{Extent, ExtentSlice, OffloadError, OffloadStore};

/// A flat, persistent tensor.
#[derive(Debug, Clone)]
pub(in crate::zero) enum StateTensor {
    /// In memory on the device that uses it.
    Resident(Tensor),
    /// In the rank's offload store.
    Offloaded(Arc<Slot>),
}

/// An extent of a store, with the properties of its tensor.
#[derive(Debug)]
pub(in crate::zero) struct Slot {
    store: Arc<OffloadStore>,
    extent: Extent,
    numel: usize,
    dtype: DType,
    device: Device,
    category: Category,
    /// The placements of the tensor in a dry run.
    placed: Mutex<Option<Placed>>,
}

/// Consecutive elements of a slot.
pub(in crate::zero) struct SlotSlice {
    slot: Arc<Slot>,
    elements: Range<usize>,
}

impl SlotSlice {
    fn bytes(&self) -> ExtentSlice<'_> {
        let size = self.slot.dtype.size_in_bytes();
        self.slot.extent.slice(self.elements.start * size..self.elements.end * size)
    }
}

impl Slot {
    /// Reserves an extent for a tensor like this one.
    fn like(tensor: &Tensor, category: Category, store: &Arc<OffloadStore>) -> Self {
        let extent = store.reserve(ulysses_kernels::tensor::bytes(tensor));
        let (numel, dtype, device) = (tensor.elem_count(), tensor.dtype(), tensor.device().clone());
        Self { store: store.clone(), extent, numel, dtype, device, category, placed: Mutex::default() }
    }

    fn empty(&self) -> Result<Tensor, ZeroError> {
        Ok(with_category(self.category, || {
            ulysses_kernels::tensor::zeros(self.numel, self.dtype, &self.device)
        })?)
    }
}

impl StateTensor {
    /// Stores a tensor: as it is, or offloaded if there is a `store`. First waits for earlier writes.
    pub(in crate::zero) fn new(
        tensor: Tensor,
        category: Category,
        store: Option<&Arc<OffloadStore>>,
    ) -> Result<Self, ZeroError> {
        let Some(store) = store else { return Ok(Self::Resident(tensor)) };
        store.settle()?;
        let stored = Self::Offloaded(Arc::new(Slot::like(&tensor, category, store)));
        stored.put(tensor)?;
        Ok(stored)
    }

    pub(in crate::zero) fn device(&self) -> &Device {
        match self {
            Self::Resident(tensor) => tensor.device(),
            Self::Offloaded(slot) => &slot.device,
        }
    }

    pub(in crate::zero) fn numel(&self) -> usize {
        match self {
            Self::Resident(tensor) => tensor.elem_count(),
            Self::Offloaded(slot) => slot.numel,
        }
    }

    /// The tensor itself, or a copy of an offloaded one. Write changes back with [`put`](Self::put).
    pub(in crate::zero) fn fetch(&self) -> Result<Tensor, ZeroError> {
        match self {
            Self::Resident(tensor) => Ok(tensor.clone()),
            Self::Offloaded(slot) => {
                let tensor = slot.store.read(&slot.extent, || slot.empty())?;
                ledger::place(&tensor, self.placed());
                Ok(tensor)
            }
        }
    }

    /// The placements of the tensor in a dry run.
    pub(in crate::zero) fn placed(&self) -> Option<Placed> {
        match self {
            Self::Resident(tensor) => ledger::placed(tensor),
            Self::Offloaded(slot) => slot.placed.lock().clone(),
        }
    }

    /// Sets the placements of the tensor in a dry run.
    pub(in crate::zero) fn place(&self, placed: Option<Placed>) {
        match self {
            Self::Resident(tensor) => ledger::place(tensor, placed),
            Self::Offloaded(slot) => *slot.placed.lock() = placed,
        }
    }

    /// As [`fetch`](Self::fetch), with unspecified content, for callers that overwrite all elements.
    pub(in crate::zero) fn blank(&self) -> Result<Tensor, ZeroError> {
        match self {
            Self::Resident(tensor) => Ok(tensor.clone()),
            Self::Offloaded(slot) => slot.empty(),
        }
    }

    /// Starts to load the tensor for a later [`fetch`](Self::fetch).
    pub(in crate::zero) fn read_ahead(&self) -> Result<(), ZeroError> {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Offloaded(slot) => slot.store.read_ahead(&slot.extent, || slot.empty()),
        }
    }

    /// Writes a fetched tensor back: starts to write an offloaded one, and does nothing for a resident one.
    pub(in crate::zero) fn put(&self, tensor: Tensor) -> Result<(), ZeroError> {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Offloaded(slot) => {
                if let placed @ Some(_) = ledger::placed(&tensor) {
                    self.place(placed);
                }
                Ok(slot.store.write(&slot.extent, tensor)?)
            }
        }
    }
}

/// Slots in host memory, for updates on the host.
impl StateTensor {
    /// Elements of an offloaded tensor's slot. For a resident one, a temporary slot of their size in `store`, to which a
    /// copy is started.
    pub(in crate::zero) fn slot_or_copy(
        &self,
        elements: &Range<usize>,
        store: &Arc<OffloadStore>,
    ) -> Result<SlotSlice, ZeroError> {
        let slice = self.slot_or_blank(elements, store)?;
        if let Self::Resident(tensor) = self {
            store.write(&slice.slot.extent, narrow(tensor, elements)?)?;
        }
        Ok(slice)
    }

    /// The same with unspecified content.
    pub(in crate::zero) fn slot_or_blank(
        &self,
        elements: &Range<usize>,
        store: &Arc<OffloadStore>,
    ) -> Result<SlotSlice, ZeroError> {
        Ok(match self {
            Self::Resident(tensor) => {
                let slot = Slot::like(&narrow(tensor, elements)?, Category::Other, store);
                SlotSlice { slot: Arc::new(slot), elements: 0..elements.len() }
            }
            Self::Offloaded(slot) => SlotSlice { slot: slot.clone(), elements: elements.clone() },
        })
    }

    /// Starts to overwrite elements of a resident tensor with their temporary slot.
    pub(in crate::zero) fn load_from(
        &self,
        temporary: &SlotSlice,
        elements: &Range<usize>,
    ) -> Result<(), ZeroError> {
        if let Self::Resident(tensor) = self {
            let slot = &temporary.slot;
            slot.store.read(&slot.extent, || narrow(tensor, elements))?;
        }
        Ok(())
    }
}

fn narrow(tensor: &Tensor, elements: &Range<usize>) -> Result<Tensor, ZeroError> {
    Ok(tensor.narrow(0, elements.start, elements.len())?)
}

/// Calls `work` once with the bytes of slices of distinct slots in host memory, in this order; without any in a dry run.
/// Slots of one store must follow each other.
pub(in crate::zero) fn with_bytes(
    slices: &[&SlotSlice],
    work: &mut dyn FnMut(Vec<&mut [u8]>),
) -> Result<(), OffloadError> {
    with_further_bytes(slices, Vec::new(), work)
}

fn with_further_bytes(
    slices: &[&SlotSlice],
    first: Vec<&mut [u8]>,
    work: &mut dyn FnMut(Vec<&mut [u8]>),
) -> Result<(), OffloadError> {
    let Some(store) = slices.first().map(|slice| &slice.slot.store) else {
        work(first);
        return Ok(());
    };
    let of_store = slices.iter().take_while(|slice| Arc::ptr_eq(&slice.slot.store, store)).count();
    let (own, others) = slices.split_at(of_store);
    let bytes: Vec<ExtentSlice<'_>> = own.iter().map(|slice| slice.bytes()).collect();
    let (mut first, mut outcome) = (Some(first), Ok(()));
    store.with_bytes(&bytes, |own| {
        let all = first.take().into_iter().flatten().chain(own).collect();
        outcome = with_further_bytes(others, all, work);
    })?;
    outcome
}

/// A range of a persistent tensor.
#[derive(Debug, Clone)]
pub struct StateSlice {
    pub(in crate::zero) tensor: StateTensor,
    pub(in crate::zero) elements: Range<usize>,
}

impl StateSlice {
    /// The whole of a tensor.
    #[must_use]
    pub fn whole(tensor: Tensor) -> Self {
        let elements = 0..tensor.elem_count();
        Self { tensor: StateTensor::Resident(tensor), elements }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.elements.len()
    }

    /// Returns the elements in f32: a view of a resident f32 tensor, otherwise a copy.
    ///
    /// # Shapes
    /// Flat.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub fn tensor(&self) -> Result<Tensor, ZeroError> {
        let part = narrow(&self.tensor.fetch()?, &self.elements)?;
        Ok(part.to_dtype(DType::F32)?)
    }
}
