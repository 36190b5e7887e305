//! Errors of a corpus, a batch or a data loader.

use super::{FileError, Notes, Skipped};
use crate::mesh::MeshError;
use std::ops::Range;
use std::path::PathBuf;

/// An error of the tokenizers library.
type TokenizerCause = Box<dyn std::error::Error + Send + Sync>;

/// Data that cannot be read, or an invalid batch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The path of the data does not exist.
    #[error("{} does not exist; give a text or token file, a directory, or a pattern such as `data/*.jsonl`", path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// A file or directory that exists and cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A path to a pipe, device or socket.
    #[error("{} is neither a file nor a directory", path.display())]
    NotAFile {
        /// The path as given.
        path: PathBuf,
    },
    /// A file given by name that is not text. In a directory, such files are skipped.
    #[error("{} is not valid UTF-8 text: {advice}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// The detected format, if known, and the remedy.
        advice: &'static str,
    },
    /// A text file or a line that is longer than a document may be.
    #[error("{}: a text file or a line of {limit} bytes or more; split it", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// A file or directory without any token.
    #[error("{} contains no text ({skipped}{})", path.display(), notes.after("; "))]
    Empty {
        /// The path as given.
        path: PathBuf,
        /// The entries that were skipped.
        skipped: Box<Skipped>,
        /// Why lines were skipped.
        notes: Notes,
    },
    /// An output file that exists.
    #[error("{} exists and is not overwritten; remove it, or choose another output", path.display())]
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
        "{}: contains an unfinished file of other inputs, options or another tokenizer; remove the directory to start \
         over", path.display()
    )]
    OtherPreparation {
        /// The directory of the unfinished file.
        path: PathBuf,
    },
    /// A vocabulary that exceeds 32 bits; the largest id is reserved.
    #[error("vocabulary size {vocab_size} is too large; the maximum is {}", u32::MAX)]
    VocabTooLarge {
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A number of tokens that overflows.
    #[error("the number of tokens overflows")]
    TooManyTokens,
    /// Documents without any token.
    #[error("no document contains a token")]
    NoTokens,
    /// An invalid tokenizer file.
    #[error("cannot load the tokenizer {}: expected a Hugging Face tokenizer.json", path.display())]
    TokenizerLoad {
        /// The tokenizer file.
        path: PathBuf,
        /// The error of the library.
        source: TokenizerCause,
    },
    /// An invalid file next to the tokenizer's.
    #[error("cannot use {}", path.display())]
    TokenizerSettings {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: TokenizerCause,
    },
    /// An invalid pattern, or one that no file matches.
    #[error("{}: {message}", path.display())]
    Pattern {
        /// The pattern.
        path: PathBuf,
        /// The reason.
        message: String,
    },
    /// Invalid contents of a data file.
    #[error(transparent)]
    File(#[from] FileError),
    /// Text that the tokenizer rejects.
    #[error("the tokenizer fails on {}", path.display())]
    Tokenize {
        /// The file of the document.
        path: PathBuf,
        /// The error of the library.
        source: TokenizerCause,
    },
    /// An error in the process of the tokenizer, or the end of that process.
    #[error("{message}")]
    Worker {
        /// The error with its causes.
        message: String,
        /// Whether one line, row or element of a file is not valid.
        is_of_a_line: bool,
    },
    /// Conversations that do not fit a sequence.
    #[error(
        "{num_long} conversations have more than seq_len {max_tokens} tokens; raise seq_len, shorten them, or set \
         `ulysses.long_conversations` to `truncate`"
    )]
    LongConversations {
        /// Their number.
        num_long: usize,
        /// The tokens of a sequence.
        max_tokens: usize,
    },
    /// An invalid sequence length.
    #[error("seq_len {seq_len} is invalid; valid are 1 to {}", u32::MAX)]
    InvalidSeqLen {
        /// The sequence length.
        seq_len: usize,
    },
    /// Fewer tokens in a sequence than sp ranks.
    #[error(
        "seq_len {seq_len} is smaller than sp {sp_size}; every rank needs at least one token of a sequence"
    )]
    SeqLenBelowSp {
        /// Tokens per sequence.
        seq_len: usize,
        /// Ranks that share each sequence.
        sp_size: usize,
    },
    /// A token that the model has no embedding for.
    #[error(
        "token id {id} in sequence {sequence}, position {position} is outside the vocabulary 0..{vocab_size}"
    )]
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
        /// The id.
        id: i64,
        /// The document, from 0.
        document: usize,
        /// The position in the document, from 0.
        position: usize,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A label that is neither a token id nor ignored.
    #[error(
        "label {label} in sequence {sequence}, position {position} is neither {} nor in the vocabulary 0..{vocab_size}",
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
    /// A validation split that is not possible.
    #[error(
        "cannot hold out {fraction} of {num_tokens} token(s); the fraction must be between 0 and 1, of at least two tokens"
    )]
    NoSplit {
        /// The fraction.
        fraction: f64,
        /// Tokens of the corpus.
        num_tokens: usize,
    },
    /// An invalid weight.
    #[error("source weight {weight} is invalid; weights must be positive and below 1e300")]
    InvalidWeight {
        /// The weight.
        weight: f64,
    },
    /// Sources with different sequence lengths.
    #[error("the sources have sequences of {first} and {other} tokens; all must have the same length")]
    SeqLensDiffer {
        /// Tokens per sequence of the first source.
        first: usize,
        /// Tokens per sequence of another one.
        other: usize,
    },
    /// A source index that is out of range.
    #[error("source {index} does not exist; there are {available}, counted from 0")]
    NoSource {
        /// The source.
        index: usize,
        /// Number of sources.
        available: usize,
    },
    /// The prefetch thread cannot start.
    #[error("cannot start the data loading thread")]
    NoReader {
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The tokenization threads cannot start.
    #[error("cannot start the tokenization threads")]
    NoThreads {
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The prefetch thread panicked.
    #[error("the data loading thread panicked; see its message above")]
    ReaderPanicked,
    /// A batch without sequences.
    #[error("a batch needs at least one sequence")]
    NoSequences,
    /// A tensor with another number of elements than the batch has tokens.
    #[error("{tensor} has {found} elements; [batch_size, seq_len] = [{batch_size}, {seq_len}] takes {}", expected(*batch_size, *seq_len))]
    WrongLength {
        /// The tensor.
        tensor: &'static str,
        /// The number of its elements.
        found: usize,
        /// Sequences of the batch.
        batch_size: usize,
        /// Tokens per sequence.
        seq_len: usize,
    },
    /// More documents or sequences than can be ordered.
    #[error(
        "the data has {count} {what}, at most {} can be ordered: use a larger `seq_len`, and check that the data is no filler",
        u32::MAX
    )]
    TooManyToOrder {
        /// Documents or sequences.
        what: &'static str,
        /// Their number.
        count: usize,
    },
    /// Values of a batch's tokens with another number than the shape takes.
    #[error(
        "{name:?} has {found} values; [batch_size, seq_len, width] = [{batch_size}, {seq_len}, {width}] takes another number"
    )]
    WrongValues {
        /// The name of the values.
        name: String,
        /// Their number.
        found: usize,
        /// Sequences of the batch.
        batch_size: usize,
        /// Tokens per sequence.
        seq_len: usize,
        /// Values per token.
        width: usize,
    },
    /// A document index that is out of range.
    #[error("document {index} does not exist; there are {available}, counted from 0")]
    NoDocument {
        /// The document.
        index: usize,
        /// Number of documents.
        available: usize,
    },
    /// A token range that is out of range.
    #[error("tokens {range:?} do not exist; there are {available}")]
    NoTokenRange {
        /// The range.
        range: Range<usize>,
        /// Number of tokens.
        available: usize,
    },
    /// A range of sequences that is empty or out of range.
    #[error("sequences {sequences:?} do not exist; valid are non-empty ranges within 0..{available}")]
    SequencesOutOfRange {
        /// The range.
        sequences: Range<usize>,
        /// Number of sequences.
        available: usize,
    },
    /// A count that must be at least 1.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// The name of the count.
        name: &'static str,
    },
    /// A rank outside its axis.
    #[error("{axis} rank {rank} does not exist; with {axis} size {size}, ranks are below {size}")]
    RankOutOfRange {
        /// The axis.
        axis: &'static str,
        /// The rank along the axis.
        rank: usize,
        /// The size of the axis.
        size: usize,
    },
    /// A train batch size that overflows.
    #[error(
        "train batch size overflows: micro_batch {micro_batch} × accumulation {accumulation} × dp {dp_size}"
    )]
    BatchTooLarge {
        /// Sequences per rank and micro step.
        micro_batch: usize,
        /// Micro steps per step.
        accumulation: usize,
        /// Data-parallel ranks.
        dp_size: usize,
    },
    /// A position in the data that overflows.
    #[error(
        "samples consumed {samples_consumed} + train batch size {train_batch_size} overflows; is the checkpoint damaged?"
    )]
    CursorOverflow {
        /// Samples consumed so far.
        samples_consumed: u64,
        /// Samples per step.
        train_batch_size: u64,
    },
    /// A mesh without the rank or axis.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

impl DataError {
    /// Returns whether one line, row or element of a file is not valid.
    pub(super) fn is_of_a_line(&self) -> bool {
        match self {
            Self::File(error) => error.is_of_a_line(),
            Self::Worker { is_of_a_line, .. } => *is_of_a_line,
            _ => false,
        }
    }
}

/// Returns the number of elements of `[batch_size, seq_len]` as text.
fn expected(batch_size: usize, seq_len: usize) -> String {
    batch_size
        .checked_mul(seq_len)
        .map_or_else(|| "more than memory can hold".to_owned(), |count| count.to_string())
}
