//! The layout of a token file, from its header or index.

use super::table::Table;
use super::{DataFile, FileFormat};
use crate::data::FileError;

/// The integer type of a token, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    U8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl TokenType {
    pub(super) fn width(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Decodes `width` bytes.
    pub(super) fn decode(self, bytes: &[u8]) -> i64 {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        match self {
            Self::U8 | Self::U16 | Self::U32 => bits as i64,
            Self::I16 => i64::from(bits as u16 as i16),
            Self::I32 => i64::from(bits as u32 as i32),
            Self::I64 => bits as i64,
        }
    }
}

/// The bounds of documents.
#[derive(Debug)]
pub(super) enum DocumentBounds {
    /// None: the file is one document.
    One,
    /// Ends that were found by scanning the file.
    Found(Vec<usize>),
    /// A table of ends in the token file.
    Ends(Table),
    /// A separate index: the starts of sequences, in bytes, and the first sequence of each document.
    Index { file: DataFile, pointers: Table, starts: Option<Table>, width: u64 },
}

/// The layout of a token file.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) format: FileFormat,
    pub(super) token_type: TokenType,
    pub(super) tokens_at: u64,
    pub(super) num_tokens: usize,
    /// The offset of the labels, which have the same type; its largest value means ignored.
    pub(super) labels_at: Option<u64>,
    pub(super) documents: DocumentBounds,
    /// Vocabulary size and hash of the tokenizer, if the file contains them.
    pub(super) made_by: Option<(usize, [u8; 32])>,
}

impl DocumentBounds {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::One => 1,
            Self::Found(ends) => ends.len(),
            Self::Ends(table) => table.len(),
            Self::Index { pointers, starts: None, .. } => pointers.len(),
            // There is one more start than documents.
            Self::Index { starts: Some(starts), .. } => starts.len() - 1,
        }
    }

    /// Returns the end of a document, at most `num_tokens`.
    pub(super) fn end(&self, index: usize, tokens: &DataFile, num_tokens: usize) -> Result<usize, FileError> {
        match self {
            Self::One => Ok(num_tokens),
            Self::Found(ends) => Ok(ends[index]),
            Self::Ends(table) => {
                let (end, offset) = (table.get(tokens, index)?, table.offset(index));
                checked(tokens, offset, "the end of a document", end, num_tokens)
            }
            Self::Index { file, pointers, starts, width } => {
                let next = match starts {
                    None => index + 1,
                    Some(starts) => {
                        let next = starts.get(file, index + 1)?;
                        checked(file, starts.offset(index + 1), "a document index", next, pointers.len())?
                    }
                };
                if next == pointers.len() {
                    return Ok(num_tokens);
                }
                let (bytes, offset) = (pointers.get(file, next)?, pointers.offset(next));
                if bytes % width != 0 {
                    return Err(file.field(
                        offset,
                        "a sequence pointer",
                        bytes,
                        format!("a multiple of {width}"),
                    ));
                }
                let end = checked(file, offset, "a sequence pointer", bytes / width, num_tokens);
                end.map_err(|_| file.field(offset, "a sequence pointer", bytes, "a place in the .bin file"))
            }
        }
    }
}

/// Returns `found` if it is at most `max`.
fn checked(
    file: &DataFile,
    offset: u64,
    field: &'static str,
    found: u64,
    max: usize,
) -> Result<usize, FileError> {
    let valid = usize::try_from(found).ok().filter(|&found| found <= max);
    valid.ok_or_else(|| file.field(offset, field, found, format!("0 to {max}")))
}
