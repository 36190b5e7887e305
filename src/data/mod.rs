//! The data path: text → tokens → packed rows → one rank's part of a step.
//!
//! ```text
//! Corpus ─► Documents ─► PackedSequences ─► Dataset ─► DataLoader ─► GlobalBatch ─► MicroBatch
//! tokens     all, or a    rows of       sources,   order, rows    whole rows     a rank's shard
//!            split        seq_len       weights    of a rank                     of these rows
//! ```
//!
//! [`ReadAhead`] runs a loader in a thread of its own, so that a step finds its batches read.
//! The README in this folder tells what a [`Corpus`] is read from, and the layouts of files of tokens.
//!
//! Three rules hold on this path, and everything downstream relies on them:
//!
//! - **The order of the data does not know the mesh.** It is a function of (seed, epoch). A step consumes the
//!   next `train_batch_size` samples; dp ranks and micro steps take contiguous rows of them. So two meshes
//!   train on the same data, and a run can continue on another mesh.
//! - **Labels are shifted before a row is cut.** A shard's last label is the first token of the next shard. No
//!   label crosses the end of a document; a document that is cut at the end of a row keeps its label there.
//! - **Document bounds travel with every shard.** Attention sees whole rows, so each shard carries the
//!   `cu_seqlens` of the whole row, beside the `position_ids` of its own tokens.

mod batch;
mod best_fit;
mod caught;
mod chat;
mod corpus;
mod dataset;
mod documents;
mod entropy;
mod error;
mod file_error;
mod loader;
mod mixture;
mod order;
mod packing;
mod prepare;
mod read_ahead;
mod sample_order;
mod source;
mod storage;
#[cfg(test)]
mod tests;
mod text_bytes;
mod tokenizer;

pub use crate::config::Packing;
pub use batch::{GlobalBatch, MicroBatch};
pub use corpus::{Corpus, SourceOptions};
pub use dataset::Dataset;
pub use documents::Documents;
pub use entropy::unigram_entropy_nats;
pub use error::DataError;
pub use file_error::FileError;
pub use loader::{DataLoader, LoaderOptions, Placement};
pub use order::epoch_order;
pub use packing::{PackedSequences, Row};
pub use prepare::{PrepareOptions, PrepareProgress, Prepared, prepare};
pub use read_ahead::ReadAhead;
pub use source::Skipped;
pub use storage::{FileFormat, TokenFile, TokenFileOptions};
pub use text_bytes::predicted_text_bytes;
pub use tokenizer::Tokenizer;

/// The label of a token that takes no part in the loss (PyTorch's default `ignore_index`).
pub const IGNORED_LABEL: i64 = -100;
