//! Where tokens lie: in memory, or in a file that is read as rows ask for it.
//!
//! The README beside `data` describes the layouts.

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

/// Tokens that are cut into documents, none of them empty.
pub(super) trait TokenStore: Debug + Send + Sync {
    fn num_tokens(&self) -> usize;

    fn num_documents(&self) -> usize;

    /// One past the last token of a document that exists.
    fn document_end(&self, index: usize) -> Result<usize, DataError>;

    /// Appends the tokens of a range that exists.
    fn read_tokens(&self, range: Range<usize>, tokens: &mut Vec<u32>) -> Result<(), DataError>;

    /// Appends the unshifted labels of a range that exists.
    fn read_labels(&self, range: Range<usize>, labels: &mut Vec<i64>) -> Result<(), DataError>;

    /// Whether some label may not be its token.
    fn has_labels(&self) -> bool;

    /// Whether reading fails rather than returning an id of `vocab_size` or more.
    fn is_held_to(&self, vocab_size: usize) -> bool;
}

/// The document that holds a token: the first that ends after it.
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
