//! The size of the text that tokens represent.

use super::{DataError, PackedSequences, Packing, Tokenizer};
use std::path::Path;

/// Returns the bytes of the predicted text: all documents without the first token of each (in [`Packing::Concat`], of the
/// first only).
///
/// The text is the decoded tokens, so text that the tokenizer drops (special tokens, and in some tokenizers runs of
/// spaces) does not count.
///
/// # Errors
/// When the tokenizer does not know a token, or the documents cannot be read.
pub fn predicted_text_bytes(sequences: &PackedSequences, tokenizer: &Tokenizer) -> Result<u64, DataError> {
    let documents = sequences.documents();
    if tokenizer.hash() == Tokenizer::bytes().hash() {
        return Ok(sequences.num_predicted_tokens() as u64);
    }
    let text_bytes = |tokens: &[u32]| {
        let skip_special_tokens = true;
        let text = tokenizer.decode_with(tokens, skip_special_tokens, Path::new("the data"))?;
        Ok::<_, DataError>(text.len() as u64)
    };
    let mut tokens = Vec::new();
    let mut bytes = 0;
    for index in 0..documents.num_documents() {
        tokens.clear();
        documents.read_tokens(documents.document(index)?, &mut tokens)?;
        let is_predicted = sequences.packing() == Packing::Concat && index > 0;
        let first = if is_predicted { 0 } else { text_bytes(&tokens[..1])? };
        bytes += text_bytes(&tokens)?.saturating_sub(first);
    }
    Ok(bytes)
}
