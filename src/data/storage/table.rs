//! A table of 64-bit integers in a file, read in blocks.

use super::DataFile;
use crate::data::FileError;
use parking_lot::Mutex;

/// Entries that are read at once: a walk over all documents makes few system calls.
const BLOCK: usize = 1024;

/// `len` little-endian 64-bit integers at a place of a file. One block of them is kept.
#[derive(Debug)]
pub(super) struct Table {
    at: u64,
    len: usize,
    /// The last block read and its number.
    block: Mutex<(usize, Vec<u8>)>,
}

impl Table {
    /// A table that lies within the file, as the caller has made sure.
    pub(super) fn new(at: u64, len: usize) -> Self {
        Self { at, len, block: Mutex::new((usize::MAX, Vec::new())) }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where an entry stands.
    pub(super) fn offset(&self, index: usize) -> u64 {
        self.at + 8 * index as u64
    }

    /// An entry below `len`.
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
