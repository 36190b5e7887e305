//! Reads documents: resolves paths to files, and reads and tokenizes their contents.

mod array;
mod binary;
mod conversation;
mod document;
mod encoder;
mod files;
mod kind;
mod layout;
mod lines;
#[cfg(feature = "parquet")]
mod parquet;
mod reader;
mod record;
mod records;
mod skipped;
mod table;

pub(super) use document::{Document, DocumentKind, LocalEncoder, TextOptions};
pub(super) use encoder::{Encoder, start_threads};
pub(super) use files::{SourceFile, expand};
pub(super) use kind::SourceKind;
pub(super) use record::{Content, Record};
pub(super) use records::{Position, Records};
pub use skipped::Skipped;
