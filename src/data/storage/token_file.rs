//! [`TokenFile`]: a token store in a file.

use super::llm_c::{is_llm_c, llm_c, nano_gpt};
use super::megatron::megatron;
use super::own::{ignored_label, is_own, own};
use super::{DataFile, DocumentBounds, Layout, TokenStore};
use crate::data::{DataError, FileError, IGNORED_LABEL, TokenDtype};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes that are read at once; also the maximum memory of a read in addition to its result.
const CHUNK_BYTES: usize = 1 << 16;

/// The formats of token files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileFormat {
    /// nanoGPT's `.bin`: 16-bit or 32-bit tokens without header.
    NanoGpt,
    /// llm.c's `.bin`: a header of 1024 bytes, then 16- or 32-bit tokens.
    LlmC,
    /// Megatron's pair of `.idx` and `.bin`.
    Megatron,
    /// Our own format, written by `ulysses data prepare`.
    Own,
}

impl fmt::Display for FileFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NanoGpt => "nanoGPT .bin",
            Self::LlmC => "llm.c .bin",
            Self::Megatron => "Megatron .idx/.bin",
            Self::Own => "ulysses .tokens",
        })
    }
}

/// Options for reading a token file.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenFileOptions {
    /// The vocabulary size: reading a larger id is an error. By default, ids are checked against the vocabulary size
    /// in the file, if any, and against 32 bits.
    pub vocab_size: Option<usize>,
    /// The token that separates documents in formats without document bounds. The file is scanned once to find it.
    /// nanoGPT writes it after a document, llm.c before.
    pub end_of_document: Option<u32>,
    /// The type of tokens in a file without header (nanoGPT's). By default 16 bits, if the vocabulary has at most 65,536 ids and
    /// the file does not begin as one of 32 bits.
    pub token_dtype: Option<TokenDtype>,
}

/// A token file. Opening reads only headers; tokens are read on access.
///
/// Every id is checked against [`TokenFileOptions::vocab_size`] when it is read.
#[derive(Debug)]
pub struct TokenFile {
    file: DataFile,
    layout: Layout,
    vocab_size: usize,
}

impl TokenFile {
    /// Detects the format of a file by its magic number or name; `None` for text.
    ///
    /// Our own format and llm.c's have a magic number, Megatron's has an index, and any other `.bin` is nanoGPT's.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn detect(path: &Path) -> Result<Option<FileFormat>, DataError> {
        let extension = path.extension().unwrap_or_default();
        if extension == "idx" || (extension == "bin" && path.with_extension("idx").exists()) {
            return Ok(Some(FileFormat::Megatron));
        }
        let beginning = DataFile::open(path)?.beginning::<8>()?;
        Ok(match () {
            () if is_own(&beginning) || extension == "tokens" => Some(FileFormat::Own),
            () if is_llm_c(&beginning) => Some(FileFormat::LlmC),
            () if extension == "bin" => Some(FileFormat::NanoGpt),
            () => None,
        })
    }

    /// Opens a file of a known format; for a Megatron pair, either name is valid.
    ///
    /// # Errors
    /// When a file cannot be read, has another format, is truncated, or contains no tokens.
    pub fn open(path: &Path, format: FileFormat, options: TokenFileOptions) -> Result<Self, DataError> {
        let tokens: PathBuf = match format {
            FileFormat::Megatron => path.with_extension("bin"),
            _ => path.to_owned(),
        };
        let file = DataFile::open(&tokens)?;
        if file.len() == 0 {
            return Err(FileError::NoTokens { path: tokens }.into());
        }
        let layout = match format {
            FileFormat::NanoGpt => nano_gpt(&file, &options)?,
            FileFormat::LlmC => llm_c(&file)?,
            FileFormat::Megatron => megatron(&file, DataFile::open(&path.with_extension("idx"))?)?,
            FileFormat::Own => own(&file)?,
        };
        if layout.num_tokens == 0 {
            return Err(FileError::NoTokens { path: tokens }.into());
        }
        let of_file = layout.made_by.map(|(vocab_size, _)| vocab_size);
        // Ids have 32 bits; the largest one is reserved for ignored labels.
        let limits = [of_file, options.vocab_size, Some(u32::MAX as usize)];
        let vocab_size = limits.into_iter().flatten().min().unwrap_or_default();
        let mut opened = Self { file, layout, vocab_size };
        if let (Some(separator), DocumentBounds::One) = (options.end_of_document, &opened.layout.documents) {
            opened.layout.documents = DocumentBounds::Found(opened.find_ends(separator)?);
        }
        let last = opened.layout.documents.len() - 1;
        let end = opened.document_end(last)?;
        if end != opened.layout.num_tokens {
            let (file, tokens) = (&opened.file, opened.layout.num_tokens);
            return Err(file
                .field(file.len() - 8, "the end of the last document", end as u64, tokens.to_string())
                .into());
        }
        Ok(opened)
    }

    /// Returns the format of the file.
    pub fn format(&self) -> FileFormat {
        self.layout.format
    }

    /// Returns the path of the file with the tokens.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns the bytes per token.
    pub fn token_bytes(&self) -> usize {
        self.layout.token_type.width()
    }

    /// Returns whether the file contains labels.
    pub fn has_labels(&self) -> bool {
        self.layout.labels_at.is_some()
    }

    /// Returns the vocabulary size and the BLAKE3 of the tokenizer, if the file contains them.
    pub fn made_by(&self) -> Option<(usize, [u8; 32])> {
        self.layout.made_by
    }

    fn find_ends(&self, separator: u32) -> Result<Vec<usize>, DataError> {
        let (count, is_before) = (self.layout.num_tokens, self.layout.format == FileFormat::LlmC);
        let mut ends = Vec::new();
        self.decode(self.layout.tokens_at, 0..count, |at, id| {
            if id == i64::from(separator) {
                ends.push(if is_before { at } else { at + 1 });
            }
            Ok(())
        })?;
        ends.retain(|&end| end > 0);
        if ends.last() != Some(&count) {
            ends.push(count);
        }
        Ok(ends)
    }

    /// Calls `each` with the elements of a section, in order.
    fn decode(
        &self,
        section: u64,
        range: Range<usize>,
        mut each: impl FnMut(usize, i64) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let (token_type, width) = (self.layout.token_type, self.token_bytes());
        let mut buffer = vec![0; CHUNK_BYTES.min(range.len() * width)];
        for first in range.clone().step_by(CHUNK_BYTES / width) {
            let count = (range.end - first).min(CHUNK_BYTES / width);
            let bytes = &mut buffer[..count * width];
            self.file.read(section + (first * width) as u64, bytes)?;
            for (at, bytes) in bytes.chunks_exact(width).enumerate() {
                each(first + at, token_type.decode(bytes))?;
            }
        }
        Ok(())
    }

    /// Returns an id of the vocabulary, or an error with its offset.
    fn checked(&self, section: u64, at: usize, id: i64) -> Result<u32, FileError> {
        let known = u32::try_from(id).ok().filter(|&known| (known as usize) < self.vocab_size);
        known.ok_or_else(|| FileError::TokenOutOfVocab {
            path: self.path().to_owned(),
            offset: section + (at * self.token_bytes()) as u64,
            id,
            vocab_size: self.vocab_size,
        })
    }
}

impl TokenStore for TokenFile {
    fn num_tokens(&self) -> usize {
        self.layout.num_tokens
    }

    fn num_documents(&self) -> usize {
        self.layout.documents.len()
    }

    fn document_end(&self, index: usize) -> Result<usize, DataError> {
        let Layout { documents, num_tokens, .. } = &self.layout;
        let end = |index| documents.end(index, &self.file, *num_tokens);
        let (start, end) = (index.checked_sub(1).map_or(Ok(0), end)?, end(index)?);
        if end <= start {
            let path = self.path().to_owned();
            return Err(FileError::EmptyDocument { path, index, start, end }.into());
        }
        Ok(end)
    }

    fn read_tokens(&self, range: Range<usize>, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        let section = self.layout.tokens_at;
        tokens.reserve(range.len());
        Ok(self.decode(section, range, |at, id| {
            tokens.push(self.checked(section, at, id)?);
            Ok(())
        })?)
    }

    fn read_labels(&self, range: Range<usize>, labels: &mut Vec<i64>) -> Result<(), DataError> {
        let section = self.layout.labels_at.unwrap_or(self.layout.tokens_at);
        let ignored = self.has_labels().then(|| i64::from(ignored_label(self.token_bytes())));
        labels.reserve(range.len());
        Ok(self.decode(section, range, |at, id| {
            let is_ignored = Some(id) == ignored;
            labels.push(if is_ignored { IGNORED_LABEL } else { self.checked(section, at, id)?.into() });
            Ok(())
        })?)
    }

    fn has_labels(&self) -> bool {
        Self::has_labels(self)
    }

    fn checks_vocab(&self, vocab_size: usize) -> bool {
        self.vocab_size <= vocab_size
    }
}
