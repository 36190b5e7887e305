//! What the layers leave for their backward pass: the counterpart of the engine's tape and of its file of
//! checkpoints.

use super::layer::SavedLayer;
use super::ledger::{Buffer, ElementType, Ledger};
use crate::memory::Category;
use crate::offload::READ_AHEAD_BYTES;

/// What one layer leaves.
#[derive(Debug)]
pub(super) enum LayerTape {
    /// Its state, and its input.
    State(Buffer, SavedLayer),
    /// What it is computed from again.
    Checkpoint(Vec<Buffer>),
    /// Elements of the same, in the file.
    Offloaded(Vec<usize>),
}

/// The file, if there is one.
#[derive(Debug)]
pub(super) struct CheckpointFile {
    exists: bool,
    /// It lives until its thread is asked for another.
    being_written: Option<Buffer>,
}

impl CheckpointFile {
    pub(super) fn is_used(&self) -> bool {
        self.exists
    }

    /// The buffer that its thread reads ahead into is held throughout: when that runs is the thread's affair.
    pub(super) fn new(exists: bool, ledger: &mut Ledger) -> Self {
        if exists {
            ledger.hold(Category::Other, READ_AHEAD_BYTES as i64);
        }
        Self { exists, being_written: None }
    }

    /// A layer's checkpoint, where the config wants it.
    pub(super) fn keep(&mut self, checkpoint: Vec<Buffer>, ledger: &mut Ledger) -> LayerTape {
        if !self.exists {
            return LayerTape::Checkpoint(checkpoint);
        }
        let store = |buffer: Buffer| {
            let elems = buffer.elems();
            ledger.move_to_or_from_file(elems * ledger.bytes_of(ElementType::Stored));
            self.written(ledger);
            self.being_written = Some(buffer);
            elems
        };
        LayerTape::Offloaded(checkpoint.into_iter().map(store).collect())
    }

    /// Brings a stored checkpoint back to memory.
    pub(super) fn load(&mut self, stored: Vec<usize>, ledger: &mut Ledger) -> Vec<Buffer> {
        self.written(ledger);
        let read = stored.iter().sum::<usize>() * ledger.bytes_of(ElementType::Stored);
        ledger.move_to_or_from_file(read);
        stored
            .into_iter()
            .map(|elems| ledger.take(Category::Activations, ElementType::Stored, elems))
            .collect()
    }

    /// Storage that has been written is freed, not recycled.
    fn written(&mut self, ledger: &mut Ledger) {
        self.being_written.take().into_iter().for_each(|buffer| ledger.free(buffer));
    }
}
