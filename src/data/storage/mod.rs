//! Token stores: in memory, or in files that are read on access.
//!
//! The README of `data` describes the file formats.

mod file;
mod layout;
mod llm_c;
mod megatron;
mod memory;
mod own;
mod table;
mod token_file;

use file::DataFile;
use layout::{DocumentBounds, Layout, TokenType};
pub(super) use memory::MemoryTokens;
pub(super) use own::{HEADER_BYTES, Header, ignored_label};
pub use token_file::{FileFormat, TokenFile, TokenFileOptions};

use super::DataError;
use std::fmt::Debug;
use std::ops::Range;

/// The tokens of documents, none of them empty.
pub(super) trait TokenStore: Debug + Send + Sync {
    fn num_tokens(&self) -> usize;

    fn num_documents(&self) -> usize;

    /// Returns the end of an existing document.
    fn document_end(&self, index: usize) -> Result<usize, DataError>;

    /// Appends the tokens of an existing range.
    fn read_tokens(&self, range: Range<usize>, tokens: &mut Vec<u32>) -> Result<(), DataError>;

    /// Appends the unshifted labels of an existing range.
    fn read_labels(&self, range: Range<usize>, labels: &mut Vec<i64>) -> Result<(), DataError>;

    /// Returns whether labels may differ from tokens.
    fn has_labels(&self) -> bool;

    /// Returns whether reads check that ids are below `vocab_size`.
    fn checks_vocab(&self, vocab_size: usize) -> bool;
}

/// Returns the document of a token: the first that ends after it.
pub(super) fn document_at(store: &dyn TokenStore, token: usize) -> Result<usize, DataError> {
    let (mut low, mut high) = (0, store.num_documents());
    while low < high {
        let middle = low + (high - low) / 2;
        match store.document_end(middle)? <= token {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    Ok(low)
}
