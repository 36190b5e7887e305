//! Reads documents: resolves paths to files, and reads and tokenizes their contents.

mod conversation;
mod document;
mod files;
mod lines;
#[cfg(feature = "parquet")]
mod parquet;
mod records;

pub(super) use document::{Document, Encoder, start_threads};
pub use files::Skipped;
pub(super) use files::{SourceFile, SourceKind, expand};
pub(super) use records::{Position, Records};
