//! Errors of data files, with their position.

use std::path::PathBuf;

impl FileError {
    /// Returns whether one line, row or element of a file is not valid.
    pub(super) fn is_of_a_line(&self) -> bool {
        use FileError::{ChatTemplate, Line, LineField, LineNotJson, LineNotUtf8};
        matches!(
            self,
            LineNotUtf8 { .. } | LineNotJson { .. } | LineField { .. } | Line { .. } | ChatTemplate { .. }
        )
    }
}

/// A data file with an invalid format or invalid contents.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// An I/O error.
    #[error("{}: cannot {operation}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        operation: &'static str,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A file that is shorter than its header says, or that shrank.
    #[error(
        "{}: truncated: bytes {offset} to {} are needed, but the file has {file_bytes}; it is incomplete, or shrank \
         while it was read", path.display(), offset.saturating_add(*needed_bytes)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The offset of the read.
        offset: u64,
        /// The number of bytes to read.
        needed_bytes: u64,
        /// The size of the file now.
        file_bytes: u64,
    },
    /// A size that is not a multiple of the token size.
    #[error(
        "{}: {file_bytes} bytes are not a multiple of the token size, {width} bytes; a file without a header is \
         read as nanoGPT's 16-bit tokens", path.display()
    )]
    OddSize {
        /// The file.
        path: PathBuf,
        /// The size of the file.
        file_bytes: u64,
        /// Bytes per token.
        width: usize,
    },
    /// A wrong magic number.
    #[error("{}: byte 0: expected {expected}, found {found:?}", path.display())]
    WrongMagic {
        /// The file.
        path: PathBuf,
        /// The magic number of the format.
        expected: &'static str,
        /// The first bytes of the file.
        found: Vec<u8>,
    },
    /// An invalid number in a header or an index.
    #[error("{}: byte {offset}: {field} is {found}; valid is {valid}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The offset of the number.
        offset: u64,
        /// The name of the field.
        field: &'static str,
        /// The value of the field.
        found: u64,
        /// The valid values.
        valid: String,
    },
    /// A header with a wrong checksum.
    #[error("{}: bytes 0 to {header_bytes}: the checksum of the header is wrong: the file is damaged", path.display())]
    HeaderChecksum {
        /// The file.
        path: PathBuf,
        /// The size of the header.
        header_bytes: usize,
    },
    /// A token or label outside the vocabulary.
    #[error("{}: byte {offset}: token id {id} is outside the vocabulary 0..{vocab_size}", path.display())]
    TokenOutOfVocab {
        /// The file.
        path: PathBuf,
        /// The offset of the token.
        offset: u64,
        /// The id.
        id: i64,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A file without tokens.
    #[error("{}: contains no tokens", path.display())]
    NoTokens {
        /// The file.
        path: PathBuf,
    },
    /// A document that ends at or before its start.
    #[error(
        "{}: document {index}, counted from 0, starts at token {start} and ends at {end}; every document needs a \
         token", path.display()
    )]
    EmptyDocument {
        /// The file.
        path: PathBuf,
        /// The document.
        index: usize,
        /// The first token of the document.
        start: usize,
        /// The end of the document, exclusive.
        end: usize,
    },
    /// Tokens of another tokenizer.
    #[error(
        "{}: the file was prepared with another tokenizer (vocabulary size {vocab_size}, BLAKE3 {found}); give its \
         tokenizer.json", path.display()
    )]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
        /// The vocabulary size of that tokenizer.
        vocab_size: usize,
        /// The abbreviated hash of that tokenizer.
        found: String,
    },
    /// A line that is not valid UTF-8.
    #[error("{}, line {line}: not valid UTF-8 (byte {offset} of the line)", path.display())]
    LineNotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The first invalid byte of the line.
        offset: usize,
    },
    /// A line that is not valid JSON.
    #[error("{}, line {line}, column {column}: {reason}", path.display())]
    LineNotJson {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The byte of the line, from 1.
        column: usize,
        /// The error of the parser.
        reason: String,
    },
    /// A field with an invalid value.
    #[error("{}, line {line}, `{field}`: {reason}", path.display())]
    LineField {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The field.
        field: String,
        /// The error of the parser.
        reason: String,
    },
    /// A line that is valid JSON, but not a document.
    #[error("{}, line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The reason.
        problem: String,
    },
    /// A conversation that the tokenizer's chat template cannot render.
    #[error("{}, line {line}: the chat template fails", path.display())]
    ChatTemplate {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The error of the template engine.
        source: ulysses_chat::Error,
    },
    /// A Parquet file that cannot be read.
    #[cfg(feature = "parquet")]
    #[error("{}, row {row}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The first row, from 0, that was not read.
        row: u64,
        /// The error of the library.
        source: parquet::errors::ParquetError,
    },
    /// A named file of a format that is never read.
    #[error("{}: {advice}", path.display())]
    NotRead {
        /// The file.
        path: PathBuf,
        /// The detected format and the remedy.
        advice: &'static str,
    },
    /// A file without header whose token type is not known.
    #[error(
        "{}: a file without a header does not say whether its tokens have 16 or 32 bits, {reason}; set \
         `ulysses.token_dtype` to \"uint16\" or \"uint32\"", path.display()
    )]
    UnknownTokenType {
        /// The file.
        path: PathBuf,
        /// Why it matters.
        reason: String,
    },
    /// A file format that this build does not support.
    #[error(
        "{}: this build lacks the cargo feature `{feature}`; build with it, or write JSONL, as with \
         `datasets.Dataset.from_parquet(FILE).to_json(\"train.jsonl\")` in Python", path.display()
    )]
    NotBuilt {
        /// The file.
        path: PathBuf,
        /// The cargo feature that reads it.
        feature: &'static str,
    },
    /// A token file where text is expected.
    #[error("{}: contains tokens already; only text, JSONL and Parquet files can be tokenized", path.display())]
    AlreadyTokens {
        /// The file.
        path: PathBuf,
    },
}
