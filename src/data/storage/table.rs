//! A table of 64-bit integers in a file, read in blocks.

use super::DataFile;
use crate::data::FileError;
use parking_lot::Mutex;

/// Entries that are read at once, to reduce system calls.
const BLOCK: usize = 1024;

/// `len` little-endian 64-bit integers in a file, with one cached block.
#[derive(Debug)]
pub(super) struct Table {
    at: u64,
    len: usize,
    /// The cached block and its index.
    block: Mutex<(usize, Vec<u8>)>,
}

impl Table {
    /// Creates a table, which must be within the file.
    pub(super) fn new(at: u64, len: usize) -> Self {
        Self { at, len, block: Mutex::new((usize::MAX, Vec::new())) }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the offset of an entry.
    pub(super) fn offset(&self, index: usize) -> u64 {
        self.at + 8 * index as u64
    }

    /// Returns an entry; `index` must be below `len`.
    pub(super) fn get(&self, file: &DataFile, index: usize) -> Result<u64, FileError> {
        let (number, within) = (index / BLOCK, index % BLOCK);
        let mut block = self.block.lock();
        if block.0 != number {
            let first = number * BLOCK;
            let mut bytes = vec![0; 8 * BLOCK.min(self.len - first)];
            file.read(self.offset(first), &mut bytes)?;
            *block = (number, bytes);
        }
        let mut entry = [0; 8];
        entry.copy_from_slice(&block.1[8 * within..8 * within + 8]);
        Ok(u64::from_le_bytes(entry))
    }
}
