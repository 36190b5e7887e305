//! What can be wrong inside a data file, with the place.

use std::path::PathBuf;

/// A data file that cannot be what it is taken for, or a place in it that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The system refuses an operation.
    #[error("{}: cannot {operation}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// Bytes that the file had, or says that it has, and has not.
    #[error(
        "{}: bytes {offset} to {} are needed and the file has {file_bytes}: it is cut short, or shrank \
         while it was read", path.display(), offset.saturating_add(*needed_bytes)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Where reading began.
        offset: u64,
        /// Bytes that should follow.
        needed_bytes: u64,
        /// Bytes that the file has now.
        file_bytes: u64,
    },
    /// A size that is no whole number of tokens.
    #[error(
        "{}: {file_bytes} bytes are no whole number of {width}-byte tokens; a file without a header is read \
         as nanoGPT's 16-bit tokens", path.display()
    )]
    OddSize {
        /// The file.
        path: PathBuf,
        /// Its size.
        file_bytes: u64,
        /// Bytes of a token.
        width: usize,
    },
    /// A file that does not begin as its kind does.
    #[error("{}: byte 0: expected {expected}, found {found:?}", path.display())]
    WrongMagic {
        /// The file.
        path: PathBuf,
        /// What it should begin with.
        expected: &'static str,
        /// What it begins with.
        found: Vec<u8>,
    },
    /// A number in a header or an index that cannot be true.
    #[error("{}: byte {offset}: {field} is {found}; valid is {valid}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Where the number stands.
        offset: u64,
        /// What it says.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What it could be.
        valid: String,
    },
    /// A header whose checksum is another.
    #[error("{}: bytes 0 to {header_bytes}: the header does not have the checksum that it ends with", path.display())]
    HeaderChecksum {
        /// The file.
        path: PathBuf,
        /// Size of the header.
        header_bytes: usize,
    },
    /// A token or label that no embedding exists for.
    #[error("{}: byte {offset}: token id {id} is outside the vocabulary 0..{vocab_size}", path.display())]
    TokenOutOfVocab {
        /// The file.
        path: PathBuf,
        /// Where the token stands.
        offset: u64,
        /// The id.
        id: i64,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A file of no tokens.
    #[error("{}: holds no token", path.display())]
    NoTokens {
        /// The file.
        path: PathBuf,
    },
    /// A document that ends where it starts or before.
    #[error(
        "{}: document {index}, counted from 0, starts at token {start} and ends at {end}; every document needs a \
         token", path.display()
    )]
    EmptyDocument {
        /// The file.
        path: PathBuf,
        /// The document.
        index: usize,
        /// Its first token.
        start: usize,
        /// One past its last.
        end: usize,
    },
    /// Tokens that another tokenizer made.
    #[error(
        "{}: its tokens were made by another tokenizer (vocabulary of {vocab_size}, BLAKE3 {found}); give the \
         tokenizer.json that it was prepared with", path.display()
    )]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
        /// Size of that tokenizer's vocabulary.
        vocab_size: usize,
        /// That tokenizer's hash, abbreviated.
        found: String,
    },
    /// A line that is not valid UTF-8.
    #[error("{}, line {line}: not valid UTF-8 (byte {offset} of the line)", path.display())]
    LineNotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The first byte of the line that is wrong.
        offset: usize,
    },
    /// A line that is no JSON.
    #[error("{}, line {line}, column {column}: {reason}", path.display())]
    LineNotJson {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The byte of the line, from 1.
        column: usize,
        /// What the reader says.
        reason: String,
    },
    /// A field that holds something else than it should.
    #[error("{}, line {line}, `{field}`: {reason}", path.display())]
    LineField {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The field.
        field: String,
        /// What the reader says.
        reason: String,
    },
    /// A line that is JSON and no document.
    #[error("{}, line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What it lacks or contradicts.
        problem: String,
    },
    /// A chat that the tokenizer's template cannot render.
    #[error("{}, line {line}: the chat template fails", path.display())]
    ChatTemplate {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The template engine's reason.
        source: minijinja::Error,
    },
    /// A Parquet file that cannot be read.
    #[cfg(feature = "parquet")]
    #[error("{}, row {row}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The first row, from 0, that was not read.
        row: u64,
        /// The library's reason.
        source: parquet::errors::ParquetError,
    },
    /// A kind of file that this build does not read.
    #[error("{}: this build lacks the feature `{feature}`", path.display())]
    NotBuilt {
        /// The file.
        path: PathBuf,
        /// The cargo feature that reads it.
        feature: &'static str,
    },
    /// A token file where text is wanted.
    #[error("{}: holds tokens already; text, JSONL and Parquet files can be tokenized", path.display())]
    AlreadyTokens {
        /// The file.
        path: PathBuf,
    },
}
