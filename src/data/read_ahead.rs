//! Reads batches while the last ones are trained on.

use super::{DataError, DataLoader, MicroBatch};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// Micro batches that wait to be taken.
const DEPTH: usize = 2;

/// A [`DataLoader`] that a thread of its own keeps a few micro batches ahead.
///
/// The cursor is that of the batches that were taken: what was read ahead counts as not consumed.
#[derive(Debug)]
pub struct ReadAhead {
    cursor: DataLoader,
    /// Started when the first batch is asked for.
    reader: Option<Reader>,
}

/// The thread ends when this is dropped.
#[derive(Debug)]
struct Reader {
    batches: Receiver<Result<MicroBatch, DataError>>,
    /// Memory is counted by thread, so a batch goes back to the thread that allocated it.
    taken: SyncSender<MicroBatch>,
}

impl ReadAhead {
    /// Nothing is read before the first batch is asked for.
    pub fn new(loader: DataLoader) -> Self {
        Self { cursor: loader, reader: None }
    }

    /// The loader at the place of the next batch to be taken.
    pub fn cursor(&self) -> &DataLoader {
        &self.cursor
    }

    /// The next micro batch; see [`DataLoader::next_micro_batch`].
    ///
    /// # Errors
    /// Those of the loader, or a thread that cannot start. The loader tries again after an error.
    pub fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => none.insert(Reader::start(self.cursor.clone())?),
        };
        match reader.batches.recv() {
            Ok(Ok(batch)) => {
                let own = MicroBatch { cu_seqlens: Arc::new(batch.cu_seqlens.to_vec()), ..batch.clone() };
                // Nobody takes it where the thread has ended after an error.
                let _ = reader.taken.send(batch);
                self.cursor.advance()?;
                Ok(own)
            }
            Ok(Err(error)) => {
                self.reader = None;
                Err(error)
            }
            Err(_) => Err(DataError::ReaderPanicked),
        }
    }
}

impl Reader {
    fn start(mut loader: DataLoader) -> Result<Self, DataError> {
        let (send, batches) = sync_channel(DEPTH);
        // Room for every batch that can be on its way.
        let (taken, give_back) = sync_channel(2 * DEPTH + 2);
        let read = move || {
            loop {
                drop(give_back.try_iter().collect::<Vec<MicroBatch>>());
                let batch = loader.next_micro_batch();
                let is_last = batch.is_err();
                if send.send(batch).is_err() || is_last {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("data".to_owned()).spawn(read);
        thread.map_err(|source| DataError::NoReader { source })?;
        Ok(Self { batches, taken })
    }
}
