//! What the layers leave for their backward pass: the counterpart of the engine's tape and of its store of
//! checkpoints.

use super::layer::SavedLayer;
use super::ledger::{Away, Buffer, ElementType, Ledger};
use std::collections::VecDeque;
use ulysses_kernels::memory::Category;

/// What one layer leaves.
#[derive(Debug)]
pub(super) enum LayerTape {
    /// Its state, and its input.
    State(Buffer, SavedLayer),
    /// What it is computed from again.
    Checkpoint(Vec<Buffer>),
    /// Elements of the same, in the store.
    Offloaded(Vec<usize>),
}

/// The store, if there is one.
#[derive(Debug)]
pub(super) struct CheckpointStore {
    place: Option<Away>,
    /// It lives until the store is asked for another.
    being_written: Option<Buffer>,
    /// The tensors of the checkpoints that come next.
    arriving: VecDeque<Vec<Buffer>>,
}

impl CheckpointStore {
    pub(super) fn is_used(&self) -> bool {
        self.place.is_some()
    }

    /// The buffer that a file's thread reads ahead into is held throughout: when that runs is the thread's affair.
    pub(super) fn new(place: Option<Away>, ledger: &mut Ledger) -> Self {
        ledger.hold(Category::Other, place.map_or(0, Away::read_ahead_bytes) as i64);
        Self { place, being_written: None, arriving: VecDeque::new() }
    }

    /// Checkpoints that it holds in memory: being written, and arriving.
    pub(super) fn kept(&self) -> [usize; 2] {
        [usize::from(self.being_written.is_some()), self.arriving.len()]
    }

    /// A layer's checkpoint, where the config wants it.
    pub(super) fn keep(&mut self, checkpoint: Vec<Buffer>, ledger: &mut Ledger) -> LayerTape {
        let Some(place) = self.place else { return LayerTape::Checkpoint(checkpoint) };
        let store = |buffer: Buffer| {
            let elems = buffer.elems();
            let bytes = elems * ledger.bytes_of(ElementType::Stored);
            ledger.move_to_or_from(place, bytes);
            ledger.offload(bytes as i64);
            self.settle(ledger);
            self.being_written = Some(buffer);
            elems
        };
        LayerTape::Offloaded(checkpoint.into_iter().map(store).collect())
    }

    /// Starts to bring back what the next layer's backward needs.
    pub(super) fn read_ahead(&mut self, left: Option<&LayerTape>, ledger: &mut Ledger) {
        let Some(LayerTape::Offloaded(stored)) = left else { return };
        self.settle(ledger);
        if self.place == Some(Away::Host) {
            self.arriving.push_back(Self::take(stored, ledger));
        }
    }

    /// Brings a stored checkpoint back to memory.
    pub(super) fn load(&mut self, stored: Vec<usize>, ledger: &mut Ledger) -> Vec<Buffer> {
        let bytes = stored.iter().sum::<usize>() * ledger.bytes_of(ElementType::Stored);
        self.place.into_iter().for_each(|place| ledger.move_to_or_from(place, bytes));
        ledger.offload(-(bytes as i64));
        self.arriving.pop_front().unwrap_or_else(|| Self::take(&stored, ledger))
    }

    fn take(stored: &[usize], ledger: &mut Ledger) -> Vec<Buffer> {
        let take = |&elems| ledger.take(Category::Activations, ElementType::Stored, elems);
        stored.iter().map(take).collect()
    }

    /// Storage that has been written is freed, not recycled.
    fn settle(&mut self, ledger: &mut Ledger) {
        self.being_written.take().into_iter().for_each(|buffer| ledger.free(buffer));
    }
}
