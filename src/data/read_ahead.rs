//! Prefetches micro batches in a background thread.

use super::{DataError, DataLoader, MicroBatch};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// Number of prefetched micro batches.
const DEPTH: usize = 2;

/// A [`DataLoader`] whose micro batches are prefetched in a background thread.
///
/// The cursor is that of the returned batches: prefetched batches do not count as consumed.
#[derive(Debug)]
pub struct ReadAhead {
    cursor: DataLoader,
    /// Started with the first batch.
    reader: Option<Reader>,
}

/// The prefetch thread, which ends when this is dropped.
#[derive(Debug)]
struct Reader {
    batches: Receiver<Result<MicroBatch, DataError>>,
    /// Memory is counted per thread, so a batch is returned to the thread that allocated it.
    used: SyncSender<MicroBatch>,
}

impl ReadAhead {
    /// Wraps a loader. Reading starts with the first call of [`next_micro_batch`](Self::next_micro_batch).
    pub fn new(loader: DataLoader) -> Self {
        Self { cursor: loader, reader: None }
    }

    /// Returns the loader at the position of the next batch.
    pub fn cursor(&self) -> &DataLoader {
        &self.cursor
    }

    /// Returns the next micro batch; see [`DataLoader::next_micro_batch`].
    ///
    /// # Errors
    /// Errors of the loader, or a thread that cannot start. After an error, the next call tries again.
    pub fn next_micro_batch(&mut self) -> Result<MicroBatch, DataError> {
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => none.insert(Reader::start(self.cursor.clone())?),
        };
        match reader.batches.recv() {
            Ok(Ok(batch)) => {
                let own = MicroBatch { cu_seqlens: Arc::new(batch.cu_seqlens.to_vec()), ..batch.clone() };
                // Fails if the thread has ended after an error.
                let _ = reader.used.send(batch);
                self.cursor.advance(own.flexible)?;
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
        // Large enough for every batch that exists at once.
        let (used, returned) = sync_channel(2 * DEPTH + 2);
        let read = move || {
            loop {
                drop(returned.try_iter().collect::<Vec<MicroBatch>>());
                let batch = loader.next_micro_batch();
                let is_last = batch.is_err();
                if send.send(batch).is_err() || is_last {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("data".to_owned()).spawn(read);
        thread.map_err(|source| DataError::NoReader { source })?;
        Ok(Self { batches, used })
    }
}
