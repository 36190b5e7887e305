//! Our own format: header, tokens, labels, document ends.
//!
//! The README of `data` describes the header.

use super::table::Table;
use super::{DataFile, DocumentBounds, FileFormat, Layout, TokenType};
use crate::data::FileError;

const MAGIC: &[u8; 8] = b"ulytoken";
pub(in crate::data) const HEADER_BYTES: usize = 128;
const CHECKSUM_AT: usize = 96;
const VERSION: u32 = 1;
const HAS_LABELS: u64 = 1;

/// The header of our own format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) struct Header {
    /// Bytes per token.
    pub(in crate::data) width: usize,
    pub(in crate::data) num_tokens: u64,
    pub(in crate::data) num_documents: u64,
    pub(in crate::data) has_labels: bool,
    pub(in crate::data) vocab_size: u64,
    pub(in crate::data) tokenizer: [u8; 32],
}

/// Returns the value of an ignored label in `width` bytes, which is also the maximum vocabulary size.
pub(in crate::data) fn ignored_label(width: usize) -> u32 {
    if width == 2 { u16::MAX.into() } else { u32::MAX }
}

impl Header {
    pub(in crate::data) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        // The width is 2 or 4.
        bytes[12..16].copy_from_slice(&(self.width as u32).to_le_bytes());
        let flags = if self.has_labels { HAS_LABELS } else { 0 };
        let numbers = [self.num_tokens, self.num_documents, flags, self.vocab_size];
        for (slot, number) in bytes[16..48].chunks_exact_mut(8).zip(numbers) {
            slot.copy_from_slice(&number.to_le_bytes());
        }
        bytes[48..80].copy_from_slice(&self.tokenizer);
        let checksum = blake3::hash(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(checksum.as_bytes());
        bytes
    }

    /// Returns the bytes of the tokens or of the labels, with padding.
    pub(in crate::data) fn section_bytes(&self) -> Option<u64> {
        self.num_tokens.checked_mul(self.width as u64)?.checked_next_multiple_of(8)
    }

    fn file_bytes(&self) -> Option<u64> {
        let sections = self.section_bytes()?.checked_mul(if self.has_labels { 2 } else { 1 })?;
        self.num_documents.checked_mul(8)?.checked_add(sections)?.checked_add(HEADER_BYTES as u64)
    }

    fn read(file: &DataFile) -> Result<Self, FileError> {
        let bytes: [u8; HEADER_BYTES] = file.array(0)?;
        let path = || file.path().to_owned();
        if &bytes[..8] != MAGIC {
            let (expected, found) = ("the magic `ulytoken`", bytes[..8].to_vec());
            return Err(FileError::WrongMagic { path: path(), expected, found });
        }
        let number = |at: usize, width: usize| {
            let mut wide = [0; 8];
            wide[..width].copy_from_slice(&bytes[at..at + width]);
            u64::from_le_bytes(wide)
        };
        // Before the checksum, whose algorithm may depend on the version.
        if number(8, 4) != u64::from(VERSION) {
            return Err(file.field(8, "the version", number(8, 4), VERSION.to_string()));
        }
        if blake3::hash(&bytes[..CHECKSUM_AT]).as_bytes() != &bytes[CHECKSUM_AT..] {
            return Err(FileError::HeaderChecksum { path: path(), header_bytes: HEADER_BYTES });
        }
        let width = match number(12, 4) {
            2 => 2,
            4 => 4,
            found => return Err(file.field(12, "the width of a token", found, "2 or 4")),
        };
        let has_labels = match number(32, 8) {
            0 => false,
            HAS_LABELS => true,
            found => return Err(file.field(32, "the flags", found, "0 or 1")),
        };
        let mut tokenizer = [0; 32];
        tokenizer.copy_from_slice(&bytes[48..80]);
        let (num_tokens, num_documents, vocab_size) = (number(16, 8), number(24, 8), number(40, 8));
        Ok(Self { width, num_tokens, num_documents, has_labels, vocab_size, tokenizer })
    }
}

/// Returns whether a file has our magic number.
pub(super) fn is_own(beginning: &[u8]) -> bool {
    beginning.starts_with(MAGIC)
}

/// Reads the header, and checks the size of the file.
pub(super) fn own(file: &DataFile) -> Result<Layout, FileError> {
    let header = Header::read(file)?;
    let counts = "as many as the file has room for";
    let expected = header
        .file_bytes()
        .ok_or_else(|| file.field(16, "the number of tokens", header.num_tokens, counts))?;
    if expected > file.len() {
        return Err(file.truncated(0, expected));
    }
    if expected < file.len() {
        let valid = format!("such that the file has {expected} bytes, not {}", file.len());
        return Err(file.field(16, "the number of tokens", header.num_tokens, valid));
    }
    let possible = header.num_tokens.min(1)..=header.num_tokens;
    if !possible.contains(&header.num_documents) {
        let valid = format!("{} to {}", possible.start(), possible.end());
        return Err(file.field(24, "the number of documents", header.num_documents, valid));
    }
    if header.vocab_size > ignored_label(header.width).into() {
        let valid = format!("at most {}", ignored_label(header.width));
        return Err(file.field(40, "the size of the vocabulary", header.vocab_size, valid));
    }
    let fits = |count: u64| {
        usize::try_from(count).map_err(|_| file.field(16, "a count", count, "what this machine can address"))
    };
    let section = header.section_bytes().unwrap_or_default();
    let tokens_at = HEADER_BYTES as u64;
    let labels_at = header.has_labels.then_some(tokens_at + section);
    let ends_at = labels_at.unwrap_or(tokens_at) + section;
    Ok(Layout {
        format: FileFormat::Own,
        token_type: if header.width == 2 { TokenType::U16 } else { TokenType::U32 },
        tokens_at,
        num_tokens: fits(header.num_tokens)?,
        labels_at,
        documents: DocumentBounds::Ends(Table::new(ends_at, fits(header.num_documents)?)),
        made_by: Some((fits(header.vocab_size)?, header.tokenizer)),
    })
}
