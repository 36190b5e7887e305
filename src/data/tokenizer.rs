//! Text to token ids.

use super::DataError;
use std::path::Path;

/// Turns the text of a document into token ids.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    kind: Kind,
    vocab_size: usize,
}

#[derive(Debug, Clone)]
enum Kind {
    Bytes,
    HuggingFace(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Every byte of the UTF-8 text is a token: a vocabulary of 256.
    pub fn bytes() -> Self {
        Self { kind: Kind::Bytes, vocab_size: 256 }
    }

    /// Loads a Hugging Face `tokenizer.json`.
    ///
    /// Truncation and padding that the file asks for are switched off: rows are cut and padded by packing, and
    /// no token may be lost before. Special tokens that it puts around a text (such as a leading BOS) are kept,
    /// one set per document.
    ///
    /// # Errors
    /// When the file does not exist, cannot be read, or is no tokenizer.
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        let load_error = |source| DataError::TokenizerLoad { path: path.to_owned(), source };
        let json = std::fs::read(path).map_err(|error| load_error(error.into()))?;
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json).map_err(load_error)?;
        tokenizer.with_truncation(None).map_err(load_error)?;
        tokenizer.with_padding(None);
        // Ids may have gaps, so the number of entries would be too small a vocabulary.
        let vocab_size = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        Ok(Self { kind: Kind::HuggingFace(Box::new(tokenizer)), vocab_size })
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The tokens of one document, which `path` names in errors.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str, path: &Path) -> Result<Vec<u32>, DataError> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace(tokenizer) => {
                let add_special_tokens = true;
                let encoding = tokenizer
                    .encode_fast(text, add_special_tokens)
                    .map_err(|source| DataError::Tokenize { path: path.to_owned(), source })?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }
}
