//! The `.bin` formats of nanoGPT and llm.c.

use super::{DataFile, DocumentBounds, FileFormat, Layout, TokenFileOptions, TokenType};
use crate::data::{FileError, TokenDtype};

/// The header: 256 32-bit integers.
const HEADER_BYTES: u64 = 1024;

/// Magic number, version and token type: GPT-2's 16-bit and Llama 3's 32-bit tokens (`dev/data/data_common.py` of
/// llm.c).
const KINDS: [(u32, u32, TokenType); 2] = [(20_240_520, 1, TokenType::U16), (20_240_801, 7, TokenType::U32)];

/// Returns whether a file has llm.c's magic number. nanoGPT's files cannot: its halves are not ids of GPT-2.
pub(super) fn is_llm_c(beginning: &[u8]) -> bool {
    KINDS.iter().any(|(magic, _, _)| beginning.starts_with(&magic.to_le_bytes()))
}

/// Reads llm.c's header: magic, version, number of tokens.
pub(super) fn llm_c(file: &DataFile) -> Result<Layout, FileError> {
    if file.len() < HEADER_BYTES {
        return Err(file.truncated(0, HEADER_BYTES));
    }
    let number = |index: u64| Ok(u32::from_le_bytes(file.array(4 * index)?));
    let (magic, version, claimed) = (number(0)?, number(1)?, number(2)?);
    let Some(&(_, expected, token_type)) = KINDS.iter().find(|kind| kind.0 == magic) else {
        let found = file.beginning::<8>()?;
        let expected = "llm.c's magic number 20240520 or 20240801";
        return Err(FileError::WrongMagic { path: file.path().to_owned(), expected, found });
    };
    if version != expected {
        return Err(file.field(4, "the version", version.into(), expected.to_string()));
    }
    let bytes = file.len() - HEADER_BYTES;
    // Both are below 2^35.
    let needed = u64::from(claimed) * token_type.width() as u64;
    if needed > bytes {
        return Err(file.truncated(HEADER_BYTES, needed));
    }
    if needed < bytes {
        let fitting = (bytes / token_type.width() as u64).to_string();
        return Err(file.field(8, "the number of tokens", claimed.into(), fitting));
    }
    Ok(headerless(FileFormat::LlmC, token_type, HEADER_BYTES, claimed as usize))
}

/// Returns the layout of nanoGPT's files: tokens without header, 16 bits each unless the options say otherwise.
pub(super) fn nano_gpt(file: &DataFile, options: &TokenFileOptions) -> Result<Layout, FileError> {
    let unknown = |reason: String| FileError::UnknownTokenType { path: file.path().to_owned(), reason };
    let token_type = match (options.token_dtype, options.vocab_size) {
        (Some(TokenDtype::Uint32), _) => TokenType::U32,
        (Some(TokenDtype::Uint16), _) => TokenType::U16,
        (None, Some(vocab_size)) if vocab_size > 1 << 16 => {
            return Err(unknown(format!("and the vocabulary has {vocab_size} ids")));
        }
        (None, _) if looks_wide(file)? => {
            return Err(unknown("and every second group of 16 bits at its beginning is below 16".to_owned()));
        }
        (None, _) => TokenType::U16,
    };
    let file_bytes = file.len();
    let width = token_type.width();
    if !file_bytes.is_multiple_of(width as u64) {
        return Err(FileError::OddSize { path: file.path().to_owned(), file_bytes, width });
    }
    let num_tokens = usize::try_from(file_bytes / width as u64)
        .map_err(|_| file.field(0, "the file's size", file_bytes, "what this machine can address"))?;
    Ok(headerless(FileFormat::NanoGpt, token_type, 0, num_tokens))
}

/// Returns whether a file begins with 32-bit tokens: every second half is that of an id below 2^20, and others are not.
fn looks_wide(file: &DataFile) -> Result<bool, FileError> {
    let beginning = file.beginning::<4096>()?;
    let (tokens, _) = beginning.as_chunks::<4>();
    let is_wide = |token: &[u8; 4]| token[2] < 16 && token[3] == 0;
    Ok(tokens.len() >= 8
        && tokens.iter().all(is_wide)
        && tokens.iter().any(|token| token[0] >= 16 || token[1] > 0))
}

fn headerless(format: FileFormat, token_type: TokenType, tokens_at: u64, num_tokens: usize) -> Layout {
    let (labels_at, documents, made_by) = (None, DocumentBounds::One, None);
    Layout { format, token_type, tokens_at, num_tokens, labels_at, documents, made_by }
}
