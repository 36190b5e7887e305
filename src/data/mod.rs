//! The data path: text → tokens → packed sequences → micro batches of one rank.
//!
//! ```text
//! Corpus ─► Documents ─► PackedSequences ─► Dataset ─► DataLoader ─► GlobalBatch ─► MicroBatch
//! tokens     all, or a    sequences of       sources,   order, and     whole          a rank's shard
//!            split        seq_len tokens     weights    dp shard       sequences      of each sequence
//! ```
//!
//! [`DataLoader::balanced`] divides the documents of a step among the ranks instead of each sequence (`balance.rs`,
//! `flexible.rs`). [`ReadAhead`] prefetches the batches of a loader in a background thread. The README in this folder describes what a
//! [`Corpus`] is read from, and the formats of token files.
//!
//! Everything downstream relies on three rules:
//!
//! - **The data order does not depend on the mesh.** It is a function of (seed, epoch). A step consumes the next
//!   `train_batch_size` samples; dp ranks and micro steps take contiguous sequences of them. Two meshes therefore train
//!   on the same data, and a run can resume on another mesh.
//! - **Labels are shifted before a sequence is sharded.** A shard's last label is the first token of the next shard. No
//!   label crosses the end of a document; a document that is cut at the end of a sequence keeps its label there.
//! - **Every shard has the document bounds of the whole sequence.** Attention sees whole sequences, so each shard has
//!   the `cu_seqlens` of the whole sequence, and the `position_ids` of its own tokens.

mod balance;
mod batch;
mod best_fit;
mod contents;
mod corpus;
mod data_rank;
mod dataset;
mod documents;
mod entropy;
mod error;
mod file_error;
mod flexible;
mod loader;
mod mixture;
mod notes;
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
mod unpacked;

pub use crate::config::{LongConversations, OnBadLine, Packing, TokenDtype};
pub use balance::{Assignment, Block, DocumentCost, RankGrid, divisors};
pub use batch::{FlexibleStep, GlobalBatch, MicroBatch};
pub use contents::Contents;
pub use corpus::{Corpus, SourceOptions};
pub use data_rank::{DataRank, LoaderOptions};
pub use dataset::Dataset;
pub use documents::Documents;
pub use entropy::unigram_entropy_nats;
pub use error::DataError;
pub use file_error::FileError;
pub use loader::DataLoader;
pub use notes::Notes;
pub use order::epoch_order;
pub use packing::{PackedSequence, PackedSequences};
pub use prepare::{PrepareOptions, PrepareProgress, Prepared, prepare};
pub use read_ahead::ReadAhead;
pub use source::Skipped;
pub use storage::{FileFormat, TokenFile, TokenFileOptions};
pub use text_bytes::predicted_text_bytes;
pub use tokenizer::Tokenizer;
#[cfg(unix)]
pub use tokenizer::serve_tokenizer;

/// The label of a token that does not contribute to the loss (PyTorch's default `ignore_index`).
pub const IGNORED_LABEL: i64 = -100;
