//! Megatron's `.idx`, the index of the `.bin` file next to it.
//!
//! The format of `megatron/core/datasets/indexed_dataset.py`: magic, version (8 bytes), type code (1), number of
//! sequences and of document starts (8 each); then the lengths of the sequences (4 each), their byte offsets in the
//! `.bin` (8 each), and the first sequence of each document (8 each), followed by the number of sequences. The rest
//! (the modes of multimodal sequences) is not read.

use super::table::Table;
use super::{DataFile, DocumentBounds, FileFormat, Layout, TokenType};
use crate::data::FileError;

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// Offsets of the type code, the counts and the lengths.
const CODE_AT: u64 = 17;
const SEQUENCES_AT: u64 = 18;
const STARTS_AT: u64 = 26;
const LENGTHS_AT: u64 = 34;

/// Reads the index of `tokens`.
pub(super) fn megatron(tokens: &DataFile, index: DataFile) -> Result<Layout, FileError> {
    let found: [u8; MAGIC.len()] = index.array(0)?;
    if &found != MAGIC {
        let (path, expected) = (index.path().to_owned(), r"Megatron's magic MMIDIDX\0\0");
        return Err(FileError::WrongMagic { path, expected, found: found.to_vec() });
    }
    let version = number(&index, 9)?;
    if version != 1 {
        return Err(index.field(9, "the version", version, "1"));
    }
    let token_type = token_type(&index)?;
    let width = token_type.width() as u64;
    let (num_sequences, num_starts) = counts(&index)?;
    let pointers_at = LENGTHS_AT + 4 * num_sequences as u64;
    let starts_at = pointers_at + 8 * num_sequences as u64;
    let (pointers, starts) = (Table::new(pointers_at, num_sequences), Table::new(starts_at, num_starts));

    // The last sequence must end at the end of the tokens, unless the index is of another file.
    let last = num_sequences - 1;
    let last_length = i32::from_le_bytes(index.array(LENGTHS_AT + 4 * last as u64)?);
    let last_start = pointers.get(&index, last)?;
    let claimed = u64::try_from(last_length).ok().and_then(|length| (length * width).checked_add(last_start));
    if claimed != Some(tokens.len()) {
        let valid = format!(
            "one with which its {last_length} tokens end at byte {}, the end of the .bin; .idx and .bin do not match",
            tokens.len()
        );
        return Err(index.field(pointers.offset(last), "the last sequence's pointer", last_start, valid));
    }
    if !tokens.len().is_multiple_of(width) {
        let (path, file_bytes) = (tokens.path().to_owned(), tokens.len());
        return Err(FileError::OddSize { path, file_bytes, width: token_type.width() });
    }
    let num_tokens = usize::try_from(tokens.len() / width)
        .map_err(|_| index.field(0, "the size of the .bin", tokens.len(), "what this machine can address"))?;
    if pointers.get(&index, 0)? != 0 {
        return Err(index.field(pointers_at, "the first sequence's pointer", pointers.get(&index, 0)?, "0"));
    }
    // Some writers omit the document starts; then every sequence is a document.
    let starts = (num_starts > 1).then_some(starts);
    if let Some(starts) = &starts {
        for (at, expected, field) in
            [(0, 0, "the first document index"), (num_starts - 1, num_sequences, "the last document index")]
        {
            let found = starts.get(&index, at)?;
            if found != expected as u64 {
                return Err(index.field(starts.offset(at), field, found, expected.to_string()));
            }
        }
    }
    let documents = DocumentBounds::Index { file: index, pointers, starts, width };
    let (format, labels_at, made_by) = (FileFormat::Megatron, None, None);
    Ok(Layout { format, token_type, tokens_at: 0, num_tokens, labels_at, documents, made_by })
}

fn token_type(index: &DataFile) -> Result<TokenType, FileError> {
    let [code] = index.array(CODE_AT)?;
    match code {
        1 => Ok(TokenType::U8),
        3 => Ok(TokenType::I16),
        4 => Ok(TokenType::I32),
        5 => Ok(TokenType::I64),
        8 => Ok(TokenType::U16),
        _ => {
            let valid = "1 (u8), 3 (i16), 4 (i32), 5 (i64) or 8 (u16)";
            Err(index.field(CODE_AT, "the type code", code.into(), valid))
        }
    }
}

/// Reads the numbers of sequences, at least one, and of document starts; checks that their tables fit the file.
fn counts(index: &DataFile) -> Result<(usize, usize), FileError> {
    let (sequences, starts) = (number(index, SEQUENCES_AT)?, number(index, STARTS_AT)?);
    if sequences == 0 {
        return Err(index.field(SEQUENCES_AT, "the number of sequences", 0, "at least 1"));
    }
    let available = index.len() - LENGTHS_AT;
    if sequences > available / 12 {
        let valid = format!("at most {}, which the file has room for", available / 12);
        return Err(index.field(SEQUENCES_AT, "the number of sequences", sequences, valid));
    }
    let available = (available - 12 * sequences) / 8;
    if starts > available {
        let valid = format!("at most {available}, which the file has room for");
        return Err(index.field(STARTS_AT, "the number of document indices", starts, valid));
    }
    // Both tables are in a file, so they fit 64 bits; they are not loaded into memory.
    let fits = |count: u64| {
        usize::try_from(count)
            .map_err(|_| index.field(SEQUENCES_AT, "a count", count, "what this machine can address"))
    };
    Ok((fits(sequences)?, fits(starts)?))
}

fn number(index: &DataFile, offset: u64) -> Result<u64, FileError> {
    Ok(u64::from_le_bytes(index.array(offset)?))
}
