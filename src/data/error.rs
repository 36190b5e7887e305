//! What can be wrong with a corpus, a batch or a request to a loader.

use super::{FileError, Skipped};
use crate::mesh::MeshError;
use std::ops::Range;
use std::path::PathBuf;

/// The cause reported by the tokenizers library.
type TokenizerCause = Box<dyn std::error::Error + Send + Sync>;

/// Data that cannot be read, or a batch that cannot be made of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The path of the data does not exist.
    #[error("{} does not exist; give a file of text or tokens, a directory, or a pattern such as `data/*.jsonl`", path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// A file or directory that exists and cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A path to a pipe, device or socket.
    #[error("{} is neither a file nor a directory", path.display())]
    NotAFile {
        /// The path as given.
        path: PathBuf,
    },
    /// A file given by name that is no text. In a directory such files are skipped.
    #[error("{} is not valid UTF-8 text", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
    },
    /// A file or directory without any token.
    #[error("{} holds no text ({skipped})", path.display())]
    Empty {
        /// The path as given.
        path: PathBuf,
        /// What was found there and not used.
        skipped: Skipped,
    },
    /// A file that is to be written and exists.
    #[error("{} exists; it is not overwritten", path.display())]
    OutputExists {
        /// The file.
        path: PathBuf,
    },
    /// Another process writes the same file.
    #[error("{}: another process is preparing this file", path.display())]
    BeingPrepared {
        /// The directory of the unfinished file.
        path: PathBuf,
    },
    /// An unfinished file of other inputs.
    #[error(
        "{}: holds an unfinished file that was begun with other inputs, options or another tokenizer; remove the \
         directory to begin anew", path.display()
    )]
    OtherPreparation {
        /// The directory of the unfinished file.
        path: PathBuf,
    },
    /// A vocabulary whose ids do not fit 32 bits with one to spare.
    #[error("a vocabulary of {vocab_size} is too large; ids are below {}", u32::MAX)]
    VocabTooLarge {
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// More tokens than can be counted.
    #[error("the data has more tokens than this machine can count")]
    TooManyTokens,
    /// Documents without any token.
    #[error("no document holds a token")]
    NoTokens,
    /// A tokenizer file that is none.
    #[error("cannot load the tokenizer {}: expected a Hugging Face tokenizer.json", path.display())]
    TokenizerLoad {
        /// The tokenizer file.
        path: PathBuf,
        /// The library's reason.
        source: TokenizerCause,
    },
    /// A file beside the tokenizer's that cannot be used.
    #[error("cannot use {}", path.display())]
    TokenizerSettings {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: TokenizerCause,
    },
    /// A pattern that is none, or that no file matches.
    #[error("{}: {message}", path.display())]
    Pattern {
        /// The pattern.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// Inside a data file, something cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// Text that the tokenizer refuses.
    #[error("the tokenizer fails on {}", path.display())]
    Tokenize {
        /// The document.
        path: PathBuf,
        /// The library's reason.
        source: TokenizerCause,
    },
    /// A sequence length that sequences cannot have.
    #[error("seq_len {seq_len} is invalid; valid are 1 to {}", u32::MAX)]
    InvalidSeqLen {
        /// Tokens per sequence asked for.
        seq_len: usize,
    },
    /// Fewer tokens in a sequence than ranks to share them.
    #[error("seq_len {seq_len} is smaller than sp {sp_size}; every rank needs at least one token of a sequence")]
    SeqLenBelowSp {
        /// Tokens per sequence.
        seq_len: usize,
        /// Ranks that share a sequence.
        sp_size: usize,
    },
    /// A token that the model has no embedding for.
    #[error("token id {id} at sequence {sequence}, position {position} is outside the vocabulary 0..{vocab_size}")]
    TokenOutOfVocab {
        /// The sequence.
        sequence: usize,
        /// The position in the sequence.
        position: usize,
        /// The token id.
        id: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A token or label of a document that the model has no embedding for.
    #[error(
        "token id or label {id} at position {position} of document {document} is outside the vocabulary 0..{vocab_size}"
    )]
    DocumentOutOfVocab {
        /// What stands there.
        id: i64,
        /// The document, from 0.
        document: usize,
        /// The position in it, from 0.
        position: usize,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A label that is neither a token id nor ignored.
    #[error(
        "label {label} at sequence {sequence}, position {position} is neither {} nor in the vocabulary 0..{vocab_size}",
        super::IGNORED_LABEL
    )]
    LabelOutOfVocab {
        /// The sequence.
        sequence: usize,
        /// The position in the sequence.
        position: usize,
        /// The label.
        label: i64,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// Documents that cannot be split in two.
    #[error(
        "{fraction} of {num_tokens} token(s) cannot be held out; valid are shares between 0 and 1, of two tokens or more"
    )]
    NoSplit {
        /// The share asked for.
        fraction: f64,
        /// Tokens of the corpus.
        num_tokens: usize,
    },
    /// A weight that is no share of anything.
    #[error("a source has the weight {weight}; weights are positive and below 1e300")]
    InvalidWeight {
        /// The weight.
        weight: f64,
    },
    /// Sources that cannot share a batch.
    #[error("a source has sequences of {other} tokens, the first one of {first}; all need the same")]
    SeqLensDiffer {
        /// Tokens per sequence of the first source.
        first: usize,
        /// Tokens per sequence of another one.
        other: usize,
    },
    /// A source that is not there.
    #[error("source {index} was asked for; there are {available}, counted from 0")]
    NoSource {
        /// The source asked for.
        index: usize,
        /// Number of sources.
        available: usize,
    },
    /// The thread that reads ahead cannot start.
    #[error("cannot start the thread that reads the data")]
    NoReader {
        /// The system's error.
        source: std::io::Error,
    },
    /// The threads that tokenize cannot start.
    #[error("cannot start the threads that tokenize")]
    NoThreads {
        /// The system's error.
        source: std::io::Error,
    },
    /// The thread that reads ahead is gone.
    #[error("the thread that reads the data has panicked; its message stands above")]
    ReaderPanicked,
    /// A batch without sequences.
    #[error("a batch needs at least one sequence")]
    NoSequences,
    /// A tensor with another number of elements than the batch has tokens.
    #[error("{tensor} has {found} elements; [batch, seq_len] = [{batch}, {seq_len}] takes {}", expected(*batch, *seq_len))]
    WrongLength {
        /// The tensor.
        tensor: &'static str,
        /// Its number of elements.
        found: usize,
        /// Sequences of the batch.
        batch: usize,
        /// Tokens per sequence.
        seq_len: usize,
    },
    /// A document that is not there.
    #[error("document {index} was asked for; there are {available}, counted from 0")]
    NoDocument {
        /// The document asked for.
        index: usize,
        /// Number of documents.
        available: usize,
    },
    /// Tokens that are not there.
    #[error("tokens {range:?} were asked for; there are {available}")]
    NoTokenRange {
        /// The tokens asked for.
        range: Range<usize>,
        /// Number of tokens.
        available: usize,
    },
    /// Sequences that are not there, or an empty range of them.
    #[error("sequences {sequences:?} were asked for; valid are non-empty ranges within 0..{available}")]
    SequencesOutOfRange {
        /// The sequences asked for.
        sequences: Range<usize>,
        /// Number of sequences.
        available: usize,
    },
    /// A count that must be at least 1.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// What is counted.
        name: &'static str,
    },
    /// A rank past the end of its axis.
    #[error("{axis} rank {rank} does not exist; with {axis} size {size}, ranks are below {size}")]
    RankOutOfRange {
        /// The axis.
        axis: &'static str,
        /// The rank along it.
        rank: usize,
        /// Its size.
        size: usize,
    },
    /// A train batch whose size is no number this machine can hold.
    #[error("micro_batch {micro_batch} × accumulation {accumulation} × dp {dp_size} overflows")]
    BatchTooLarge {
        /// Sequences per rank and micro step.
        micro_batch: usize,
        /// Micro steps per step.
        accumulation: usize,
        /// Data-parallel ranks.
        dp_size: usize,
    },
    /// A cursor so far that a step after it cannot be counted.
    #[error(
        "cursor {samples_consumed} + train batch {train_batch_size} overflows; is the checkpoint damaged?"
    )]
    CursorOverflow {
        /// The cursor.
        samples_consumed: u64,
        /// Samples per step.
        train_batch_size: u64,
    },
    /// A mesh without the rank or axis asked for.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

/// Elements of `[batch, seq_len]`, in words where they cannot be counted.
fn expected(batch: usize, seq_len: usize) -> String {
    batch.checked_mul(seq_len).map_or_else(|| "more than memory has".to_owned(), |count| count.to_string())
}
